"""One factor on all variances, fitted on held-out data."""

from __future__ import annotations

import math

import torch

from lapwing.core.data import Data
from lapwing.core.gaussian import FunctionGaussian
from lapwing.errors import DataError, NumericalError
from lapwing.methods.hfl.pushed_weights import PushedWeights

SCALES = (-12, 20)  # range of the log-scale


def fitted_scale(posterior: PushedWeights, data: Data) -> float:
    """Return the factor on the variances that maximises the likelihood of held-out data.

    A grid on the log-scale, then golden-section search. Cost: one prediction of the data.
    """
    parts = []
    for batch in data.batches("calibration"):
        belief = posterior(batch.inputs)
        y = posterior.problem.likelihood.targets(belief.mean, batch.targets)
        parts.append((belief.mean.double(), belief.cov.double(), y))
    if not any(bool(cov.any()) for _, cov, _ in parts):
        raise DataError(
            "the scores are zero at all calibration inputs, so any scale fits them alike; expected some above zero. "
            "Give other calibration data, other evaluation inputs, or variant='absolute'."
        )

    def cost(log_scale: float) -> float:
        factor = math.exp(log_scale)
        predicted = (posterior.problem.likelihood.predict(FunctionGaussian(f, factor * cov)).log_prob(y)
                     for f, cov, y in parts)  # fmt: skip
        try:
            total = -sum(float(part.sum()) for part in predicted)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # a variance so large that it overflows
            return math.inf
        return total if math.isfinite(total) else math.inf

    start = min((k / 2 for k in range(2 * SCALES[0], 2 * SCALES[1] + 1)), key=cost)
    if math.isinf(cost(start)):
        raise NumericalError(
            "HFL: the calibration data have no finite likelihood under any scale of the scores. Check that their "
            "targets are of the kind that the network was trained on, and its outputs there for overflow."
        )
    low, high, ratio = start - 0.5, start + 0.5, (math.sqrt(5) - 1) / 2
    for _ in range(30):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if cost(a) < cost(b) else (a, high)
    return math.exp(0.5 * (low + high))


def scale_finding(scale: float) -> tuple[str, ...]:
    """Return the finding that calibration reached the edge of the scale search, if it did."""
    low, high = math.log(scale) <= SCALES[0] + 0.5, math.log(scale) >= SCALES[1] - 0.5
    if not (low or high):
        return ()
    reason = (
        "variances of zero: the network is calibrated, or too uncertain, without them"
        if low
        else "variances beyond its upper edge"
    )
    return (f"calibration reached the edge of the scale search at {scale:.2g}; the data ask for {reason}",)
