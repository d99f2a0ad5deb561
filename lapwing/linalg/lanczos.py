"""Leading eigenpairs of a symmetric operator by block Lanczos."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.random import normal
from lapwing.linalg.operators import Product, refuse_asymmetric


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Leading eigenpairs: ``values`` (r,), descending, ``vectors`` (r, P) as rows.

    ``residuals`` (r,) are |H u - s u| relative to the largest eigenvalue; ``products`` counts applications of
    the operator to a block, and ``tolerance`` is what was asked of the residuals.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int
    tolerance: float = 1e-3

    @property
    def converged(self) -> bool:
        return bool((self.residuals <= self.tolerance).all())


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
    ``tolerance`` or the basis holds max(2 rank, rank + oversample) vectors; ``converged`` says which. Directions that
    the operator maps to nothing new are dropped, so a rank-deficient operator ends early and exactly; before it ends,
    a block of chance vectors looks for copies of an eigenvalue that the first block was too narrow to see. Two
    products more, of two rows, see first that the operator is symmetric and stays the same.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; expected at least 1.")
    check = torch.Generator().manual_seed(0)
    refuse_asymmetric(lambda v: product(v.to(dtype)), size, generator=check, device=device)
    rank = min(rank, size)
    limit = min(size, max_basis or max(2 * rank, rank + oversample))
    block = min(block, limit)
    like = torch.empty(0, dtype=dtype, device=device)
    basis = _orthonormal(normal((block, size), generator, like), None)
    image = product(basis).to(basis)
    products = 1
    probed = False
    while True:
        values, turn = _ritz(basis, image)
        keep = min(rank, len(values))
        vectors = turn[:, :keep].mT @ basis
        scale = values[0].abs().clamp_min(torch.finfo(dtype).tiny)
        residuals = (turn[:, :keep].mT @ image - values[:keep, None] * vectors).norm(dim=1) / scale
        if len(basis) >= limit:
            break
        settled = keep == rank and bool((residuals <= tolerance).all())
        fresh = basis[:0] if settled else _orthonormal(image[-block:], basis)[: limit - len(basis)]
        if len(fresh) == 0:
            # Nothing new comes from the basis: look once with vectors of chance for what it may have missed,
            # since a block sees no more copies of an eigenvalue than it is wide.
            if probed:
                break
            probed = True
            fresh = _orthonormal(normal((block, size), generator, like), basis)[: limit - len(basis)]
            if len(fresh) == 0:
                break
        moved = product(fresh).to(basis)
        products += 1
        found = float((fresh @ moved.mT).diagonal().max())
        smallest = float(values[keep - 1]) if keep == rank else 0.0
        if probed and found <= smallest + 1e3 * torch.finfo(dtype).eps * float(scale):
            break
        probed = False
        basis, image = torch.cat([basis, fresh]), torch.cat([image, moved])
    return Eigenpairs(values[:keep].clamp_min(0), vectors, residuals, products, tolerance)


def _ritz(basis: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and eigenvectors of the operator within the basis."""
    small = basis @ image.mT
    values, turn = torch.linalg.eigh(0.5 * (small + small.mT))
    return values.flip(0), turn.flip(1)


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
