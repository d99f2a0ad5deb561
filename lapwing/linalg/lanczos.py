"""Leading eigenpairs of a symmetric operator by block Lanczos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.random import normal

Product = Callable[[Tensor], Tensor]  # rows (K, P) -> rows (K, P)


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Leading eigenpairs: ``values`` (r,), descending, ``vectors`` (r, P) as rows.

    ``residuals`` (r,) are |H u - s u| relative to the largest eigenvalue; ``products`` counts applications of
    the operator to a block.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int


def leading_eigenpairs(
    product: Product,
    size: int,
    rank: int,
    *,
    block: int = 16,
    oversample: int = 20,
    tolerance: float = 1e-3,
    max_basis: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
) -> Eigenpairs:
    """Block Lanczos with full reorthogonalisation and Rayleigh-Ritz.

    The basis grows by one block for each product until the leading ``rank`` pairs have a residual below
    ``tolerance`` or the basis holds max(2 rank, rank + oversample) vectors. Directions that the operator maps to
    nothing new are dropped, so a rank-deficient operator ends early and exactly.
    """
    rank = min(rank, size)
    limit = min(size, max_basis or max(2 * rank, rank + oversample))
    block = min(block, limit)
    start = normal((block, size), generator, torch.empty(0, dtype=dtype, device=device))
    basis = _orthonormal(start, None)
    images: list[Tensor] = []
    fresh, products = basis, 0
    while True:
        images.append(product(fresh).to(basis))
        products += 1
        image = torch.cat(images)
        small = basis @ image.mT
        values, turn = torch.linalg.eigh(0.5 * (small + small.mT))
        values, turn = values.flip(0), turn.flip(1)
        keep = min(rank, len(values))
        vectors = turn[:, :keep].mT @ basis
        scale = values[0].abs().clamp_min(torch.finfo(dtype).tiny)
        residuals = (turn[:, :keep].mT @ image - values[:keep, None] * vectors).norm(dim=1) / scale
        if len(basis) >= limit or (keep == rank and bool((residuals <= tolerance).all())):
            break
        fresh = _orthonormal(images[-1], basis)[: limit - len(basis)]
        if len(fresh) == 0:
            break
        basis = torch.cat([basis, fresh])
    return Eigenpairs(values[:keep].clamp_min(0), vectors, residuals, products)


def _orthonormal(rows: Tensor, against: Tensor | None) -> Tensor:
    """An orthonormal basis of what the rows add; two passes of projection, then a rank-revealing cut."""
    scale = rows.norm(dim=1).max()
    if float(scale) == 0:
        return rows[:0]
    rows = rows / scale
    for _ in range(2):
        if against is not None:
            rows = rows - (rows @ against.mT) @ against
    _, singular, right = torch.linalg.svd(rows, full_matrices=False)
    found = right[
        singular > 1e2 * torch.finfo(rows.dtype).eps * max(1.0, float(singular[0]) if against is None else 1.0)
    ]
    if against is not None and len(found):
        found = found - (found @ against.mT) @ against
        found = torch.linalg.qr(found.mT)[0].mT
    return found
