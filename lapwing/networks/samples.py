"""Trying out which tensors of a batch have a row for each sample, where their numbers of rows do not tell.

``core/data.py`` has the rule. A tensor that is met for the first time with as many rows as there are samples may
have them by chance. It is tried: no output may depend on a row of another sample. A batch that fails is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapwing.core.data import Inputs, SampleRows, map_tensors, place_name, placed, take
from lapwing.errors import DataError
from lapwing.networks.fallback import swapped
from lapwing.networks.forward import (
    needs_plain_kernels,
    plain_kernels,
    raw_output,
    recording,
    refuse_mixed_samples,
    relative_gap,
)


def learn(model: nn.Module, inputs: Inputs, raw: Tensor, rows: SampleRows, copied: bool = False) -> SampleRows:
    """Return the knowledge after this batch, with the outputs ``raw``; raise if samples mix.

    A batch that is one sample ``copied`` shows nothing new.
    """
    batch = raw.shape[0]
    rows.refuse_change(inputs, batch)
    per_sample = rows.per_sample(inputs, batch)
    tried = rows.is_open(inputs, batch) and not copied
    if tried:
        _refuse_dependent(model, inputs, per_sample, batch)
    refuse_mixed_samples(model, inputs, raw, per_sample)
    if tried:
        _refuse_pooled(model, inputs, per_sample, batch)
    if copied or batch == 1 or len(per_sample) == 1:
        return rows
    return rows.learned(inputs, batch)


def _refuse_dependent(model: nn.Module, inputs: Inputs, per_sample: tuple[bool, ...], batch: int) -> None:
    """Raise if an output of one half of the batch has a slope in rows of the other half."""
    try:
        crossed = _crossed(model, inputs, per_sample, batch)
    except (RuntimeError, NotImplementedError):  # no slope in the inputs: running parts of the batch must do
        return
    keys = [key for key, _ in placed(inputs)]
    names = ", ".join(place_name(key) for key, mixed in zip(keys, crossed, strict=True) if mixed)
    if names and sum(crossed) < sum(per_sample):  # all tensors: the model itself mixes samples, refused elsewhere
        raise DataError(
            f"{names} has as many rows as there are samples, {batch}, but every sample depends on all; expected "
            "a row for each sample, or another number of rows where all samples share the tensor. Use another batch "
            "size, or expand it to one for each sample."
        )


def _crossed(model: nn.Module, inputs: Inputs, per_sample: tuple[bool, ...], batch: int) -> list[bool]:
    """Return for each tensor whether outputs of one half of the batch have slopes in its rows of the other half."""
    leaves: dict[int, Tensor] = {}
    numbers = iter(range(len(per_sample)))

    def with_gradient(t: Tensor) -> Tensor:
        number = next(numbers)
        if not per_sample[number] or not t.is_floating_point():
            return t
        leaves[number] = t.detach().clone().requires_grad_()
        return leaves[number].clone()  # a model may write into its inputs

    with recording(dict(model.named_parameters()), (), needs_plain_kernels(model)):
        raw = _perturbed_output(model, map_tensors(inputs, with_gradient))
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


def _refuse_pooled(model: nn.Module, inputs: Inputs, per_sample: tuple[bool, ...], batch: int) -> None:
    """Raise if some samples, alone and in another order, have other outputs than in the batch."""
    some = torch.randperm(batch, generator=torch.Generator().manual_seed(0))[: max(2, (batch + 2) // 3)]
    with torch.no_grad(), plain_kernels(needs_plain_kernels(model)):
        whole, alone = _perturbed_output(model, inputs), _perturbed_output(model, take(inputs, per_sample, some))
    if alone.shape[1:] != whole.shape[1:]:
        return  # dynamic padding: lengths follow the batch
    gap, allowed = relative_gap(model, alone, whole[some.to(whole.device)], whole)
    if not bool(gap < allowed):
        keys = [key for key, _ in placed(inputs)]
        names = ", ".join(place_name(key) for key, flag in zip(keys, per_sample, strict=True) if flag)
        raise DataError(
            f"of {names}, each with as many rows as there are samples, {batch}, one is shared: the output for a sample "
            f"changes by {gap.item():.2g} (relative) where rows of the others are left out; expected a row for each "
            "sample. Use another batch size, or expand what all samples share to one for each."
        )


def _perturbed_output(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the output with zero weights perturbed, so that zero-initialised gates do not hide a dependence."""
    weights = {name: p.detach() for name, p in model.named_parameters() if bool((p == 0).any())}
    perturbed = {name: p.masked_fill(p == 0, 0.01) for name, p in weights.items()}
    output = swapped(model, perturbed, lambda: raw_output(model, inputs))
    return output if bool(output.isfinite().all()) else raw_output(model, inputs)
