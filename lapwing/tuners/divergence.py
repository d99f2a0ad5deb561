"""Checks that a search over hyperparameters stays finite and in range."""

from __future__ import annotations

import math
from collections.abc import Collection

from lapwing.core.trace import Step, Trace
from lapwing.errors import DivergedError
from lapwing.posteriors.protocols import Posterior
from lapwing.tuners.coordinates import Coordinates

RANGE = (1e-10, 1e12)


def in_range(precisions: Collection[float], posterior: Posterior) -> bool:
    """Return whether an optimum can be at these precisions: below 1e-10 or above 1e12 the evidence has none.

    A network for targets in small units has large weights and small precisions, so the lower limit is divided by the
    mean square of the weights.
    """
    prior, theta = posterior.problem.prior, posterior.problem.network.theta()
    size = float((theta - prior.mean).detach().double().square().mean())
    return RANGE[0] < min(precisions) * max(1.0, size) and max(precisions) < RANGE[1]


def refuse_not_finite(coordinates: Coordinates, steps: list[Step], tuner: str) -> None:
    """Raise if the score of the last step is not finite."""
    if not math.isfinite(steps[-1].score):
        raise_diverged(
            coordinates, steps, "the evidence is not finite. Give the prior, or start from another one.", tuner
        )


def refuse_runaway(coordinates: Coordinates, steps: list[Step], tuner: str) -> None:
    """Raise if a precision of the last step is out of range; a search may pass through such points, not end there."""
    low, high = min(steps[-1].precisions), max(steps[-1].precisions)
    if not in_range(steps[-1].precisions, coordinates.posterior):
        message = (
            f"the evidence has no optimum: a prior precision ran to {high:.3g} (smallest {low:.3g}). The weights of a "
            "layer are all near the prior mean, or the data do not curve the loss. Give the prior."
        )
        raise_diverged(coordinates, steps, message, tuner)


def raise_diverged(coordinates: Coordinates, steps: list[Step], message: str, tuner: str) -> None:
    """Raise ``DivergedError`` with the trace and the posterior at the best step that is finite and in range."""
    posterior = coordinates.posterior
    good = [step for step in steps if math.isfinite(step.score) and in_range(step.precisions, posterior)]
    trace = Trace(tuner, steps=tuple(steps), findings=(message,))
    if good:
        posterior = coordinates.finished(coordinates.position(max(good, key=lambda step: step.score)), trace)
    raise DivergedError(message, trace, posterior)
