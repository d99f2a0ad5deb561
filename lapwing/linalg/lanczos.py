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
    device: torch.device | None = None,
) -> Eigenpairs:
    """Block Lanczos with full reorthogonalisation and Rayleigh-Ritz.

    The basis grows by one block for each product until the leading ``rank`` pairs have a residual below ``tolerance``
    or it holds max(2 rank, rank + oversample) vectors, the last block whole; ``max_basis`` is a number that no block
    goes past. ``converged`` says which. Directions that the operator maps to nothing new are dropped, so a
    rank-deficient operator ends early and exactly; before it ends, a block of chance vectors looks for copies of an
    eigenvalue that the first block was too narrow to see. Two products more, of two rows, see first that the operator
    is symmetric and stays the same.

    >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    >>> leading_eigenpairs(lambda v: v @ a, size=3, rank=2).values
    tensor([4.0000, 2.0000], dtype=torch.float64)
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; expected at least 1.")
    refuse_asymmetric(product, size, generator=torch.Generator().manual_seed(0), device=device)
    rank = min(rank, size)
    limit = min(size, max_basis or max(2 * rank, rank + oversample))
    block = min(block, limit)
    most = min(size, max_basis or limit + block - 1)
    like = torch.empty(0, dtype=torch.float64, device=device)
    space = block_krylov(product, normal((block, size), generator, like), 1, tolerance=1e2 * EPS, max_basis=most)
    probes = 0
    while True:
        if space.exhausted or _settled(space, rank, tolerance):
            # A block sees no more copies of an eigenvalue than it is wide: look with vectors of chance for the others.
            room = most - len(space.rows) - len(space.ahead)
            chance = _unseen(space, normal((block, size), generator, like))[: max(room, 0)]
            if len(chance) == 0:
                break
            probes += 1
            if not _finds(product, chance, space, rank):
                break
            space = space.widened(chance)
        if len(space.ahead) > most - len(space.rows):
            break
        space = space.extended(product, 1)
    pairs = space.pairs(rank)
    return replace(pairs, values=pairs.values.clamp_min(0), products=space.products + probes, tolerance=tolerance)


def _settled(space: BlockKrylov, rank: int, tolerance: float) -> bool:
    return len(space.rows) >= rank and bool((space.pair_residuals(rank) <= tolerance).all())


def _unseen(space: BlockKrylov, rows: Tensor) -> Tensor:
    """An orthonormal basis of what the rows have outside of the space and its next block."""
    seen = space.rows.extended(space.ahead)
    outside = seen.removed(seen.removed(rows / rows.norm(dim=1, keepdim=True)))
    return orthonormal_rows(outside, cut=1e2 * EPS, against=seen)[1]


def _finds(product: Product, rows: Tensor, space: BlockKrylov, rank: int) -> bool:
    """Whether the operator is larger along any of the rows than its smallest eigenvalue that is kept; one product."""
    found = float((rows * applied(product, rows)).sum(1).max())
    smallest = float(space.values[rank - 1]) if len(space.values) >= rank else 0.0
    return found > smallest + 1e3 * EPS * float(space.values[0].abs())
