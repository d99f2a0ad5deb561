"""The linear system whose solutions are posterior samples, and the two objectives that it minimises.

The system (XᵀX + s I) z = √s ζ + Xᵀ ε, for K rows of noise at once, is the minimum of two objectives with the same
gradient,

    L (z) = ½ |X z - ε|² + ½ s |z - ζ/√s|²         ("classic", noise in the data term),
    L'(z) = ½ |X z|²     + ½ s |z - ζ/√s - Xᵀε/s|²  ("reduced", noise in the regulariser).

Reference: Antorán et al. 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.linalg.design import Design, Part, back_product, gram_product, located_parts
from lapwing.linalg.solution import TINY, Solution

OBJECTIVES = ("reduced", "classic")


@dataclass(frozen=True, eq=False)
class Perturbed:
    """The system (XᵀX + s I) z = √s ζ + Xᵀ ε; its solution is z ~ N(0, (XᵀX + s I)⁻¹).

    ``zeta`` (K, P) and ``eps`` (K, rows) are standard normal; ``shift`` is s.
    """

    design: Design
    zeta: Tensor
    eps: Tensor
    shift: float

    def __post_init__(self) -> None:
        rows, expected = len(self.zeta), (self.design.size, self.design.rows)
        if self.zeta.shape != (rows, expected[0]) or self.eps.shape != (rows, expected[1]):
            raise ValueError(
                f"noise of the shapes {tuple(self.zeta.shape)} and {tuple(self.eps.shape)} for a design of "
                f"{expected[1]} rows and {expected[0]} columns; expected (K, {expected[0]}) and (K, {expected[1]})."
            )
        if not self.shift > 0:
            raise ValueError(f"the shift is {self.shift:g}; expected a number above zero.")

    @property
    def prior(self) -> Tensor:
        """ζ / √s (K, P): samples of the prior, where every descent starts."""
        return self.zeta.double() / self.shift**0.5

    @cached_property
    def rhs(self) -> Tensor:
        """√s ζ + Xᵀ ε (K, P), by one pass over the design."""
        return self.shift**0.5 * self.zeta.double() + back_product(self.design, self.eps)

    def objective(self, name: str) -> Objective:
        """Return the objective with this name, "reduced" or "classic"."""
        if name not in OBJECTIVES:
            raise ValueError(f"objective is {name!r}; expected one of {', '.join(OBJECTIVES)}.")
        if name == "reduced":
            return Objective(None, self.rhs, self.shift)
        return Objective(self.eps, self.shift**0.5 * self.zeta.double(), self.shift)

    def solution(self, z: Tensor, iterations: int, tolerance: float) -> Solution:
        """Return z as a solution with its residuals, computed by one product."""
        left = self.rhs - gram_product(self.design, z) - self.shift * z
        return Solution(z, left.norm(dim=1) / self.rhs.norm(dim=1).clamp_min(TINY), iterations, tolerance)


@dataclass(frozen=True, eq=False)
class Objective:
    """The function ½ |X z - target|² + ½ s |z|² - z · pull, for every row z.

    ``target`` (K, rows) is the noise in the data term, zero if None. ``pull`` (K, P) is the noise in the regulariser,
    whose gradient is exact at every step.
    """

    target: Tensor | None
    pull: Tensor
    shift: float

    def data_gradient(self, z: Tensor, part: Part, rows: slice) -> Tensor:
        """Return the gradient (K, P) of the data term of one part."""
        outputs = part.forward(z)
        return part.back(outputs if self.target is None else outputs - self.target[:, rows]).double()

    def estimate(self, z: Tensor, part: Part, rows: slice, count: int) -> Tensor:
        """Estimate the gradient (K, P) from one of ``count`` parts; the mean over all parts is the gradient."""
        return count * self.data_gradient(z, part, rows) + (self.shift * z - self.pull)


def gradient_variance(system: Perturbed, z: Tensor, objective: str) -> Tensor:
    """Return the trace (K,) of the covariance of the gradient estimate from one random part, at every row of z.

    With M parts and their data gradients g_i it is M Σ |g_i|² - |Σ g_i|². A design with one datum in each part gives
    the variance of the estimate from a single datum.

    >>> from lapwing.linalg.design import MatrixDesign
    >>> system = Perturbed(MatrixDesign(torch.eye(2).double(), part=1), torch.ones(1, 2), torch.ones(1, 2), 4.0)
    >>> gradient_variance(system, torch.ones(1, 2).double(), "reduced")
    tensor([2.], dtype=torch.float64)
    """
    function = system.objective(objective)
    total, squares, count = torch.zeros_like(z), z.new_zeros(len(z)), 0
    for part, rows in located_parts(system.design):
        gradient = function.data_gradient(z, part, rows)
        total += gradient
        squares += gradient.square().sum(1)
        count += 1
    return count * squares - total.square().sum(1)
