"""Jacobians of parameters that no rule covers: slower, with the same numbers.

First ``torch.func`` (a backward pass for each seed, for all samples and parameters at once); where an operation refuses
that (recurrent kernels), plain backward passes, one sample and one seed at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lapwing.core.inputs import Inputs, map_leaves, take
from lapwing.core.switches import math_attention, quiet
from lapwing.errors import ModelError
from lapwing.networks.checks import relative_gap
from lapwing.networks.forward import raw_output
from lapwing.networks.passes import by_autograd

Jacobians = dict[str, Tensor]  # parameter -> (B, K, p)


def sample_jacobians(
    model: nn.Module, inputs: Inputs, per_sample: Sequence[bool], f: Tensor, names: tuple[str, ...], seeds: Tensor
) -> Jacobians:
    """Return the Jacobian (B, K, p) of seeds · f for every named parameter, with seeds (K, B, M).

    ``per_sample`` says which tensors have a row for each sample. Samples are run one by one, and must have the same
    outputs as in the whole batch, f (B, M).
    """
    seeds = seeds.to(f.dtype)
    try:
        jacobians, alone = _vectorised(model, inputs, per_sample, names, seeds)
    except (RuntimeError, NotImplementedError, ValueError):  # no batching rule on the way: loop instead
        jacobians, alone = _looped(model, inputs, per_sample, names, seeds)
    gap, allowed = relative_gap(model, alone, f, f)
    if len(per_sample) > 1 and not bool(gap < allowed):
        raise ModelError(
            f"the output for a sample changes by {gap.item():.2g} (relative) where it is alone, with what all samples "
            "share; expected independent samples, and inputs of one kind: a tensor that all samples share in one batch "
            "is shared in all."
        )
    return jacobians


def _vectorised(
    model: nn.Module, inputs: Inputs, per_sample: Sequence[bool], names: tuple[str, ...], seeds: Tensor
) -> tuple[Jacobians, Tensor]:
    tensors = dict(model.named_parameters())
    chosen = {name: tensors[name].detach() for name in names}
    flags = iter(per_sample)
    dims = map_leaves(inputs, lambda _: 0 if next(flags) else None)

    def single(sample: Inputs, rows: Tensor) -> tuple[Jacobians, Tensor]:
        flags = iter(per_sample)  # the batch dimension that ``vmap`` took away comes back
        one = map_leaves(sample, lambda t: t.unsqueeze(0) if next(flags) else t)
        run = lambda values: raw_output(model, one, values).reshape(-1)
        f, back = torch.func.vjp(run, chosen)  # type: ignore[misc]
        # Seeds in a loop: batching a gradient twice is wrong for PReLU where there are as many seeds as samples.
        each = [back(row)[0] for row in rows]
        return {name: torch.stack([grads[name].reshape(-1) for grads in each]) for name in names}, f

    with quiet, math_attention:
        jacobians, f = torch.func.vmap(single, in_dims=(dims, 1))(inputs, seeds)
    return {name: jacobian.detach() for name, jacobian in jacobians.items()}, f.detach()


def _looped(
    model: nn.Module, inputs: Inputs, per_sample: Sequence[bool], names: tuple[str, ...], seeds: Tensor
) -> tuple[Jacobians, Tensor]:
    tensors = dict(model.named_parameters())
    chosen = [tensors[name] for name in names]
    count, batch, _ = seeds.shape
    jacobians = {name: seeds.new_zeros(batch, count, tensors[name].numel()) for name in names}
    outputs = []
    for b in range(batch):
        f = raw_output(model, take(inputs, per_sample, slice(b, b + 1))).reshape(-1)
        outputs.append(f.detach())
        for name, grad in zip(names, by_autograd(f, chosen, seeds[:, b], True), strict=True):
            if grad is not None:
                jacobians[name][b] = grad.reshape(count, -1)
    return jacobians, torch.stack(outputs)
