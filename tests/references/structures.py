"""Dense matrices that the structures stand for, and the scale of a g-prior, from their definitions.

Nothing here calls the package. ``layers`` are the positions in theta of every layer's weights: the weight, row by row,
with the bias of each row last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tests.references import kfac
from tests.references.kfac import Factors

Root = Callable[[Tensor], Tensor]


def layers(model: nn.Module) -> dict[str, Tensor]:
    """For every Linear or convolution with one group, (outputs, inputs + 1): where its entries sit in theta."""
    start, where = 0, {}
    for name, parameter in model.named_parameters():
        where[name] = torch.arange(start, start + parameter.numel()).reshape(parameter.shape)
        start += parameter.numel()
    found = {}
    for name in dict.fromkeys(key.rpartition(".")[0] for key in where):
        weight = where[name + ".weight"].flatten(1)
        found[name] = torch.cat([weight, where[name + ".bias"][:, None]], 1)
    return found


def diagonal(ggn: Tensor) -> Tensor:
    return torch.diag(ggn.diagonal())


def kron(factors: Mapping[str, Factors], places: Mapping[str, Tensor]) -> Tensor:
    """Block diagonal: B ⊗ A / rows for every layer."""
    size = sum(index.numel() for index in places.values())
    total = torch.zeros(size, size, dtype=torch.float64)
    for name, index in places.items():
        flat = index.reshape(-1)
        total[flat[:, None], flat[None, :]] = factors[name].dense()
    return total


def ekron(ggn: Tensor, factors: Mapping[str, Factors], places: Mapping[str, Tensor]) -> Tensor:
    """The GGN's diagonal in the eigenbasis of each Kronecker product (George et al. 2018)."""
    total = torch.zeros_like(ggn)
    for name, index in places.items():
        flat = index.reshape(-1)
        out, inp = (torch.linalg.eigh(f[0])[1] for f in (factors[name].out, factors[name].inp))
        basis = torch.kron(out, inp)
        values = (basis.T @ ggn[flat[:, None], flat[None, :]] @ basis).diagonal()
        total[flat[:, None], flat[None, :]] = basis @ torch.diag(values) @ basis.T
    return total


def structured(
    method: str, ggn: Tensor, model: nn.Module, x: Tensor, root: Root = lambda f: torch.eye(len(f), dtype=f.dtype)
) -> Tensor:
    """A GGN in the structure of a method; ``root`` has the roots of the Hessian in the outputs, one for regression."""
    if method in ("full", "low_rank"):
        return ggn
    if method == "diagonal":
        return diagonal(ggn)
    factors = kfac.factors(model, x, root, "expand")
    return kron(factors, layers(model)) if method == "kron" else ekron(ggn, factors, layers(model))


def floored(values: Tensor) -> Tensor:
    """No entry below a thousandth of the (lower) median; of the mean where the median is nought; else one."""
    ordered = values.reshape(-1).sort().values
    typical = float(ordered[(len(ordered) - 1) // 2])
    if typical <= 1e-15 * float(ordered[-1]):
        typical = float(ordered.mean())
    return values.clamp_min(typical / 1000 if typical > 0 else 1.0)


def scale_by_layer(diag: Tensor, places: Mapping[str, Tensor]) -> Tensor:
    """diag(H), floored in every layer."""
    found = diag.clone()
    for index in places.values():
        found[index] = floored(diag[index])
    return found


def scale_by_factor(diag: Tensor, blocks: Mapping[str, Tensor]) -> Tensor:
    """diag(B) ⊗ diag(A), each floored by itself, from their product alone: a floor goes along with any multiple."""
    found = diag.clone()
    for index in blocks.values():
        product = diag[index]  # (outputs, inputs)
        total = float(product.sum())
        if total > 0:
            found[index] = floored(product.sum(1))[:, None] * floored(product.sum(0))[None, :] / total
    return found
