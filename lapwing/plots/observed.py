"""What predictions say beside what was observed: the numbers behind reliability, coverage and risk pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.core.settings import PROBABILITY, require_integer, seen
from lapwing.errors import DataError, UnsupportedError
from lapwing.metrics.arrays import listed, numbers
from lapwing.metrics.classification import calibration
from lapwing.metrics.intervals import coverage
from lapwing.metrics.selection import RiskCoverage, risk_coverage

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # of the intervals
LEAST = 0.005  # share of the predictions below which a bin is left out
IGNORED = -100  # the label of data that do not count, as in nn.CrossEntropyLoss


@dataclass(frozen=True, eq=False)
class Answers:
    """Probabilities and whether what they are about came true, (N,) each."""

    probability: Tensor
    true: Tensor
    of_classes: bool  # of the most probable class; otherwise of label one

    @property
    def uncertainty(self) -> Tensor:
        """The probability that the answer is wrong."""
        return 1 - self.probability if self.of_classes else torch.minimum(self.probability, 1 - self.probability)

    @property
    def wrong(self) -> Tensor:
        """One where the answer is wrong, zero where it is right."""
        return 1 - self.true if self.of_classes else ((self.probability > 0.5).double() - self.true).abs()


def answers(prediction: Any, y: Any) -> Answers:
    """Return the probabilities of a prediction of labels, and what came true.

    Args:
        prediction: A predictive with ``probs``, or these: (B, C), also of tokens (B, T, C) and images (B, C, H, W), or
            the probabilities (B,) of a binary label; or ``Answers``, which are returned as they are.
        y: Class numbers, or zeros and ones in the shape of the probabilities. Labels of -100 are left out.

    Raises:
        DataError: The shapes do not fit, or a label is none of the classes.
        UnsupportedError: It is a prediction of numbers.

    >>> p = answers(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1]))
    >>> p.probability.tolist(), p.true.tolist()
    ([0.75, 0.5], [1.0, 0.0])
    """
    if isinstance(prediction, Answers):
        return prediction
    if isinstance(prediction, Residuals) or hasattr(prediction, "interval"):
        raise UnsupportedError(
            f"the prediction is a {type(prediction).__name__} of numbers, which have no probabilities of labels; "
            "expected one of labels. For numbers use lw.plots.intervals."
        )
    probs, y = numbers("probs", getattr(prediction, "probs", prediction)).double(), numbers("y", y)
    binary = y.shape == probs.shape or (*y.shape, 1) == probs.shape
    if probs.ndim > 3 and not binary and y.shape == (*probs.shape[:1], *probs.shape[2:]):
        probs = probs.movedim(1, -1)
    if not binary and (probs.shape[:-1] != y.shape or y.is_floating_point()):
        raise DataError(
            f"probs is {seen(probs)}, y is {seen(y)}; expected class numbers, one for each row of probabilities, or "
            "zeros and ones in the shape of the probabilities."
        )
    y = y.to(probs.device)
    counts = y.flatten() != IGNORED
    _refuse_outside(y.flatten()[counts], 1 if binary else probs.shape[-1] - 1)
    if binary:
        probability, true = listed(probability=probs.flatten()[counts], true=y.flatten()[counts])
        return Answers(probability, true, of_classes=False)
    top, guess = probs.flatten(0, -2)[counts].max(-1)
    probability, true = listed(probability=top, true=guess == y.flatten()[counts])
    return Answers(probability, true, of_classes=True)


def _refuse_outside(y: Tensor, most: int) -> None:
    """Raise unless all labels are from zero to ``most``."""
    if len(y) and not 0 <= float(y.min()) <= float(y.max()) <= most:
        raise DataError(
            f"labels run from {float(y.min()):g} to {float(y.max()):g}; expected 0..{most}, or {IGNORED} for data that "
            f"do not count. Where another number marks these, such as 255: y.masked_fill(y == 255, {IGNORED})."
        )


@runtime_checkable
class HasNumbers(Protocol):
    """An evaluation of a posterior: numbers of every datum under it and under the plain network."""

    columns: tuple[str, ...]  # what the numbers are
    posterior_numbers: Tensor | None  # (data, columns)
    plain_numbers: Tensor | None


@dataclass(frozen=True, eq=False)
class Residuals:
    """Targets of predicted numbers, (N,) each: the probability of a lower one, standard deviation and error."""

    pit: Tensor
    std: Tensor
    error: Tensor


def separate(prediction: Any) -> Any:
    """Return the plain network and the posterior of an evaluation by name; anything else as it is.

    Raises:
        DataError: The evaluation was read from a file, which holds no single data.
    """
    if not isinstance(prediction, HasNumbers):
        return prediction
    if prediction.posterior_numbers is None or prediction.plain_numbers is None:
        raise DataError("the evaluation has no numbers of single data; expected one that evaluate() returned.")
    column = lambda numbers, name: numbers[:, prediction.columns.index(name)]
    both = {"plain network": prediction.plain_numbers, "posterior": prediction.posterior_numbers}
    if "probability" in prediction.columns:  # of binary labels: confidence in the guess would hide a bias
        return {name: Answers(column(n, "probability"), column(n, "label"), False) for name, n in both.items()}
    if "confidence" in prediction.columns:
        return {name: Answers(column(n, "confidence"), column(n, "correct"), True) for name, n in both.items()}
    return {name: Residuals(*(column(n, part) for part in ("pit", "std", "error"))) for name, n in both.items()}


@dataclass(frozen=True)
class Reliability:
    """Points of a reliability diagram, for each bin that has enough predictions."""

    probability: tuple[float, ...]  # mean predicted probability
    share: tuple[float, ...]  # share that came true
    low: tuple[float, ...]  # ends of a 95 % interval of that share
    high: tuple[float, ...]
    count: tuple[int, ...]  # predictions in the bin


def reliability_points(found: Answers, bins: int = 10) -> Reliability:
    """Return how often predictions came true, by bins of their probability, with Wilson intervals.

    Bins with less than one in 200 of the predictions are left out: their shares are mostly chance.
    """
    require_integer("bins", bins)
    binned = calibration(found.probability, found.true, bins)
    columns = zip(binned.confidence.tolist(), binned.accuracy.tolist(), binned.weight.tolist(), strict=True)
    total = len(found.true)
    rows = [(p, share, *wilson(share, round(w * total)), round(w * total)) for p, share, w in columns if w >= LEAST]
    return Reliability(*zip(*rows, strict=True))


def wilson(share: float, count: int, level: float = 0.95) -> tuple[float, float]:
    """Return the interval of a probability of which ``share`` was seen in ``count`` trials (Wilson 1927).

    >>> [round(end, 3) for end in wilson(0.5, 10)]
    [0.237, 0.763]
    """
    z = normal_half_width(level)
    centre, spread = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    ends = ((centre - spread) / (1 + z * z / count), (centre + spread) / (1 + z * z / count))
    return min(share, max(0.0, ends[0])), max(share, min(1.0, ends[1]))  # rounding moves ends at zero and one


def normal_half_width(level: float) -> float:
    """Return how many standard deviations a normal variable is within with this probability."""
    PROBABILITY.check("level", level)
    return float(torch.special.ndtri(torch.tensor(0.5 + 0.5 * level, dtype=torch.float64)))


def count_of(prediction: Any) -> int:
    """Return the number of targets."""
    return len(prediction.pit) if isinstance(prediction, Residuals) else prediction.mean.numel()


def observed_coverage(prediction: Any, y: Any, levels: Sequence[float] = LEVELS) -> list[float]:
    """Return the share of targets inside the central intervals of each level.

    Raises:
        UnsupportedError: It is a prediction of labels, which have no intervals.
    """
    if isinstance(prediction, Residuals):
        return [float(((2 * prediction.pit - 1).abs() <= level).double().mean()) for level in levels]
    if not hasattr(prediction, "interval"):
        raise UnsupportedError(
            f"the prediction is a {type(prediction).__name__} without intervals; expected one of numbers, as of "
            "regression or counts. For labels use lw.plots.reliability."
        )
    y = as_outputs(prediction, y)
    ends = [prediction.interval(level) for level in levels]
    return [coverage(low, high, y) for low, high in ends]


def as_outputs(prediction: Any, y: Any) -> Tensor:
    """Return targets in the shape of the mean; a single output may come without its dimension."""
    mean, y = prediction.mean, numbers("y", y)
    if (*y.shape, 1) != mean.shape and y.shape != mean.shape:
        raise DataError(f"y has the shape {tuple(y.shape)}; expected {tuple(mean.shape)}, one number for each output.")
    return y.to(mean.device).reshape(mean.shape)


def risk_of(prediction: Any, y: Any) -> RiskCoverage:
    """Return the risk-coverage curve: the share of wrong labels, or the root of the mean squared error of numbers."""
    if isinstance(prediction, Residuals):
        curve = risk_coverage(prediction.std, prediction.error.square())
        return RiskCoverage(curve.coverage, curve.risk.sqrt())
    if hasattr(prediction, "interval"):
        y = as_outputs(prediction, y)
        error = (prediction.mean - y).double().square().flatten(1).mean(1)
        curve = risk_coverage(prediction.variance.detach().double().flatten(1).mean(1), error.detach())
        return RiskCoverage(curve.coverage, curve.risk.sqrt())
    found = answers(prediction, y)
    return risk_coverage(found.uncertainty, found.wrong)
