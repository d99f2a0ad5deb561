"""The result of an iterative solver for linear systems."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lapwing.errors import NumericalError


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
