"""Jacobians of parameters that no rule covers: slower, never wrong, never skipped.

First ``torch.func`` (one vectorised pass for all samples and outputs); where an operation refuses that (recurrent
kernels), plain backward passes, one sample and one output at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lapwing.core.data import Inputs, map_tensors, rebuilt, take
from lapwing.networks.forward import quiet

Forward = Callable[[nn.Module, Inputs], Tensor]  # (model, inputs) -> f (B, M)


def sample_jacobians(
    model: nn.Module, forward: Forward, inputs: Inputs, batch: int, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """The Jacobian (B, M, p) of every named parameter."""
    try:
        return _vectorised(model, forward, inputs, batch, names)
    except (RuntimeError, NotImplementedError, ValueError):  # no batching rule on the way: loop instead
        return _looped(model, forward, inputs, batch, names)


def _vectorised(
    model: nn.Module, forward: Forward, inputs: Inputs, batch: int, names: tuple[str, ...]
) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters())
    chosen = {name: tensors[name].detach() for name in names}
    dims = map_tensors(inputs, lambda t: 0 if t.ndim and t.shape[0] == batch else None)  # type: ignore[arg-type,return-value]

    def single(values: dict[str, Tensor], sample: Inputs) -> Tensor:
        one = _unsqueezed(sample, dims)
        return swapped(model, values, lambda: forward(model, one)).reshape(-1)

    with quiet(), sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.func.vmap(torch.func.jacrev(single), in_dims=(None, dims))(chosen, inputs)
    return {name: jacobian[name].detach().flatten(2) if jacobian[name].ndim > 2 else jacobian[name].detach()[..., None]
            for name in names}  # fmt: skip


def _unsqueezed(sample: Inputs, dims: Inputs) -> Inputs:
    """Give each sample its batch dimension back, where one was taken."""
    if isinstance(sample, Tensor):
        return sample.unsqueeze(0) if dims == 0 else sample
    if isinstance(sample, dict):
        return {key: _unsqueezed(value, dims[key]) for key, value in sample.items()}
    if isinstance(sample, tuple | list):
        return rebuilt(sample, [_unsqueezed(value, dim) for value, dim in zip(sample, dims, strict=True)])
    return sample


def swapped(model: nn.Module, values: dict[str, Tensor], run: Callable[[], Tensor]) -> Tensor:
    """Run with other values for some parameters; the model is put back whatever happens."""

    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self) -> Tensor:
            return run()

    swapped = {"inner." + name: value for name, value in values.items()}
    out: Tensor = torch.func.functional_call(Call(), swapped, ())
    return out


def _looped(
    model: nn.Module, forward: Forward, inputs: Inputs, batch: int, names: tuple[str, ...]
) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters())
    chosen = [tensors[name] for name in names]
    rows: list[list[Tensor]] = []
    for sample in range(batch):
        f = forward(model, take(inputs, batch, slice(sample, sample + 1))).reshape(-1)
        for value in f:
            grads = torch.autograd.grad(value, chosen, retain_graph=True, allow_unused=True, materialize_grads=True)
            rows.append([(g.to_dense() if g.is_sparse else g).detach().reshape(-1) for g in grads])
    columns = [torch.stack([row[i] for row in rows]) for i in range(len(names))]
    return {name: column.unflatten(0, (batch, -1)) for name, column in zip(names, columns, strict=True)}
