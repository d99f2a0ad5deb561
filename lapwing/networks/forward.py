"""Running the model as it is: its outputs, what must not happen while it runs, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lapwing.core.data import Inputs, call, map_tensors, take, tensors_in
from lapwing.errors import ModelError

FEW = 32  # samples that show whether two forward passes agree
REPEATED = {torch.float64: 1e-12, torch.float32: 1e-5}  # by how much outputs may differ where kernels reorder sums


@contextlib.contextmanager
def recording(tensors: Mapping[str, Tensor], names: Collection[str], plain: bool) -> Iterator[None]:
    """Record gradients for the named parameters and no others while the model runs; restore all flags.

    ``plain`` switches vendors' kernels off (see ``needs_plain_kernels``).
    """
    changed = [p for name, p in tensors.items() if p.requires_grad != (name in names)]
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(plain_kernels(plain))
        try:
            for parameter in changed:
                parameter.requires_grad_(not parameter.requires_grad)
            yield
        finally:
            for parameter in changed:
                parameter.requires_grad_(not parameter.requires_grad)


def is_recurrent(model: nn.Module) -> bool:
    """Return whether any layer is recurrent: those have fused kernels, and autograd cannot batch their gradients."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def needs_plain_kernels(model: nn.Module) -> bool:
    """Return whether vendors' kernels must be off: fused recurrent ones hide products, 16-bit oneDNN ones may crash."""
    half = any(p.is_cpu and p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return half or is_recurrent(model)


Call = TypeVar("Call", bound=Callable[..., Any])


def outside_autocast(call: Call) -> Call:
    """Decorate a function to run without autocast, which is for training: sums and factors must keep their dtype."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        devices = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        with contextlib.ExitStack() as stack:
            for kind in devices:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return call(*args, **kwargs)

    return run  # type: ignore[return-value]


def outside_inference(call: Call) -> Call:
    """Decorate a function to run outside inference mode, whose tensors could take part in no later gradient."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return call(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return call(*args, **kwargs)

    return run  # type: ignore[return-value]


@contextlib.contextmanager
def plain_kernels(plain: bool) -> Iterator[None]:
    """Use PyTorch's own kernels instead of those of cuDNN and oneDNN, if ``plain``."""
    if not plain:
        yield
        return
    with quiet(), torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
        yield


@contextlib.contextmanager
def twice_differentiable(wanted: bool) -> Iterator[None]:
    """Run attention in plain operations, if ``wanted``: its fused kernels have no second derivative."""
    if not wanted:
        yield
        return
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence PyTorch's warnings about its internals (no batching rule, no TF32), which do not concern a result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def refusing_changes(model: nn.Module) -> Iterator[None]:
    """Restore weights and buffers that the model changes when it runs, and raise; errors of the run have priority."""
    buffers = [(module, key, buffer) for module in model.modules() for key, buffer in module._buffers.items()]
    copies = [(t, t.detach().clone()) for t in (*model.parameters(), *(b for _, _, b in buffers if b is not None))]
    try:
        yield
    finally:
        changed = _restored(buffers, copies)
    if changed:
        raise ModelError(
            "running the model changes its own weights or buffers (running statistics, spectral norm, an embedding's "
            "max_norm, a counter); expected a function of the input alone. They were restored. Call model.eval(), or "
            "remove what changes them."
        )


def _restored(buffers: Sequence[tuple[nn.Module, str, Tensor | None]], copies: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Restore buffers and the numbers of every tensor, and return whether any had changed."""
    changed = any(module._buffers.get(key) is not buffer for module, key, buffer in buffers)
    for module, key, buffer in buffers:
        module._buffers[key] = buffer
    with torch.no_grad():
        for tensor, before in copies:
            if not torch.equal(tensor, before) and not _same_with_nan(tensor, before):
                changed = True
                tensor.copy_(before)
    return changed


def _same_with_nan(tensor: Tensor, before: Tensor) -> bool:
    """Return whether all entries are equal, or NaN in both."""
    return bool((tensor == before).logical_or(tensor.isnan() & before.isnan()).all())


def raw_output(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the tensor that the model returns, taken from ``.logits`` if the model returns an object."""
    if any(t.is_inference() for t in tensors_in(inputs)):  # those cannot be saved for a gradient
        inputs = map_tensors(inputs, lambda t: t.clone() if t.is_inference() else t)
    try:
        out = call(model, inputs)
    except Exception as error:
        if hasattr(error, "add_note"):  # not before Python 3.11
            error.add_note(_described(model, inputs))
        raise
    if not isinstance(out, Tensor):
        out = out["logits"] if isinstance(out, Mapping) and "logits" in out else getattr(out, "logits", out)
    if not isinstance(out, Tensor):
        raise ModelError(
            f"the model returns a {type(out).__name__}; expected a tensor or an object with .logits. "
            "Wrap the model in a module that returns the tensor."
        )
    if not out.is_floating_point():
        raise ModelError(f"the model returns {out.dtype}; expected real numbers: logits, means or log-rates.")
    if out.ndim not in (1, 2, 3) or out.shape[-1] == 0 or out.shape[0] == 0:
        raise ModelError(
            f"the model returns the shape {tuple(out.shape)}; expected (B,), (B, C) or (B, T, C) with the classes "
            "or outputs last. Wrap the model in a module that reshapes."
        )
    return out


def _described(model: nn.Module, inputs: Inputs) -> str:
    """Describe the inputs, for the error message: that of the model may name a matrix inside it only."""
    kinds = lambda tensors: ", ".join(dict.fromkeys(f"{t.dtype} on {t.device}" for t in tensors)) or "none"
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors_in(inputs))
    return (
        f"Lapwing gave the network inputs of shape {shapes} ({kinds(tensors_in(inputs))}); its weights are "
        f"{kinds(model.parameters())}. Give it what it was trained on."
    )


def shaped(raw: Tensor) -> Tensor:
    """Return f (B, [T,] C): a single output without its dimension, (B,), becomes (B, 1)."""
    return raw.unsqueeze(-1) if raw.ndim == 1 else raw


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of factors for a model of this dtype: float32 at least."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the plain module inside a compiled or data-parallel one, whose graph shows no operations."""
    for attribute, kinds in (
        ("_orig_mod", ("OptimizedModule",)),
        ("module", ("DataParallel", "DistributedDataParallel")),
    ):
        if type(model).__name__ in kinds and isinstance(getattr(model, attribute, None), nn.Module):
            return unwrapped(getattr(model, attribute))
    return model


def has_dropout(module: nn.Module) -> bool:
    """Return whether the module itself, not its parts, applies dropout in training mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and float(module.dropout) > 0


def refuse_training_mode(model: nn.Module) -> None:
    """Raise if dropout or BatchNorm is in training mode: outputs would be random, or samples would mix."""
    for name, module in model.named_modules():
        if module.training and (has_dropout(module) or isinstance(module, nn.modules.batchnorm._BatchNorm)):
            raise ModelError(
                f"{name or 'the model'} ({type(module).__name__}) is in training mode; expected evaluation mode. "
                "Call model.eval() first."
            )


def refuse_random(model: nn.Module, inputs: Inputs) -> None:
    """Raise if the same inputs give other outputs: two forward passes, over few samples for one input tensor."""
    some = inputs
    if len(list(tensors_in(inputs))) == 1:  # of several, one may be shared by all samples
        some = map_tensors(inputs, lambda t: t[:FEW])
    with torch.no_grad(), plain_kernels(needs_plain_kernels(model)):
        first, second = raw_output(model, some), raw_output(model, some)
    allowed = max(REPEATED.get(dtype, 4 * torch.finfo(dtype).eps) for dtype in _dtypes(model, first))
    if first.shape == second.shape:
        gap, scale = (first.double() - second.double()).abs().max(), first.double().abs().max()
        if not bool(gap > allowed * scale):
            return
        difference = f"differ by {(gap / scale).item():.2g} of the largest output; expected at most {allowed:.2g}"
    else:
        difference = f"give the shapes {tuple(first.shape)} and {tuple(second.shape)}; expected the same"
    raise ModelError(
        f"two forward passes over the same inputs {difference}: the forward pass is random, or remembers earlier "
        "calls. Switch off what draws numbers in evaluation mode too (F.dropout without training=self.training, noise, "
        "sampling), or use deterministic kernels."
    )


def relative_gap(model: nn.Module, alone: Tensor, within: Tensor, whole: Tensor) -> tuple[Tensor, float]:
    """Return how far outputs of some samples are from those within a batch, relative, and how far rounding may go."""
    gap = (alone.float() - within.float()).abs().max() / whole.float().abs().max().clamp_min(1e-6)
    return gap, 1e3 * max(torch.finfo(dtype).eps for dtype in _dtypes(model, whole)) ** 0.75


def _dtypes(model: nn.Module, output: Tensor) -> set[torch.dtype]:
    """Return the dtypes that a forward pass rounds in: a float64 head may sit on a float32 body."""
    return {output.dtype, *(p.dtype for p in model.parameters() if p.is_floating_point())}


def refuse_mixed_samples(model: nn.Module, inputs: Inputs, raw: Tensor, per_sample: Sequence[bool]) -> None:
    """Raise if f(x)[b] depends on other samples; ``per_sample`` says which tensors have a row for each sample."""
    batch = raw.shape[0]
    if batch == 1:
        return
    half = (batch + 1) // 2
    gap = torch.zeros((), device=raw.device)
    for rows in (slice(0, half), slice(half, batch)):
        with torch.no_grad(), plain_kernels(needs_plain_kernels(model)):
            alone = raw_output(model, take(inputs, per_sample, rows))
        count = rows.stop - rows.start
        if alone.shape[0] != count:
            raise ModelError(f"half a batch gives {alone.shape[0]} outputs; expected {count}: one for each sample.")
        if alone.shape[1:] != raw.shape[1:]:
            return  # dynamic padding: lengths follow the batch
        half_gap, allowed = relative_gap(model, alone, raw[rows], raw)
        gap = torch.maximum(gap, half_gap)
    if not bool(gap < allowed):
        hint = f" If all samples share an input that has {batch} rows by chance, use another batch size."
        raise ModelError(
            f"the output for a sample changes by {gap.item():.2g} (relative) with the rest of its batch; "
            "expected independent samples. Put normalisation in evaluation mode, or give the model one sample's "
            f"context inside its own input.{hint if sum(per_sample) > 1 else ''}"
        )
