"""Randomised Nyström approximation, the preconditioner that pays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.random import normal
from lapwing.errors import NumericalError
from lapwing.linalg.operators import Product, applied, refuse_asymmetric
from lapwing.linalg.orthogonal import thin_svd

PROBES = 4  # rows that measure the approximation and do not make it
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class Nystrom:
    """A ≈ vectorsᵀ · diag(values) · vectors, never above A: ``values`` (r,), descending, ``vectors`` (r, P) as rows.

    ``residual`` is an estimate of |A - Â|_F / |A|_F from four chance rows of their own; ``products`` counts
    applications of the operator to a block.
    """

    values: Tensor
    vectors: Tensor
    residual: float
    products: int

    def preconditioner(self, shift: float) -> Product:
        """Rows times (λ_r + shift)/(λ_i + shift) along the vectors and 1 elsewhere: an inverse of A + shift I."""
        return self._along(self._ratios(shift))

    def root(self, shift: float) -> Product:
        """The symmetric root of the preconditioner, for a split one."""
        return self._along(self._ratios(shift).sqrt())

    def _ratios(self, shift: float) -> Tensor:
        if not shift > 0:
            raise NumericalError(f"a Nyström preconditioner got a shift of {shift:g}; expected above zero.")
        return (self.values[-1:] + shift) / (self.values + shift)

    def _along(self, ratios: Tensor) -> Product:
        return lambda rows: rows + ((rows @ self.vectors.mT) * (ratios - 1)) @ self.vectors


def nystrom(
    product: Product,
    size: int,
    rank: int,
    *,
    generator: torch.Generator | None = None,
    oversample: int = 10,
    device: torch.device | None = None,
) -> Nystrom:
    """The leading ``rank`` pairs seen through rank + oversample random rows, all in one product.

    One approximation serves every shift and every right-hand side. A is positive semi-definite; eigenvalues below
    zero by more than the products' own asymmetry raise. Two products more, of two rows, see first that the operator is
    symmetric and stays the same.
    Exact when: A has at most ``rank`` eigenvalues that are not zero. Reference: Frangella, Tropp & Udell 2023, alg. 2.

    >>> a = torch.diag(torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64))
    >>> nystrom(lambda v: v @ a, size=3, rank=2, generator=torch.Generator().manual_seed(0)).values
    tensor([4.0000, 1.0000], dtype=torch.float64)
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; expected at least 1.")
    refuse_asymmetric(product, size, generator=torch.Generator().manual_seed(0), device=device)
    width = min(size, rank + oversample)
    drawn = normal((width + PROBES, size), generator, torch.empty(0, dtype=torch.float64, device=device))
    omega, tests = torch.linalg.qr(drawn[:width].mT)[0].mT, drawn[width:]
    images = applied(product, torch.cat([omega, tests]))
    sketch, seen = images[:width], images[width:]
    core = sketch @ omega.mT
    shift = _lift(core, sketch)
    factor = torch.linalg.cholesky(0.5 * (core + core.mT) + shift * torch.eye(width).to(core))
    half = torch.linalg.solve_triangular(factor, sketch + shift * omega, upper=False)  # halfᵀ half = Â + shift
    _, singular, vectors = thin_svd(half)
    values, vectors = (singular.square() - shift)[:rank], vectors[:rank]
    values = torch.where(values > shift, values, 0.0)
    error = (seen - ((tests @ vectors.mT) * values) @ vectors).norm() / seen.norm().clamp_min(1e-300)
    return Nystrom(values, vectors, float(error), 1)


def _lift(core: Tensor, sketch: Tensor) -> float:
    """What to add to the operator so that the core has a Cholesky factor in spite of rounding."""
    values = torch.linalg.eigvalsh(0.5 * (core + core.mT))
    below, largest = max(0.0, -float(values[0])), float(values[-1])
    noise = max(10 * float((core - core.mT).norm()), 1e-6 * abs(largest))
    if below > noise:
        raise NumericalError(
            f"a Nyström approximation met an eigenvalue of {-below:.3g} beside one of {largest:.3g}; expected a "
            "positive semi-definite operator: a Hessian may be indefinite where a GGN is not."
        )
    return max(sketch.shape[1] ** 0.5 * EPS * float(sketch.norm()) + 2 * below, 1e-300)
