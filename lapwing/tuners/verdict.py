"""How a posterior does against the plain network on data at hand, and a warning where it does clearly worse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from lapwing.core.callers import warn_caller
from lapwing.core.data import Data
from lapwing.core.memory import fitting
from lapwing.core.trace import Trace
from lapwing.posteriors.effective import HasGammas
from lapwing.posteriors.mixture import Belief, Cell
from lapwing.tuners.cells import CellGrid, counted_scores, mean_score
from lapwing.tuners.held_outputs import HeldOutputs
from lapwing.tuners.offsets import biases

POINTS = 700  # training data that are looked at
ROW = 128  # bytes of an output of a datum while biases are looked for
CLEARLY = 0.05  # nats for each datum, beyond what the effective number of parameters explains


def judged(posterior: Any, data: Data) -> Any:
    """Return the posterior with the training NLL of the plain network and of itself in its trace; warn if it is worse.

    A posterior that knows γ of its weights from n data is expected to lose about ½ log(1 + γ/n) nats of training
    likelihood for each datum against the network that was fitted to them; more than that is harm. Cost: a pass over
    at most 700 training data.
    """
    likelihood = posterior.problem.likelihood
    cells = (Cell(0, likelihood), Cell(0, likelihood, 0.0))
    grid = CellGrid.compared((posterior,), (Belief(0),), cells)
    own, plain = (-mean_score(*counted_scores(grid, data, POINTS))).tolist()
    trace = posterior.trace or Trace("no tuner", "training NLL")
    if own - plain > CLEARLY + _explained(posterior):
        message = (
            f"{trace.tuner} makes the likelihood of the training targets worse than that of the plain network: NLL "
            f"{own:.3g} in the place of {plain:.3g} for each datum. Such error bars are too wide. Give validation "
            "data, fit(..., validation=data), or leave out the tuner."
        )
        warn_caller(message)
        trace = replace(trace, findings=(*trace.findings, message))
    scores = {"plain network": plain, "this posterior": own}
    return posterior.with_trace(replace(trace, scores=scores, scored_on="training"))


def with_bias_noticed(posterior: Any, data: Data) -> Any:
    """Return the posterior with a remark, and warn, if the network predicts clearly too many or too few of a class.

    Cost: a forward pass over at most 700 training data, or as many as fit into the memory of a call.
    """
    network, likelihood = posterior.problem.network, posterior.problem.likelihood
    if not likelihood.takes_offset:
        return posterior
    points = fitting(POINTS, ROW * network.output_shape[-1], torch.device("cpu"), 0.5)
    found = biases(HeldOutputs.of(network, likelihood, data, points), likelihood)
    if not found:
        return posterior
    what, weights = ("class", "class_weights") if likelihood.ignores_common_shift else ("label", "pos_weight")
    message = (
        f"the network gives {what} {found[0].output} a mean probability of {found[0].mean:.3g} on training data where "
        f"its share is {found[0].frequency:.3g}: it was probably trained with weights of the classes, or on resampled "
        f"data. Give validation data, fit(..., validation=data), or the weights, "
        f"{type(likelihood).__name__}({weights}=...); either corrects the probabilities."
    )
    warn_caller(message)
    trace = posterior.trace or Trace("")
    return posterior.with_trace(replace(trace, findings=(*trace.findings, message)))


def _explained(posterior: Any) -> float:
    """Return the loss of training likelihood for each datum that the effective number of parameters explains."""
    count = max(1, posterior.statistics.data)
    gamma = float(posterior.gammas().sum()) if isinstance(posterior, HasGammas) else count
    return 0.5 * math.log1p(min(gamma, count) / count)
