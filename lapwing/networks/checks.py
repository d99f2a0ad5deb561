"""Checks of a model before it is used: it must be a function of its input alone, and of one sample at a time.

``core/inputs.py`` has the rule for which tensors of a batch have a row for each sample. A tensor may have as many rows
as there are samples by chance, so ``learn`` tests such a tensor when it first occurs: no output may depend on a row of
another sample. A batch that fails is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lapwing.core.inputs import Inputs, Leaf, SampleRows, map_leaves, place_name, placed, take
from lapwing.errors import DataError, ModelError
from lapwing.networks.forward import model_output, output_alone, plain_kernels, positions, raw_output, recording
from lapwing.networks.replica import Bypass, Replica

FEW = 32  # samples that show whether two forward passes agree
EXAMINED = 31  # samples of a batch with which a model is examined; a prime, which no other dimension is likely to be
REPEATED = {torch.float64: 1e-12, torch.float32: 1e-5}  # by how much outputs may differ where kernels reorder sums


def examined(inputs: Inputs) -> Inputs:
    """Return the first samples of a batch that is one tensor, enough to examine a model; other batches as they are."""
    return inputs[:EXAMINED] if isinstance(inputs, Tensor) and inputs.ndim else inputs


@contextlib.contextmanager
def refusing_changes(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model for a run. Restore weights and buffers that it changes, and raise; its own errors come first."""
    buffers = [(module, key, buffer) for module in model.modules() for key, buffer in module._buffers.items()]
    copies = [(t, t.detach().clone()) for t in (*model.parameters(), *(b for _, _, b in buffers if b is not None))]
    try:
        yield model
    finally:
        changed = any(module._buffers.get(key) is not buffer for module, key, buffer in buffers)
        for module, key, buffer in buffers:
            module._buffers[key] = buffer
        with torch.no_grad():
            for tensor, before in copies:
                if torch.equal(tensor, before):  # quick, and true unless something is NaN
                    continue
                if not torch.isclose(tensor, before, rtol=0, atol=0, equal_nan=True).all():
                    changed = True
                    tensor.copy_(before)
    if changed:
        raise ModelError(
            "running the model changes its own weights or buffers (running statistics, spectral norm, an embedding's "
            "max_norm, a counter); expected a function of the input alone. They were restored. Call model.eval(), or "
            "remove what changes them."
        )


def first_run(replica: Replica, inputs: Inputs, plain: bool) -> tuple[Replica, Tensor, tuple[int, ...]]:
    """Return the replica, the output with its graph, and the sizes (H, W) if it is an image.

    The replica is one without a private copy if that is bypassed.
    """
    one = replica.trial()
    tensors = dict(one.named_parameters())
    with Bypass(replica.source) as watch, refusing_changes(one), recording(tensors, replica.names, plain):
        out = model_output(one, inputs)
        raw = positions(out)
    if not replica.private or not watch.seen:
        return replica, raw, tuple(out.shape[2:]) if out.ndim > 3 else ()
    return first_run(replace(replica, private=False), inputs, plain)


def refuse_random(model: nn.Module, inputs: Inputs, plain: bool) -> None:
    """Raise if two forward passes over the same inputs differ. For a single input tensor a few samples are enough."""
    few_inputs = inputs
    if len(list(placed(inputs))) == 1:  # of several, one may be shared by all samples
        few_inputs = take(inputs, (True,), slice(FEW))
    first, second = output_alone(model, few_inputs, plain), output_alone(model, few_inputs, plain)
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
    """Return the relative gap between outputs of samples alone and in a batch, and the largest due to rounding."""
    gap = (alone.float() - within.float()).abs().max() / whole.float().abs().max().clamp_min(1e-6)
    return gap, 1e3 * max(torch.finfo(dtype).eps for dtype in _dtypes(model, whole)) ** 0.75


def _dtypes(model: nn.Module, output: Tensor) -> set[torch.dtype]:
    """Return the dtypes that a forward pass rounds in: a float64 head may sit on a float32 body."""
    return {output.dtype, *(p.dtype for p in model.parameters() if p.is_floating_point())}


def _refuse_mixed_samples(
    model: nn.Module, inputs: Inputs, raw: Tensor, per_sample: Sequence[bool], plain: bool
) -> None:
    """Raise if f(x)[b] depends on other samples; ``per_sample`` says which tensors have a row for each sample."""
    batch = raw.shape[0]
    if batch == 1:
        return
    half = (batch + 1) // 2
    gap = torch.zeros((), device=raw.device)
    for rows in (slice(0, half), slice(half, batch)):
        try:
            alone = output_alone(model, take(inputs, per_sample, rows), plain)
        except (IndexError, RuntimeError) as error:
            if all(per_sample):
                raise
            raise ModelError(
                f"the model takes {batch} samples, but not some of them: {error}; expected that samples can be run "
                "apart. Where they are no rows of tensors, as in graphs, say how they are split: lw.samples.SampleSet, "
                "or lw.samples.OneSample for one graph with a target for each node."
            ) from error
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


