"""Runs of the model, as it is or with other weights, and the modes of PyTorch that must be on or off meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lapwing.core.batches import Batch
from lapwing.core.checkpoints import without_checkpoints
from lapwing.core.images import DIMS, pixels
from lapwing.core.inputs import Inputs, accepts, call, map_tensors, takes, tensors_in
from lapwing.core.interrupts import deferred, poll
from lapwing.core.samples import SampleSet
from lapwing.core.settings import refuse_other_arguments, seen
from lapwing.core.switches import LOCK, own_kernels, unfused_attention
from lapwing.errors import InputError, ModelError
from lapwing.networks.replica import lent, output_of
from lapwing.networks.several_outputs import Path, keys_of, picked

# Errors with which PyTorch and Python answer a wrong shape, dtype, device or number of arguments.
REFUSED = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError)


@contextmanager
def recording(tensors: Mapping[str, Tensor], names: Collection[str], plain: bool) -> Iterator[None]:
    """Record gradients for the named parameters and no others while the model runs.

    The parameters of a private copy have the right flags already. Those of a model that runs itself are changed and
    restored, by one thread at a time. ``plain`` switches vendors' kernels off (see ``needs_plain_kernels``).
    """
    changed = {p: p.requires_grad for name, p in tensors.items() if p.requires_grad != (name in names)}
    with torch.inference_mode(False), torch.enable_grad(), plain_kernels(plain), LOCK if changed else nullcontext():
        try:
            for parameter, flag in changed.items():
                parameter.requires_grad_(not flag)
            yield
        finally:
            for parameter, flag in changed.items():
                parameter.requires_grad_(flag)


def is_recurrent(model: nn.Module) -> bool:
    """Return whether any layer is recurrent: those have fused kernels, and autograd cannot batch their gradients."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def needs_plain_kernels(model: nn.Module, recurrent: bool) -> bool:
    """Return whether vendors' kernels must be off: fused recurrent ones hide products, 16-bit oneDNN ones may crash."""
    return recurrent or any(p.is_cpu and p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())


Call = TypeVar("Call", bound=Callable[..., Any])


def outside_autocast(call: Call) -> Call:
    """Decorate a public function: it runs without autocast, and Ctrl-C is raised where nothing is half done.

    Autocast is for training: sums and factors must keep their dtype. Arguments that the function does not take are
    refused as in ``refuse_other_arguments``.
    """

    @refuse_other_arguments
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with deferred(), ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return call(*args, **kwargs)

    return run  # type: ignore[return-value]


def outside_inference(call: Call) -> Call:
    """Decorate a function to run outside inference mode, whose tensors cannot take part in later gradients."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return call(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return call(*args, **kwargs)

    return run  # type: ignore[return-value]


def plain_kernels(plain: bool) -> AbstractContextManager[None]:
    """Use PyTorch's own kernels instead of those of cuDNN and oneDNN, if ``plain``."""
    return own_kernels if plain else nullcontext()


def raw_output(
    model: nn.Module, inputs: Inputs, values: Mapping[str, Tensor] | None = None, output: Path | None = None
) -> Tensor:
    """Return what the model returns, (B,), (B, C) or (B, T, C); the pixels (B, H W, C) of images (B, C, H, W).

    ``values`` are other values for some of its parameters and buffers, which a copy gets for this run. ``output`` says
    which of several outputs; None is the one that the private copy of a model was made for.
    """
    return positions(model_output(model, inputs, values, output))


def positions(out: Tensor) -> Tensor:
    """Return the tensor of a model with images (B, C, H, W) as their pixels (B, H W, C), others as they are."""
    return pixels(out) if out.ndim > 3 else out


def model_output(
    model: nn.Module, inputs: Inputs, values: Mapping[str, Tensor] | None = None, output: Path | None = None
) -> Tensor:
    """Return the tensor that the model returns as it is, taken from ``.logits`` if the model returns an object.

    ``values`` and ``output`` as for ``raw_output``.
    """
    poll()
    if any(t.is_inference() for t in tensors_in(inputs)):  # those cannot be saved for a gradient
        inputs = map_tensors(inputs, lambda t: t.clone() if t.is_inference() else t)
    try:
        with lent(model) as one, unfused_attention, without_checkpoints():
            out = call(one, inputs) if values is None else functional_call(BatchCall(one), _renamed(values), (inputs,))
    except REFUSED as error:
        if type(error) not in REFUSED:  # of the user's own, out of memory, or an operation that is not implemented
            raise
        raise InputError(
            f"the model raises {type(error).__name__}: {error}. {_described(model, inputs, error)}"
        ) from error
    path = output_of(model) if output is None else output
    out = picked(out, path)
    if not isinstance(out, Tensor):
        names = ", ".join(map(repr, keys_of(out)))
        choose = f"Choose one of its parts by output=... ({names}), or wrap" if names else "Wrap"
        where = f" at {''.join(f'[{key!r}]' for key in path)}" if path else ""
        raise ModelError(
            f"the model returns a {type(out).__name__}{where}; expected a tensor or an object with .logits. {choose} "
            "the model in a module that returns the tensor."
        )
    if isinstance(inputs, SampleSet):
        out = inputs.outputs(out)
    if not out.is_floating_point():
        raise ModelError(f"the model returns {out.dtype}; expected real numbers: logits, means or log-rates.")
    if not 1 <= out.ndim <= 2 + max(DIMS) or 0 in (out.shape if out.ndim > 3 else (out.shape[0], out.shape[-1])):
        raise ModelError(
            f"the model returns the shape {tuple(out.shape)}; expected (B,), (B, C), or (B, T, C) with the classes or "
            "outputs last, or images (B, C, H, W) or (B, C, D, H, W) with the channels second. Wrap the model in a "
            "module that reshapes."
        )
    return out


