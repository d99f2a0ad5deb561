"""Hyperparameters by the evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lapwing.core.trace import Step, Trace
from lapwing.errors import DivergedError
from lapwing.posteriors.protocols import Posterior
from lapwing.tuners.coordinates import Coordinates

P = TypeVar("P", bound=Posterior)
RANGE = (1e-10, 1e12)


@dataclass(frozen=True)
class MaximiseEvidence:
    """Maximise the log evidence over the prior's precisions and, if asked, the noise.

    In log-precisions the evidence is concave for a fixed noise, so L-BFGS finds the one optimum; it stops when
    the slope is below ``tolerance`` times the number of weights. ``noise=True`` learns the dispersion jointly (one
    for each output where the likelihood says so), which assumes that w̃ is the optimum of the tangent model; by
    default the noise stays the residual's. The way there is in ``posterior.trace``.

    Cost: a log-determinant and its gradient for each of about ten steps; no data is touched.
    """

    noise: bool = False
    max_steps: int = 60
    tolerance: float = 1e-5

    def __call__(self, posterior: P) -> P:
        coordinates = Coordinates.of(posterior, self.noise)
        steps: list[Step] = []
        weights = max(coordinates.weights, 1)

        def objective(x: Tensor) -> Tensor:
            value: Tensor = coordinates.at(x).log_evidence()
            steps.append(coordinates.step(x, float(value.detach())))
            refuse_not_finite(coordinates, steps)
            return -value / weights

        best, slope = minimise(objective, coordinates.start, self.max_steps, self.tolerance)
        refuse_runaway(coordinates, steps)
        refuse_unfinished(coordinates, steps, slope, self.max_steps)
        found: P = coordinates.finished(best, Trace("MaximiseEvidence", steps=tuple(steps)))
        return found


def in_range(precisions: Collection[float], posterior: Posterior) -> bool:
    """Whether an optimum may be there: beyond 1e-10 and 1e12 the evidence has none.

    Large weights, of a network for targets in small units, have small precisions: the lower end is in units of theirs.
    """
    prior, theta = posterior.problem.prior, posterior.problem.network.theta()
    size = float((theta - prior.mean).detach().double().square().mean())
    return RANGE[0] < min(precisions) * max(1.0, size) and max(precisions) < RANGE[1]


def refuse_not_finite(coordinates: Coordinates, steps: list[Step], tuner: str = "MaximiseEvidence") -> None:
    """Raise once the last step is not finite, with the last good value."""
    if not math.isfinite(steps[-1].score):
        _diverged(coordinates, steps, "the evidence is not finite. Give the prior, or start from another one.", tuner)


def refuse_runaway(coordinates: Coordinates, steps: list[Step], tuner: str = "MaximiseEvidence") -> None:
    """Raise if the last step is out of range, where no search may end (passing through is another matter)."""
    low, high = min(steps[-1].precisions), max(steps[-1].precisions)
    if not in_range(steps[-1].precisions, coordinates.posterior):
        _diverged(
            coordinates,
            steps,
            f"the evidence has no optimum: a prior precision ran to {high:.3g} (smallest {low:.3g}). The weights of a "
            "layer are all near the prior mean, or the data do not curve the loss. Give the prior.",
            tuner,
        )


def refuse_unfinished(coordinates: Coordinates, steps: list[Step], slope: float, max_steps: int) -> None:
    if slope > 1e-3:
        _diverged(
            coordinates,
            steps,
            f"{max_steps} steps left a slope of {slope:.3g} per weight in the log evidence; expected below "
            "1e-3. Raise MaximiseEvidence(max_steps=...) or give the prior.",
        )


def _diverged(coordinates: Coordinates, steps: list[Step], message: str, tuner: str = "MaximiseEvidence") -> None:
    kept = coordinates.posterior
    good = [step for step in steps if math.isfinite(step.score) and in_range(step.precisions, kept)]
    trace = Trace(tuner, steps=tuple(steps), findings=(message,))
    if good:
        kept = coordinates.finished(coordinates.position(max(good, key=lambda step: step.score)), trace)
    raise DivergedError(message, trace, kept)


def minimise(
    objective: Callable[[Tensor], Tensor], start: Tensor, max_steps: int, tolerance: float
) -> tuple[Tensor, float]:
    """L-BFGS with a strong Wolfe search in float64: the point and the slope left there."""
    with torch.inference_mode(False), torch.enable_grad():
        x = start.clone().requires_grad_()
        optimiser = torch.optim.LBFGS(
            [x],
            lr=1.0,
            max_iter=max_steps,
            tolerance_grad=tolerance,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimiser.zero_grad()
            value = objective(x)
            value.backward()
            return value

        optimiser.step(closure)
        closure()
    assert x.grad is not None
    return x.detach(), float(x.grad.abs().max())
