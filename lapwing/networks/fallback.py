"""Jacobians of parameters that no rule covers: slower, with the same numbers.

First ``torch.func`` (a backward pass for each seed, for all samples and parameters at once); where an operation refuses
that (recurrent kernels), plain backward passes, one sample and one seed at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lapwing.core.data import Inputs, map_tensors, rebuilt, take
from lapwing.errors import ModelError
from lapwing.networks.forward import quiet, relative_gap

Forward = Callable[[nn.Module, Inputs], Tensor]  # (model, inputs) -> f (B, M)


def sample_jacobians(
    model: nn.Module,
    forward: Forward,
    inputs: Inputs,
    per_sample: Sequence[bool],
    f: Tensor,
    names: tuple[str, ...],
    seeds: Tensor,
) -> dict[str, Tensor]:
    """Return the Jacobian (B, K, p) of seeds · f for every named parameter, with seeds (K, B, M).

    ``per_sample`` says which tensors have a row for each sample. Samples are run one by one, and must have the same
    outputs as in the whole batch, f (B, M).
    """
    seeds = seeds.to(f.dtype)
    try:
        jacobians, alone = _vectorised(model, forward, inputs, per_sample, names, seeds)
    except (RuntimeError, NotImplementedError, ValueError):  # no batching rule on the way: loop instead
        jacobians, alone = _looped(model, forward, inputs, per_sample, names, seeds)
    gap, allowed = relative_gap(model, alone, f, f)
    if len(per_sample) > 1 and not bool(gap < allowed):
        raise ModelError(
            f"the output for a sample changes by {gap.item():.2g} (relative) where it is alone, with what all samples "
            "share; expected independent samples, and inputs of one kind: a tensor that all samples share in one batch "
            "is shared in all."
        )
    return jacobians


def _vectorised(
    model: nn.Module,
    forward: Forward,
    inputs: Inputs,
    per_sample: Sequence[bool],
    names: tuple[str, ...],
    seeds: Tensor,
) -> tuple[dict[str, Tensor], Tensor]:
    tensors = dict(model.named_parameters())
    chosen = {name: tensors[name].detach() for name in names}
    flags = iter(per_sample)
    dims = map_tensors(inputs, lambda t: 0 if next(flags) else None)  # type: ignore[arg-type,return-value]

    def single(sample: Inputs, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        one = _unsqueezed(sample, dims)
        run = lambda values: swapped(model, values, lambda: forward(model, one)).reshape(-1)
        f, back = torch.func.vjp(run, chosen)  # type: ignore[misc]
        # Seeds in a loop: batching a gradient twice is wrong for PReLU where there are as many seeds as samples.
        each = [back(row)[0] for row in rows]
        return {name: torch.stack([grads[name].reshape(-1) for grads in each]) for name in names}, f

    with quiet(), sdpa_kernel(SDPBackend.MATH):
        jacobians, f = torch.func.vmap(single, in_dims=(dims, 1))(inputs, seeds)
    return {name: jacobian.detach() for name, jacobian in jacobians.items()}, f.detach()


def _unsqueezed(sample: Inputs, dims: Inputs) -> Inputs:
    """Return the sample with the batch dimension that ``vmap`` took away."""
    if isinstance(sample, Tensor):
        return sample.unsqueeze(0) if dims == 0 else sample
    if isinstance(sample, dict):
        return {key: _unsqueezed(value, dims[key]) for key, value in sample.items()}
    if isinstance(sample, tuple | list):
        return rebuilt(sample, [_unsqueezed(value, dim) for value, dim in zip(sample, dims, strict=True)])
    return sample


def swapped(model: nn.Module, values: dict[str, Tensor], run: Callable[[], Tensor]) -> Tensor:
    """Run with other values for some parameters; the model has its own again afterwards, also after an error."""

    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self) -> Tensor:
            return run()

    renamed = {"inner." + name: value for name, value in values.items()}
    out: Tensor = torch.func.functional_call(Call(), renamed, ())
    return out


def _looped(
    model: nn.Module,
    forward: Forward,
    inputs: Inputs,
    per_sample: Sequence[bool],
    names: tuple[str, ...],
    seeds: Tensor,
) -> tuple[dict[str, Tensor], Tensor]:
    tensors = dict(model.named_parameters())
    chosen = [tensors[name] for name in names]
    count, batch, _ = seeds.shape
    jacobians = {name: seeds.new_empty(batch, count, tensors[name].numel()) for name in names}
    outputs = []
    for b in range(batch):
        f = forward(model, take(inputs, per_sample, slice(b, b + 1))).reshape(-1)
        outputs.append(f.detach())
        for k in range(count):
            grads = torch.autograd.grad(
                f, chosen, seeds[k, b], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for name, grad in zip(names, grads, strict=True):
                jacobians[name][b, k] = (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
    return jacobians, torch.stack(outputs)