def output_alone(model: nn.Module, inputs: Inputs, plain: bool) -> Tensor:
    """Return what ``raw_output`` returns, without a graph; ``plain`` switches vendors' kernels off."""
    with torch.no_grad(), plain_kernels(plain):
        return raw_output(model, inputs)


def own_loss(model: nn.Module, batch: Batch, plain: bool) -> Tensor | None:
    """Return the loss that a model with an argument ``labels`` returns for these targets; None if it returns none."""
    if not takes(model, "labels") or not batch.labels:
        return None
    try:
        with torch.no_grad(), plain_kernels(plain), lent(model) as one, unfused_attention, without_checkpoints():
            out = call(one, batch.inputs, labels=batch.targets)
    except REFUSED as error:
        if type(error) not in REFUSED:  # of the user's own, or out of memory
            raise
        return None  # its labels are no targets of this kind, so there is nothing to compare with
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point() else None


class BatchCall(nn.Module):
    """A module whose argument is a batch in any of its forms."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Inputs) -> Any:
        return call(self.inner, inputs)


def _renamed(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"inner.{name}": value for name, value in values.items()}


def _described(model: nn.Module, inputs: Inputs, error: Exception) -> str:
    """Describe the inputs, for the error message: PyTorch's message may only mention a matrix inside the model."""
    kinds = lambda tensors: ", ".join(dict.fromkeys(f"{t.dtype} on {t.device}" for t in tensors)) or "none"
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors_in(inputs))
    return (
        f"Lapwing gave the network inputs of shape {shapes} ({kinds(tensors_in(inputs))}); its weights are "
        f"{kinds(model.parameters())}. {advice(model, inputs, error)}"
    )


def advice(model: nn.Module, inputs: Inputs, error: Exception) -> str:
    """Return what to do about inputs that the model refuses with this error."""
    trained = "Give it what it was trained on."
    if isinstance(inputs, tuple) and not accepts(model, inputs):
        return f"{trained} A tuple means several inputs of the model, and it takes one: give x alone, without targets."
    wanted, text = arithmetic_of(model), str(error)
    if "Guard failed" in text:  # a module of torch.export
        return "Lapwing runs parts of a batch: export the model with dynamic_shapes, for any batch size."
    others = {t.dtype for t in tensors_in(inputs) if not t.is_complex()} - {wanted, torch.bool}
    if others and "type" in text and "indices" not in text:  # an embedding asks for whole numbers
        return f"{trained} Convert the inputs: x.to({wanted}) for a tensor, x.astype(float) for an array."
    return trained


def shaped(raw: Tensor) -> Tensor:
    """Return f (B, [T,] C): a single output without its dimension, (B,), becomes (B, 1)."""
    return raw.unsqueeze(-1) if raw.ndim == 1 else raw


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the plain module inside a compiled or data-parallel one, whose graph shows no operations."""
    wrappers = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
    inner = getattr(model, wrappers.get(type(model).__name__, ""), None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def refuse_distributed(model: nn.Module) -> None:
    """Raise if weights are spread over processes: each process would see a part of them."""
    sharded = [name for name, p in model.named_parameters() if hasattr(p, "device_mesh") or hasattr(p, "_shard_infos")]
    wrapped = [name for name, m in model.named_modules() if type(m).__name__ == "FullyShardedDataParallel"]
    if sharded or wrapped:
        raise ModelError(
            f"the weights are spread over processes ({(sharded or wrapped)[0] or 'the model'}: DTensor or FSDP); "
            "expected whole tensors on one device. Gather them with full_tensor() or a full state_dict, and load them "
            "into a plain copy of the model."
        )


def refuse_scripted(model: nn.Module) -> None:
    """Raise if a part of the model is scripted or traced: its graph changes after the first runs."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{name or 'the model'} is made by torch.jit.script, trace or load, and PyTorch hides its operations "
                "after the first runs; expected plain modules. Give the model that it was made from: build it, and "
                "fill it with load_state_dict(scripted.state_dict())."
            )


def refuse_unusable_parameters(model: nn.Module, names: Collection[str] = ()) -> None:
    """Raise if a parameter has no values yet, can have no gradient, or is among ``names`` and not finite."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                f"{name!r} of the model has no shape yet (a lazy module); expected values. Run the model on a batch "
                "first."
            )
        if tensor.is_inference():
            raise ModelError(
                f"{name!r} of the model was made in torch.inference_mode, so it can take part in no gradient; expected "
                "an ordinary tensor. Build or load the model outside of it, or give copy.deepcopy(model)."
            )
        if name in names and not bool(tensor.isfinite().all()):
            raise ModelError(
                f"{name!r} of the model has entries that are NaN or infinite; expected finite numbers. Set them, or "
                "leave the parameter out: requires_grad_(False) on it, or weights=lw.named(...)."
            )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model; raise if it is no module, has no parameters or is on the meta device."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is {seen(model)}; expected a torch.nn.Module.")
    for parameter in model.parameters():
        if parameter.is_meta:
            raise ModelError("the model is on the meta device and has no numbers; load its weights first.")
        return parameter.device
    raise ModelError("the model has no parameters, so there is nothing to be uncertain about; expected at least one.")


def arithmetic_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that the model computes in: the coarsest of its weights."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


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
