"""The Hessian of the regularised loss, and the minimum that trained weights belong to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import NumericalError
from lapwing.linalg.block_cg import block_conjugate_gradients
from lapwing.linalg.cholesky import not_definite
from lapwing.linalg.newton import newton
from lapwing.methods.hfl.objective import Objective

DENSE = 2048  # largest number of weights for which the Hessian is formed
FLAT = 1e-6  # a direction with less curvature than this share of the prior precision counts as flat
NEAR = 1e-4  # the same while searching for the minimum: near a flat minimum the curvature may be slightly negative
NOT_CONVERGED = (
    "The network is at no minimum of its regularised loss: train it further with this prior as weight decay, or use "
    "HFL(mode='linearised')."
)


@dataclass(frozen=True, eq=False)
class Hessian:
    """The Hessian H of the objective at its centre: a Cholesky factor up to ``DENSE`` weights, block CG above.

    A minimum may be flat in some directions: the weights of an attention head can rotate without any change of the
    outputs. There ``flat`` times the prior precision is added, so that H can be inverted. A push of outputs has no
    component in these directions; ``flat_variance`` bounds their contribution to a variance.
    """

    objective: Objective
    flat: float = FLAT

    @property
    def formed(self) -> bool:
        """Whether the matrix is formed; otherwise products with it are used."""
        return self.objective.size <= DENSE

    @cached_property
    def _ridge(self) -> Tensor:
        return self.flat * self.objective.prior.vector.detach().to(self.objective.centre)

    @cached_property
    def _matrix(self) -> Tensor | None:
        if not self.formed:
            return None
        eye = torch.eye(self.objective.size, dtype=self.objective.dtype, device=self.objective.centre.device)
        matrix = self.objective.hessian_product(eye).double()
        return 0.5 * (matrix + matrix.mT)

    @cached_property
    def root(self) -> Tensor | None:
        """L (P, P) with L Lᵀ = H; None if H is not formed, not positive definite, or flat in some direction."""
        if self._matrix is None:
            return None
        factor, info = torch.linalg.cholesky_ex(self._matrix)
        pivots = factor.diagonal().square()
        smallest = max(1e-13 * float(pivots.max()), float(self._ridge.min()))  # below it a direction is flat
        return factor if int(info) == 0 and float(pivots.min()) > smallest else None

    @cached_property
    def _factor(self) -> Tensor | None:
        matrix = self._matrix
        if matrix is None or self.root is not None:
            return self.root
        factor, info = torch.linalg.cholesky_ex(matrix + torch.diag(self._ridge).double())
        if int(info) == 0:
            return factor
        smallest = float(torch.linalg.eigvalsh(matrix)[0])
        raise NumericalError(not_definite("the trained weights", smallest) + f" {NOT_CONVERGED}")

    def solve(self, rows: Tensor) -> Tensor:
        """Return H⁻¹ times every row, (K, P); raise if H is indefinite."""
        factor = self._factor
        if factor is not None:
            return torch.cholesky_solve(rows.double().mT, factor).mT.to(rows)
        product = lambda v: self.objective.hessian_product(v) + self._ridge * v
        try:
            solution = block_conjugate_gradients(product, rows, tolerance=1e-4, max_iterations=2000)
        except NumericalError as error:
            advice = f" {NOT_CONVERGED}" if "positive definite" in str(error) else ""
            raise NumericalError(f"{error}{advice}") from error
        return solution.x.to(rows)

    def flat_variance(self, solved: Tensor) -> Tensor:
        """Return an upper bound on the contribution of flat directions to rᵀ H⁻¹ r, (K,), given H⁻¹ r (K, P)."""
        return (self._ridge * solved.square()).sum(1)


def nearest_minimum(objective: Objective) -> tuple[Tensor, list[float]]:
    """Return the step (P,) from the weights to the minimum they belong to, and the Newton decrements on the way."""
    start = torch.zeros_like(objective.centre)
    solve = lambda d, rows: Hessian(objective.recentred(d), NEAR).solve(rows)
    tolerance = 1e-18 if objective.dtype == torch.float64 else 1e-9
    return newton(objective.gradient, solve, start, tolerance=tolerance, value=objective.value)
