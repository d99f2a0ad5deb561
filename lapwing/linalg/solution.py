"""The result of an iterative solver for linear systems, and the residual that decides when it stops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import NumericalError
from lapwing.linalg.operators import Product

CHECK_EVERY = 20  # iterations between two computations of b - A x
DRIFT = 0.1  # relative difference between the updated and the computed residual that is tolerated
EPS = torch.finfo(torch.float64).eps
TINY = torch.finfo(torch.float64).tiny
SINGULAR = 1e2 * EPS  # of the largest curvature: rounding of float64 products leaves curvature of this size
ADVICE = (
    "Raise max_iterations, use a preconditioner, raise the prior precision, or take float64 where products are float32."
)


@dataclass(frozen=True, eq=False)
class Solution:
    """The solution x (K, P) of A x = b for K right-hand sides, with its accuracy and cost.

    ``residuals`` (K,) are the relative residuals |b - A x| / |b|, and ``iterations`` is the number of iterations, of
    one product each. Conjugate gradients update the residual at each iteration and compute b - A x now and then; then
    ``residuals`` are the larger of the two and ``updated`` (K,) are the updated ones. Where there are updated ones,
    they decide on convergence: float64 rounding of A x can keep b - A x above a very small tolerance.
    """

    x: Tensor
    residuals: Tensor
    iterations: int
    tolerance: float
    updated: Tensor | None = None

    @property
    def converged(self) -> bool:
        """Whether the residual of every row is at most the tolerance."""
        return bool(((self.residuals if self.updated is None else self.updated) <= self.tolerance).all())

    def require_convergence(self, solver: str, advice: str) -> Solution:
        """Return this solution; raise a ``NumericalError`` with its residual if it has not converged."""
        if self.converged:
            return self
        raise NumericalError(
            f"{solver} stopped after {self.iterations} iterations with a relative residual of "
            f"{float(self.residuals.max()):.3g}; expected {self.tolerance:g}. {advice}"
        )


class ResidualMonitor:
    """The comparison of the residual that a solver updates with b - A x; mutable, made for one solve.

    Args:
        product: multiplies rows by A.
        rhs: the right-hand sides b (K, P).
        sizes: the lengths (K,) that residuals are relative to.
        tolerance: the relative residual to reach.
    """

    def __init__(self, product: Product, rhs: Tensor, sizes: Tensor, tolerance: float) -> None:
        self.stalled = False  # whether the products are not accurate enough to go on
        self._product, self._rhs, self._sizes, self._tolerance = product, rhs, sizes, tolerance
        self._target = tolerance  # of the updated residual
        self._computed = torch.zeros_like(sizes)  # |b - A x|, zero where the last iteration did not compute it
        self._norm = 0.0  # of A, as far as the products show it
        self._previous = torch.inf  # the worst ratio of residual to tolerance at the previous check

    def active(self, residual: Tensor) -> Tensor:
        """Return which rows (K,) have not reached their tolerance yet."""
        return residual.norm(dim=1) > self._target * self._sizes

    def observe(self, images: Tensor, rows: Tensor) -> None:
        """Note the product of one iteration: it bounds the norm of A from below."""
        self._norm = max(self._norm, float((images.norm(dim=1) / rows.norm(dim=1)).max()))
        self._computed = torch.zeros_like(self._sizes)

    def check(self, x: Tensor, residual: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """Compute b - A x with one product; return the residual to go on with and the rows (K,) that it replaces.

        A row is replaced where its updated residual has drifted away and is not small enough yet. ``stalled`` becomes
        true if only such rows are left and their worst residual has hardly fallen since the previous check. If the
        solver would stop (``last``) with a computed residual above the tolerance, its target is lowered.
        """
        computed = self._rhs - self._product(x).double()
        self._computed = computed.norm(dim=1)
        enough = self._tolerance * self._sizes
        allowed = torch.maximum(DRIFT * residual.norm(dim=1), 10 * EPS * self._norm * x.norm(dim=1))
        left = self._computed > enough
        drifted = left & ((computed - residual).norm(dim=1) > allowed)
        all_drifted = bool(left.any()) and torch.equal(left, drifted)
        worst = float((self._computed / enough)[left].max()) if all_drifted else 0.0
        self.stalled = worst > 0.5 * self._previous
        self._previous = worst or torch.inf
        if last and bool(left.any()):
            self._target = self._tolerance / (1 + DRIFT)
        return torch.where(drifted[:, None], computed, residual), drifted

    def solution(self, x: Tensor, residual: Tensor, iterations: int) -> Solution:
        """Return the solution with the larger of the updated and the computed residual."""
        updated = residual.norm(dim=1)
        larger = updated.maximum(self._computed)
        return Solution(x, larger / self._sizes, iterations, self._tolerance, updated / self._sizes)


def not_positive_definite(curvature: float, largest: float) -> NumericalError:
    """Return the error for a search direction without positive curvature."""
    return NumericalError(
        f"conjugate gradients met a direction with curvature {curvature:.3g}, after one of {largest:.3g}; expected a "
        "symmetric positive definite operator. Raise the prior precision, or take float64 where products are float32."
    )
