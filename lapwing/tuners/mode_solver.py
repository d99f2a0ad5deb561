"""The optimum of the tangent model's regularised loss, by Newton's method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import NumericalError
from lapwing.linalg.cg import conjugate_gradients
from lapwing.linalg.operators import Product, Solution
from lapwing.posteriors.weight_space import Mode
from lapwing.problem import Problem
from lapwing.tangent.model import TangentModel

ITERATIONS = 1000  # of conjugate gradients in one Newton step


@dataclass(frozen=True, eq=False)
class ModeSolver:
    """A solver for θ*, the optimum under a problem's prior and noise: Newton's method with conjugate gradients.

    The loss is convex in theta, and h is linear along a step, so one pass over the data gives the loss at every step
    length. Systems are solved in units of the prior: there no eigenvalue is below one, at most as many as there are
    data differ from one, and half the squared residual bounds what a step misses. Stops when no step can gain more
    than ``tolerance`` nats, or less than rounding in the network's dtype can resolve.
    """

    model: TangentModel
    base: Tensor  # w̃
    tolerance: float = 1e-8
    max_steps: int = 50

    def __call__(self, problem: Problem, start: Tensor, precondition: Product | None = None) -> Mode:
        """Return θ* and its loss, from ``start``; ``precondition`` approximates the inverse in units of the prior."""
        prior, phi = problem.prior, float(problem.likelihood.dispersion)
        vector = prior.vector.detach()
        unit = vector.rsqrt()
        rounding = torch.finfo(self.model.dtype).eps
        theta = start.clone()
        loss, slope = self.model.gradient(theta - self.base)
        gain = missed = float("inf")
        for _ in range(self.max_steps):
            gradient = slope / phi + vector * (theta - prior.mean)
            value = loss / phi + 0.5 * float(prior.penalty(theta))
            enough = self.tolerance + 4 * rounding * abs(value)
            size = float((unit * gradient).norm())
            if size == 0:
                return Mode(theta, loss)
            tolerance = max(0.1 * enough**0.5 / size, min(1e-2, 0.1 * gain))
            solution = self._newton_system(theta, unit, phi, unit * gradient, precondition, tolerance)
            step = -unit * solution.x[0]
            gain = 0.5 * float(-(gradient @ step))
            missed = 0.5 * (float(solution.residuals[0]) * size) ** 2
            if gain <= enough:
                if missed <= enough:
                    return self._after_last_step(theta, step)
                continue  # the step gains nothing, but the system was not solved well enough to stop
            theta = theta + self._length(problem, theta, step, value, gain) * step
            loss, slope = self.model.gradient(theta - self.base)
        raise NumericalError(
            f"the optimum of the tangent model was not reached in {self.max_steps} Newton steps: up to "
            f"{gain + missed:.3g} nats are left; expected {self.tolerance:g}. Raise the prior precision."
        )

    def _newton_system(
        self, theta: Tensor, unit: Tensor, phi: float, right: Tensor, precondition: Product | None, tolerance: float
    ) -> Solution:
        """Solve (A^-½ H A^-½ / φ + I) x = right for H at theta; ``unit`` (P,) is the diagonal of A^-½."""
        delta = theta - self.base
        return conjugate_gradients(
            lambda v: unit * self.model.products(delta, unit * v) / phi + v,
            right[None],
            precondition=precondition,
            tolerance=tolerance,
            max_iterations=ITERATIONS,
            truncated=True,
        )

    def _length(self, problem: Problem, theta: Tensor, step: Tensor, value: float, gain: float) -> Tensor:
        """Return the best of the step lengths 1, 1/2, 1/4, ...; raise if none lowers the objective."""
        prior, phi = problem.prior, float(problem.likelihood.dispersion)
        lengths = 0.5 ** torch.arange(0, 12, dtype=torch.float64, device=theta.device)
        penalties = torch.stack([0.5 * prior.penalty(theta + t * step) for t in lengths]).detach()
        totals = self.model.losses(theta - self.base, step, lengths) / phi + penalties
        best = int(totals.argmin())
        if not float(totals[best]) < value:
            raise NumericalError(
                f"the tangent model's loss does not fall along a Newton step that promises {gain:.3g} nats; "
                "check that the data give the same batches at every pass, or compute in float64."
            )
        return lengths[best]

    def _after_last_step(self, theta: Tensor, step: Tensor) -> Mode:
        """Return the mode after one more full step: the value hardly changes, but its slope does."""
        losses = self.model.losses(theta - self.base, step, torch.ones(1, dtype=torch.float64, device=theta.device))
        return Mode(theta + step, float(losses[0]))
