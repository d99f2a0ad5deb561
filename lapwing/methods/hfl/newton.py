"""Newton steps with the Hessian of the regularised loss: to its minimum, and to the minima under pushes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.spectra import eigvalsh
from lapwing.errors import NumericalError
from lapwing.linalg.cg import block_conjugate_gradients
from lapwing.linalg.cholesky import not_definite
from lapwing.methods.hfl.objective import Objective

Rows = Callable[[Tensor], Tensor]  # (K, P) -> (K, P)

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
        smallest = float(eigvalsh(matrix)[0])
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
    return newton(objective.gradient, solve, objective.value, start, tolerance=tolerance)


def distance_in_words(objective: Objective) -> str:
    """Return how far the weights are from a minimum of the regularised loss U, without its Hessian.

    The words have the length of the gradient, and by how much the best of 20 steps along it lowers U.
    """
    zero = torch.zeros_like(objective.centre)
    slope, here = objective.gradient(zero.unsqueeze(0))[0], objective.value(zero)
    longest = objective.centre.norm().clamp_min(1) / slope.norm().clamp_min(torch.finfo(slope.dtype).tiny)
    values = (objective.value(-(longest / 4**i) * slope) for i in range(20))
    fall = max((here - value for value in values if math.isfinite(value)), default=0.0)
    return (
        f"the gradient of the regularised loss has the length {float(slope.norm()):.3g} at the trained weights; "
        f"expected about zero. A single step along it lowers the loss by {max(fall, 0.0):.3g}, from {here:.3g}; "
        "expected far below 1."
    )


@dataclass(frozen=True, eq=False)
class Pushed:
    """Perturbed minima d (K, P), with ∇U(d_k) = λ_k ∇g_k(d_k) up to the relative residual of each row."""

    d: Tensor
    residuals: Tensor  # |λ ∇g - ∇U| in the metric of H⁻¹, relative to the start, (K,)
    missing: Tensor  # share of the response g_k(d_k) - g_k(start) that one more step would add, (K,)
    steps: int


def pushed(
    gradient: Rows, push: Rows, solve: Rows, strength: Tensor, start: Tensor, *, tolerance: float, max_steps: int = 50
) -> Pushed:
    """Minimise U - λ_k g_k for every row k, with steps H⁻¹ (λ ∇g - ∇U) and the Hessian H at the start.

    ``gradient`` returns ∇U at each row, ``push`` returns ∇g_k at row k, ``solve`` applies H⁻¹ and ``strength`` is λ
    (K,). For small λ each step reduces the error, in the metric of H, and the residual, in the metric of H⁻¹, by a
    factor of about λ. Rows that stop improving keep their best iterate; their residual says how good it is.

    >>> minima = pushed(lambda d: 2 * d, torch.ones_like, lambda r: r / 2, torch.tensor([3.0]), torch.zeros(1, 1),
    ...                 tolerance=1e-6)
    >>> minima.d, minima.steps
    (tensor([[1.5000]]), 1)
    """
    weight, tiny = strength.unsqueeze(1), torch.finfo(start.dtype).tiny
    d = kept = start
    ahead, whole = torch.zeros_like(start), torch.ones_like(strength)
    best = torch.full_like(strength, torch.inf)
    for step in range(max_steps + 1):
        gap = weight * push(d) - gradient(d)
        overflow = ~torch.isfinite(gap).all(1)  # the last step was too long
        more = solve(gap.masked_fill(overflow.unsqueeze(1), 0))
        sizes = (gap * more).sum(1).clamp_min(0).sqrt().masked_fill(overflow, torch.inf)
        whole = whole if step else sizes.clamp_min(tiny)
        better = sizes / whole < best
        best = torch.where(better, sizes / whole, best)
        kept, ahead = (torch.where(better.unsqueeze(1), new, old) for new, old in ((d, kept), (more, ahead)))
        going = better & (best > tolerance)
        if not bool(going.any()) or step == max_steps:
            break
        d = torch.where(going.unsqueeze(1), d + more, kept)
    slopes = push(kept)
    rest, response = (slopes * ahead).sum(1).abs(), (slopes * (kept - start)).sum(1).abs()
    return Pushed(kept, best, rest / (response + rest).clamp_min(tiny), step)


def newton(
    gradient: Rows, solve: Callable[[Tensor, Tensor], Tensor], value: Callable[[Tensor], float], start: Tensor, *,
    tolerance: float, max_steps: int = 30,
) -> tuple[Tensor, list[float]]:  # fmt: skip
    """Minimise U from ``start`` (P,) by Newton's method; return the minimum and the decrement gᵀH⁻¹g of every step.

    ``solve(d, r)`` applies the inverse Hessian at d to r (1, P). Half the decrement estimates how far U is above its
    minimum. ``value`` is the function U(d): a step that does not lower U enough is halved, so that a search from far
    away stays in the basin of its minimum. The search ends if the decrement is at most ``tolerance``, or if no length
    of the step helps; the last decrement is infinite if the gradient overflows.
    """
    d, decrements = start, []
    for _ in range(max_steps):
        slope = gradient(d.unsqueeze(0))
        if not bool(torch.isfinite(slope).all()):
            decrements.append(math.inf)
            break
        step = solve(d, slope)
        decrements.append(float((slope * step).sum()))
        length = 0.0 if decrements[-1] <= tolerance else _length(value, d, step[0], decrements[-1])
        if length == 0:
            break
        d = d - length * step[0]
    return d, decrements


def _length(value: Callable[[Tensor], float], d: Tensor, step: Tensor, decrement: float) -> float:
    """Return the largest power of a half by which the step lowers U by a tenth of the predicted decrease; or zero."""
    here, length = value(d), 1.0
    floor = 1e3 * torch.finfo(d.dtype).eps * abs(here)  # smaller differences are rounding
    while not value(d - length * step) <= here - 0.1 * length * decrement + floor:
        length /= 2
        if length < 1e-3:
            return 0.0
    return length
