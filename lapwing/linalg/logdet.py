"""Log-determinants: eigenvalues of a Krylov basis, and a Gauss quadrature of the rest of the spectrum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.random import uniform
from lapwing.core.spectra import eigh
from lapwing.linalg.krylov import BlockKrylov
from lapwing.linalg.operators import TINY, Product, applied

CONVERGED = 1e-2  # residual of a Ritz pair, relative to its own value, up to which its value counts as exact
CUT = 1e-12  # a new direction shorter than this, relative to the largest image, counts as zero


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
        inner = basis.turn[:, converged] @ basis.turn[:, converged].mT
        project = lambda v: v - basis.rows.combined(basis.rows.coordinates(v) @ inner)  # removes the converged pairs
        for _ in range(2):
            probes = project(probes)
        # Project before and after the product: otherwise rounding would bring the deflated pairs back.
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


@dataclass(frozen=True, eq=False)
class Quadrature:
    """Nodes and weights for each of K rows v (P,), with Σ weight · f(node) ≈ v f(A) vᵀ.

    ``nodes`` and ``weights`` (K, m) are those of Gauss; ``low_nodes`` and ``low_weights`` (K, m + 1) those of
    Gauss-Radau with a node at zero, the lower end of a positive semi-definite spectrum.
    """

    nodes: Tensor
    weights: Tensor
    low_nodes: Tensor
    low_weights: Tensor

    def ends(self, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return a lower and an upper bound (K,) of v f(A) vᵀ.

        They are bounds if the derivatives of f alternate in sign and the first one is positive, as for log(1 + x/a)
        and x/(x + a).
        """
        return (function(self.low_nodes) * self.low_weights).sum(1), (function(self.nodes) * self.weights).sum(1)


def random_signs(count: int, size: int, generator: torch.Generator | None, device: torch.device | None) -> Tensor:
    """Draw Rademacher rows (count, size) in float64, the probes of a stochastic estimate of a trace."""
    like = torch.empty(0, dtype=torch.float64, device=device)
    return torch.where(uniform((count, size), generator, like) < 0.5, -1.0, 1.0).to(like)


def lanczos_quadrature(product: Product, rows: Tensor, steps: int) -> Quadrature:
    """Return the quadrature after Lanczos steps on each row (K, P), with full reorthogonalisation, twice.

    The rows do not mix, but share one product at each step. A row whose Krylov space is exhausted continues as zeros.
    Memory: steps · K · P numbers in float64.
    Reference: Golub & Meurant 1994.

    >>> a = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    >>> quadrature = lanczos_quadrature(lambda v: v @ a, torch.ones(1, 2, dtype=torch.float64), steps=2)
    >>> [round(float(end), 6) for end in quadrature.ends(torch.log1p)]  # log 2 + log 4
    [2.079442, 2.079442]
    """
    rows = rows.double()
    count, size = rows.shape
    steps = min(steps, size)
    lengths = rows.norm(dim=1)
    q = torch.where(lengths[:, None] > 0, rows / lengths[:, None], 0.0)
    basis = rows.new_zeros(count, steps, size)
    small = rows.new_zeros(count, steps + 1, steps + 1)
    scale, step = rows.new_zeros(()), 0
    for step in range(steps):
        basis[:, step] = q
        image = applied(product, q)
        scale = torch.maximum(scale, image.norm(dim=1).max())
        small[:, step, step] = (image * q).sum(1)
        previous = basis[:, : step + 1]
        for _ in range(2):
            image = image - ((previous @ image[:, :, None]).mT @ previous)[:, 0]
        beta = image.norm(dim=1)
        live = beta > CUT * scale
        small[:, step, step + 1] = small[:, step + 1, step] = torch.where(live, beta, 0.0)
        q = torch.where(live[:, None], image / beta[:, None], 0.0)
        if not bool(live.any()):
            break
    return _rules(small[:, : step + 2, : step + 2], lengths.square())


def _rules(small: Tensor, mass: Tensor) -> Quadrature:
    """Return both rules from the tridiagonal matrices (K, m + 1, m + 1), whose last entry is not set yet."""
    nodes, turn = eigh(small[:, :-1, :-1])
    end = nodes.min().clamp_max(0)
    # The last entry that makes ``end`` an eigenvalue of the longer matrix.
    inverse = (turn[:, -1].square() / (nodes - end).clamp_min(TINY)).sum(1)
    coupling = small[:, -1, -2].square()
    longer = small.clone()
    longer[:, -1, -1] = end + torch.where(coupling > 0, coupling * inverse, 0.0)
    low_nodes, low_turn = eigh(longer)
    weights, low_weights = turn[:, 0].square() * mass[:, None], low_turn[:, 0].square() * mass[:, None]
    return Quadrature(nodes, weights, low_nodes, low_weights)