def learn(
    model: nn.Module, inputs: Inputs, raw: Tensor, rows: SampleRows, plain: bool, copied: bool = False
) -> SampleRows:
    """Return which tensors have a row for each sample, as known after this batch; raise if samples mix.

    ``raw`` are the outputs. A batch that is one sample, ``copied``, shows nothing new.
    """
    batch = raw.shape[0]
    per_sample = rows.per_sample(inputs, batch)
    if len(per_sample) == 1:  # one tensor alone is never shared by all samples
        _refuse_mixed_samples(model, inputs, raw, per_sample, plain)
        return rows
    rows.refuse_change(inputs, batch)
    uncertain = rows.is_open(inputs, batch) and not copied
    if uncertain:
        _refuse_dependent(model, inputs, per_sample, batch, plain)
    _refuse_mixed_samples(model, inputs, raw, per_sample, plain)
    if uncertain:
        _refuse_pooled(model, inputs, per_sample, batch, plain)
    return rows if copied or batch == 1 else rows.learned(inputs, batch)


def _refuse_dependent(model: nn.Module, inputs: Inputs, per_sample: tuple[bool, ...], batch: int, plain: bool) -> None:
    """Raise if the gradient of an output of one half of the batch is not zero in rows of the other half."""
    try:
        crossed = _crossed(model, inputs, per_sample, batch, plain)
    except (
        RuntimeError,
        NotImplementedError,
    ):  # no gradient in the inputs: runs of parts must do
        return
    names = _names(inputs, crossed)
    if names and sum(crossed) < sum(per_sample):  # all tensors: the model itself mixes samples, refused elsewhere
        raise DataError(
            f"{names} has as many rows as there are samples, {batch}, but every sample depends on all; expected "
            "a row for each sample, or another number of rows where all samples share the tensor. Use another batch "
            "size, or expand it to one for each sample."
        )


def _names(inputs: Inputs, flags: Sequence[bool]) -> str:
    return ", ".join(place_name(key) for (key, _), flag in zip(placed(inputs), flags, strict=True) if flag)


def _crossed(model: nn.Module, inputs: Inputs, per_sample: tuple[bool, ...], batch: int, plain: bool) -> list[bool]:
    """Return for each tensor whether outputs of one half of the batch have gradients in its rows of the other half."""
    leaves: dict[int, Tensor] = {}
    numbers = iter(range(len(per_sample)))

    def with_gradient(t: Leaf) -> Leaf:
        number = next(numbers)
        if not per_sample[number] or not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        leaves[number] = t.detach().clone().requires_grad_()
        return leaves[number].clone()  # a model may write into its inputs

    with torch.inference_mode(False), torch.enable_grad(), plain_kernels(plain):
        raw = _perturbed_output(model, map_leaves(inputs, with_gradient))
        crossed = [False] * len(per_sample)
        first, second = slice(0, batch // 2), slice(batch // 2, batch)
        for half, others in ((first, second), (second, first)):
            if not leaves or not raw.requires_grad:
                break
            seed = torch.randn(raw[half].shape, generator=torch.Generator().manual_seed(0)).to(raw)
            grads = torch.autograd.grad(raw[half], list(leaves.values()), seed, retain_graph=True, allow_unused=True)
            for number, grad in zip(leaves, grads, strict=True):
                limit = 0.0 if grad is None else 64 * torch.finfo(grad.dtype).eps * float(grad.abs().max())
                crossed[number] |= grad is not None and float(grad[others].abs().max()) > limit
    return crossed


def _refuse_pooled(model: nn.Module, inputs: Inputs, per_sample: tuple[bool, ...], batch: int, plain: bool) -> None:
    """Raise if some samples, run alone and in another order, have different outputs than in the batch."""
    some = torch.randperm(batch, generator=torch.Generator().manual_seed(0))[: max(2, (batch + 2) // 3)]
    with torch.no_grad(), plain_kernels(plain):
        whole, alone = _perturbed_output(model, inputs), _perturbed_output(model, take(inputs, per_sample, some))
    if alone.shape[1:] != whole.shape[1:]:
        return  # dynamic padding: lengths follow the batch
    gap, allowed = relative_gap(model, alone, whole[some.to(whole.device)], whole)
    if not bool(gap < allowed):
        raise DataError(
            f"of {_names(inputs, per_sample)}, each with as many rows as there are samples, {batch}, one is shared: "
            f"the output for a sample changes by {gap.item():.2g} (relative) where rows of the others are left out; "
            "expected a row for each sample. Use another batch size, or expand what all samples share to one for each."
        )


def _perturbed_output(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the output with zero weights perturbed, so that zero-initialised gates do not hide a dependence."""
    weights = {name: p.detach() for name, p in model.named_parameters() if bool((p == 0).any())}
    perturbed = {name: p.masked_fill(p == 0, 0.01) for name, p in weights.items()}
    output = raw_output(model, inputs, perturbed)
    return output if bool(output.isfinite().all()) else raw_output(model, inputs)
