"""Jacobians of parameters that no rule covers: slower, never wrong, never skipped.

First ``torch.func`` (one vectorised pass for all samples and outputs); where an operation refuses that (recurrent
kernels), plain backward passes, one sample and one output at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lapwing.core.data import Inputs, map_tensors, picked, rebuilt
from lapwing.core.errors import ModelError
from lapwing.networks.forward import quiet, spread

Forward = Callable[[nn.Module, Inputs], Tensor]  # (model, inputs) -> f (B, M)


def sample_jacobians(
    model: nn.Module, forward: Forward, inputs: Inputs, own: Sequence[bool], f: Tensor, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """The Jacobian (B, M, p) of every named parameter.

    ``own`` are the tensors with a row for each sample, f (B, M) the outputs of the whole batch: samples are run one by
    one, and must have the same.
    """
    try:
        found, alone = _vectorised(model, forward, inputs, own, names)
    except (RuntimeError, NotImplementedError, ValueError):  # no batching rule on the way: loop instead
        found, alone = _looped(model, forward, inputs, own, len(f), names)
    gap, most = spread(alone, f, f)
    if len(own) > 1 and not bool(gap < most):
        raise ModelError(
            f"the output for a sample changes by {gap.item():.2g} (relative) where it is alone, with what all samples "
            "share; expected independent samples, and inputs of one kind: a tensor that all samples share in one batch "
            "is shared in all."
        )
    return found


def _vectorised(
    model: nn.Module, forward: Forward, inputs: Inputs, own: Sequence[bool], names: tuple[str, ...]
) -> tuple[dict[str, Tensor], Tensor]:
    tensors = dict(model.named_parameters())
    chosen = {name: tensors[name].detach() for name in names}
    flags = iter(own)
    dims = map_tensors(inputs, lambda t: 0 if next(flags) else None)  # type: ignore[arg-type,return-value]

    def single(values: dict[str, Tensor], sample: Inputs) -> tuple[Tensor, Tensor]:
        one = _unsqueezed(sample, dims)
        f = swapped(model, values, lambda: forward(model, one)).reshape(-1)
        return f, f

    with quiet(), sdpa_kernel(SDPBackend.MATH):
        one_by_one = torch.func.vmap(torch.func.jacrev(single, has_aux=True), in_dims=(None, dims))
        jacobian, f = one_by_one(chosen, inputs)
    found = {name: j.detach().flatten(2) if j.ndim > 2 else j.detach()[..., None] for name, j in jacobian.items()}
    return found, f.detach()


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
    model: nn.Module, forward: Forward, inputs: Inputs, own: Sequence[bool], batch: int, names: tuple[str, ...]
) -> tuple[dict[str, Tensor], Tensor]:
    tensors = dict(model.named_parameters())
    chosen = [tensors[name] for name in names]
    rows: list[list[Tensor]] = []
    outputs = []
    for sample in range(batch):
        f = forward(model, picked(inputs, own, slice(sample, sample + 1))).reshape(-1)
        outputs.append(f.detach())
        for value in f:
            grads = torch.autograd.grad(value, chosen, retain_graph=True, allow_unused=True, materialize_grads=True)
            rows.append([(g.to_dense() if g.is_sparse else g).detach().reshape(-1) for g in grads])
    columns = [torch.stack([row[i] for row in rows]) for i in range(len(names))]
    found = {name: column.unflatten(0, (batch, -1)) for name, column in zip(names, columns, strict=True)}
    return found, torch.stack(outputs)
