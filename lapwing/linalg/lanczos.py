"""Leading eigenpairs of a symmetric operator by block Lanczos."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lapwing.core.random import normal
from lapwing.linalg.krylov import BlockKrylov, Eigenpairs, block_krylov
from lapwing.linalg.operators import Product, applied, refuse_asymmetric
from lapwing.linalg.orthogonal import orthonormal_rows

EPS = torch.finfo(torch.float64).eps
OVERSAMPLE = 20  # vectors in the basis beyond the number of pairs, at least


def leading_eigenpairs(
    product: Product,
    size: int,
    rank: int,
    *,
    block: int = 16,
    tolerance: float = 1e-3,
    max_basis: int | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Eigenpairs:
    """Return the leading eigenpairs of a positive semi-definite operator on vectors of length ``size``.

    Block Lanczos with full reorthogonalisation and Rayleigh-Ritz. The basis grows by one block with each product until
    the residuals of the leading ``rank`` pairs are at most ``tolerance``, or it has max(2 rank, rank + 20) vectors (the
    last block is completed), or another block would exceed ``max_basis``. ``converged`` of the result says whether the
    tolerance was reached. An operator of lower rank ends early and exactly. Before the end, a block of random vectors
    looks for copies of an eigenvalue, since the first block shows at most as many copies as it has rows. Two products
    of two rows check first that the operator is symmetric and does not change.

    >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    >>> [round(float(value), 4) for value in leading_eigenpairs(lambda v: v @ a, size=3, rank=2).values]
    [4.0, 2.0]
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; expected at least 1.")
    refuse_asymmetric(product, size, generator=torch.Generator().manual_seed(0), device=device)
    rank = min(rank, size)
    limit = min(size, max_basis or max(2 * rank, rank + OVERSAMPLE))
    block = min(block, limit)
    most = min(size, max_basis or limit + block - 1)
    like = torch.empty(0, dtype=torch.float64, device=device)
    space = block_krylov(product, normal((block, size), generator, like), 1, tolerance=1e2 * EPS, max_basis=most)
    probes = 0
    while True:
        if space.exhausted or _converged(space, rank, tolerance):
            room = most - len(space.rows) - len(space.ahead)
            random = _outside(space, normal((block, size), generator, like))[: max(room, 0)]
            if len(random) == 0:
                break
            probes += 1
            if not _has_larger(product, random, space, rank):
                break
            space = space.widened(random)
        if len(space.ahead) > most - len(space.rows):
            break
        space = space.extended(product, 1)
    pairs = space.pairs(rank)
    return replace(pairs, values=pairs.values.clamp_min(0), products=space.products + probes, tolerance=tolerance)


def _converged(space: BlockKrylov, rank: int, tolerance: float) -> bool:
    """Return whether the leading pairs have residuals of at most the tolerance."""
    return len(space.rows) >= rank and bool((space.pair_residuals(rank) <= tolerance).all())


def _outside(space: BlockKrylov, rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the part of the rows that is orthogonal to the space and its next block."""
    known = space.rows.extended(space.ahead)
    outside = known.removed(known.removed(rows / rows.norm(dim=1, keepdim=True)))
    return orthonormal_rows(outside, cut=1e2 * EPS, against=known)[1]


def _has_larger(product: Product, rows: Tensor, space: BlockKrylov, rank: int) -> bool:
    """Return whether u·Au is above the smallest of the leading eigenvalues for any of the rows u; one product."""
    largest = float((rows * applied(product, rows)).sum(1).max())
    smallest = float(space.values[rank - 1]) if len(space.values) >= rank else 0.0
    return largest > smallest + 1e3 * EPS * float(space.values[0].abs())
