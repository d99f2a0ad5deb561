"""Leading eigenpairs of a symmetric operator from random vectors, and the preconditioner that they give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.random import normal_rows
from lapwing.core.spectra import eigh
from lapwing.linalg.operators import Product, applied

OVERSAMPLE = 10  # random vectors beyond the rank


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Eigenvalues (r,), positive, and orthonormal eigenvectors as rows (r, n); A ≈ Σ value · vectorᵀ vector.

    The functions below belong to P = Σ value · vectorᵀ vector + shift I, an approximation of A + shift I.
    """

    values: Tensor
    vectors: Tensor

    def power(self, rows: Tensor, shift: float, exponent: float) -> Tensor:
        """Return P to a power times the rows (K, n), in float64."""
        wide, rest = rows.double(), shift**exponent
        inside = (self.values + shift) ** exponent - rest
        return rest * wide + (wide @ self.vectors.mT * inside) @ self.vectors

    def logdet(self, shift: float) -> float:
        """Return the log-determinant of P."""
        values = torch.cat([self.values + shift, self.values.new_tensor([shift])]).log()
        return float(values[:-1].sum() + (self.vectors.shape[1] - len(self.values)) * values[-1])


def randomised_eigenpairs(
    product: Product,
    size: int,
    rank: int,
    generator: torch.Generator | None,
    device: torch.device | None = None,
    iterations: int = 1,
) -> Eigenpairs:
    """Return the leading eigenpairs of a symmetric positive semi-definite operator, approximately.

    Cost: ``iterations`` + 1 products of ``rank`` + 10 rows. Reference: Halko, Martinsson & Tropp 2011, algorithms 4.4
    and 5.3.

    Args:
        product: multiplies rows (K, size) by the operator.
        size: the number of columns of the operator.
        rank: the number of eigenpairs; fewer are returned if the others are zero in rounding.
        generator: draws the random vectors.
        device: where the rows are; the CPU if None.
        iterations: the number of products that turn random vectors towards the leading ones.

    >>> a = torch.diag(torch.tensor([5.0, 2.0, 1e-9], dtype=torch.float64))
    >>> randomised_eigenpairs(lambda v: v @ a, 3, 2, torch.Generator().manual_seed(0)).values.round(decimals=6)
    tensor([5., 2.], dtype=torch.float64)
    """
    like = torch.empty(0, dtype=torch.float64, device=device)
    basis = normal_rows(min(size, rank + OVERSAMPLE), size, generator, like)
    for _ in range(iterations):
        basis = torch.linalg.qr(applied(product, basis).mT)[0].mT
    inner = applied(product, basis) @ basis.mT
    values, turn = eigh(0.5 * (inner + inner.mT))
    values, turn = values.flip(0)[:rank], turn.flip(1)[:, :rank]
    kept = values > 1e-14 * values[0].clamp_min(0)
    return Eigenpairs(values[kept], turn[:, kept].mT @ basis)
