"""Log-determinants from the eigenvalues of a Krylov basis and a quadrature of the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg.krylov import BlockKrylov
from lapwing.linalg.operators import Product
from lapwing.linalg.quadrature import Quadrature, lanczos_quadrature

CONVERGED = 1e-2  # residual of a Ritz pair, relative to its own value, up to which its value counts as exact


@dataclass(frozen=True, eq=False)
class Logdet:
    """An estimate of log det(I + A/shift): ``value`` is differentiable in the shift, ``error`` one standard error."""

    value: Tensor
    error: float


@dataclass(frozen=True, eq=False)
class DeflatedSpectrum:
    """The spectrum of A as eigenvalues (r,) that are known and a quadrature of A on the orthogonal complement.

    ``rank`` is the number of rows of the basis that the eigenvalues come from.
    """

    eigenvalues: Tensor
    rest: Quadrature
    rank: int

    @classmethod
    def of(cls, product: Product, basis: BlockKrylov, probes: Tensor, steps: int) -> DeflatedSpectrum:
        """Estimate the spectrum from the converged Ritz pairs of a basis and random ``probes`` (K, P).

        Cost: ``steps`` products of K rows.
        """
        # Part of a pair that has not converged would be counted twice. Its residual is compared with its value:
        # the coupling to the rest adds the squared residual over value and shift, which may be far below the largest.
        converged = basis.pair_residuals() * basis.values[:1] <= CONVERGED * basis.values
        project = _complement(basis, basis.turn[:, converged])
        for _ in range(2):
            probes = project(probes)
        # Before and after the product: otherwise rounding would bring the deflated pairs back.
        rest = lanczos_quadrature(lambda v: project(product(project(v))), probes, steps)
        return cls(basis.values[converged], rest, len(basis.rows))

    def logdet(self, shift: Tensor) -> Logdet:
        """Estimate log det(I + A/shift); the error is the standard error over probes plus half the quadrature gap."""
        values, probes = self.eigenvalues.to(shift).clamp_min(0), len(self.rest.nodes)
        low, high = self.rest.ends(lambda nodes: torch.log1p(nodes.clamp_min(0) / shift))
        middle = 0.5 * (low + high)
        spread = float(middle.detach().std()) / probes**0.5 if probes > 1 else float("inf")
        bias = 0.5 * float((high - low).detach().mean().abs())
        return Logdet(torch.log1p(values / shift).sum() + middle.mean(), spread + bias)


def _complement(basis: BlockKrylov, turn: Tensor) -> Product:
    """Return the projection off combinations of the basis, with coefficients ``turn`` (d, r); they are not formed."""
    inner = turn @ turn.mT
    return lambda v: v - basis.rows.combined(basis.rows.coordinates(v) @ inner)
