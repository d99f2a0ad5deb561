"""Hyperparameters by the evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lapwing.core.errors import NumericalError, UnsupportedError
from lapwing.posteriors.protocols import HasEvidence, Posterior, Reweightable

P = TypeVar("P", bound=Posterior)
RANGE = (1e-10, 1e12)  # precisions beyond these mean that the evidence has no optimum


@dataclass(frozen=True)
class MaximiseEvidence:
    """Maximise the log evidence over the prior's precisions and, if asked, the noise.

    In log-precisions the evidence is concave for a fixed noise, so L-BFGS finds the one optimum; it stops when
    the slope is below ``tolerance`` times the number of weights. ``noise=True`` learns the dispersion jointly,
    which assumes that w̃ is the optimum of the tangent model; by default the noise stays the residual's.

    Cost: a log-determinant and its gradient for each of about ten steps; no data is touched.
    """

    noise: bool = False
    max_steps: int = 60
    tolerance: float = 1e-5

    def __call__(self, posterior: P) -> P:
        if not isinstance(posterior, HasEvidence) or not isinstance(posterior, Reweightable):
            raise UnsupportedError(
                f"{type(posterior).__name__} has no evidence to maximise; give the prior, or use a method that has one."
            )
        problem = posterior.problem
        prior, likelihood = problem.prior, problem.likelihood
        size = max(prior.vector.numel(), 1)
        start = [prior.values.detach().double().log().reshape(-1)]
        if self.noise and likelihood.learns_dispersion:
            start.append(likelihood.dispersion.detach().double().log().reshape(1).to(start[0]))
        with torch.inference_mode(False):
            x = torch.cat(start).clone().requires_grad_()
        count = prior.values.numel()

        def at(x: Tensor) -> Any:
            moved = problem.with_prior(prior.with_precision(x[:count].exp().reshape(prior.values.shape)))
            if len(x) > count:
                moved = moved.with_likelihood(likelihood.with_dispersion(x[count].exp()))
            return posterior.with_problem(moved)

        best, slope = minimise(lambda x: -at(x).log_evidence() / size, x, self.max_steps, self.tolerance)
        precisions = best[:count].exp()
        if not RANGE[0] < float(precisions.min()) <= float(precisions.max()) < RANGE[1]:
            raise NumericalError(
                f"the evidence has no optimum: a prior precision ran to {float(precisions.max()):.3g} (smallest "
                f"{float(precisions.min()):.3g}). The weights of a layer are all near the prior mean, or the data "
                "do not curve the loss. Give the prior."
            )
        if slope > 1e-3:
            raise NumericalError(
                f"{self.max_steps} steps left a slope of {slope:.3g} per weight in the log evidence; expected below "
                "1e-3. Raise MaximiseEvidence(max_steps=...) or give the prior."
            )
        found: P = at(best)
        return found


def minimise(objective: Any, x: Tensor, max_steps: int, tolerance: float) -> tuple[Tensor, float]:
    """L-BFGS with a strong Wolfe search in float64: the point and the slope left there.

    A value that is not finite ends it with an error.
    """
    trace: list[tuple[list[float], float]] = []
    optimiser = torch.optim.LBFGS(
        [x], lr=1.0, max_iter=max_steps, tolerance_grad=tolerance, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value: Tensor = objective(x)
        trace.append((x.detach()[:4].exp().tolist(), float(value.detach())))
        if not math.isfinite(trace[-1][1]):
            steps = "; ".join(f"{v:.6g} at {[f'{p:.3g}' for p in ps]}" for ps, v in trace[-5:])
            raise NumericalError(
                f"the evidence is not finite; the last values of its negative per weight were {steps}. "
                "Give the prior, or start from another one."
            )
        value.backward()
        return value

    with torch.inference_mode(False), torch.enable_grad():
        optimiser.step(closure)
        closure()
    assert x.grad is not None
    return x.detach(), float(x.grad.abs().max())


def started(posterior: P, data: int, outputs: int, theta: Tensor) -> P:
    """The same posterior with precisions near the optimum: gamma / |w|² with gamma at half of what it can be."""
    if not isinstance(posterior, Reweightable):
        return posterior
    prior = posterior.problem.prior
    gamma = 0.5 * min(theta.numel(), data * outputs)
    guess = gamma / float(theta.double().square().sum().clamp_min(1e-12))
    guess = min(max(guess, 1e-6), 1e8)
    moved = prior.with_precision(torch.full_like(prior.values, guess))
    found: P = posterior.with_problem(replace(posterior.problem, prior=moved))
    return found


maximise_evidence = MaximiseEvidence()
