"""Scores of intervals and of quantiles: coverage, width, PIT values and how far they are from uniform."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lapwing.core.settings import PROBABILITY, Rule
from lapwing.errors import DataError
from lapwing.metrics.arrays import Values, draws, normal, positive, same_shape, within_one

LEVELS = Rule("a list of probabilities between 0 and 1", lambda v: len(v) and all(0 < a < 1 for a in v), DataError)


def coverage(low: Values, high: Values, y: Values) -> float:
    """Return the share of targets inside [low, high].

    Args:
        low: Lower ends, of any shape.
        high: Upper ends, in the same shape.
        y: Targets, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> coverage(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 2.0]))
    0.5
    """
    low, high, y = _ends(low=low, high=high, y=y)
    return float(((low <= y) & (y <= high)).double().mean())


def interval_width(low: Values, high: Values) -> float:
    """Return the mean width of the intervals.

    Args:
        low: Lower ends, of any shape.
        high: Upper ends, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> interval_width(torch.zeros(2), torch.tensor([1.0, 3.0]))
    2.0
    """
    low, high = _ends(low=low, high=high)
    return float((high - low).mean())


def picp(mean: Values, std: Values, y: Values, level: float = 0.95) -> float:
    """Return the share of targets inside the central intervals of N(mean, std²) (PICP): the level, if calibrated.

    Args:
        mean: Predicted means, of any shape.
        std: Predicted standard deviations, in the shape of the mean.
        y: Targets, in the same shape.
        level: The probability of the intervals.

    Raises:
        DataError: The shapes differ, or the level is not between 0 and 1.

    >>> picp(torch.zeros(2), torch.ones(2), torch.tensor([0.6, 0.7]), level=0.5)
    0.5
    """
    mean, std, y = normal(mean, std, y)
    half = _half_width(level) * std
    return coverage(mean - half, mean + half, y)


def mpiw(std: Values, level: float = 0.95) -> float:
    """Return the mean width of the central intervals of normal predictions (MPIW), in the units of the target.

    Args:
        std: Predicted standard deviations, of any shape.
        level: The probability of the intervals.

    Raises:
        DataError: A standard deviation is not positive, or the level is not between 0 and 1.

    >>> round(mpiw(torch.tensor([1.0, 3.0])), 2)
    7.84
    """
    (std,) = same_shape(std=std)
    positive(std)
    return 2 * _half_width(level) * float(std.mean())


def pit(mean: Values, std: Values, y: Values) -> Tensor:
    """Return the probability that N(mean, std²) gives to values below y (PIT): uniform in [0, 1], if calibrated.

    ``predictive.cdf(y)`` returns the same for every predictive of numbers.

    Args:
        mean: Predicted means, of any shape.
        std: Predicted standard deviations, in the shape of the mean.
        y: Targets, in the same shape.

    Returns:
        Probabilities in the shape of y, in float64.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> pit(torch.zeros(2), torch.ones(2), torch.tensor([0.0, 9.0]))
    tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    mean, std, y = normal(mean, std, y)
    return torch.special.ndtr((y - mean) / std)


def pit_samples(samples: Values, y: Values) -> Tensor:
    """Return the PIT values of draws: (r + ½) / (S + 1), if r of the S draws are below y. Ties count half.

    If calibrated, y has every rank among the draws with equal probability.

    Args:
        samples: Draws of the targets, noise included, (S, ...).
        y: Targets, (...).

    Returns:
        Probabilities in the shape of y, in float64.

    Raises:
        DataError: Shapes do not fit, or numbers are not finite.

    >>> pit_samples(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([2.0]))
    tensor([0.6250], dtype=torch.float64)
    """
    samples, y = draws(samples, y)
    rank = (samples < y).sum(0).double() + 0.5 * (samples == y).sum(0)
    return (rank + 0.5) / (len(samples) + 1)


def cqm(pit_values: Values, levels: Sequence[float] | None = None) -> float:
    """Return the centred quantile metric: the mean over levels of |coverage of central intervals - level|.

    A target is inside the central interval of level a if its PIT value u has |2u - 1| ≤ a. It is 0 if all coverages
    are right, and ½ at worst. The side is not counted: it can be 0 if all targets are above the mean.

    Reference: Ortega et al. 2024 (VaLLA).

    Args:
        pit_values: From ``pit``, ``pit_samples`` or ``predictive.cdf(y)``, of any shape.
        levels: Probabilities of the intervals. By default the mean over all levels from 0 to 1, the exact integral.

    Raises:
        DataError: Values or levels are no probabilities.

    >>> round(cqm(torch.tensor([0.5, 0.5]), levels=[0.5, 0.9]), 4)
    0.3
    >>> round(cqm(torch.tensor([0.5, 0.5])), 4)
    0.5
    """
    (probs,) = same_shape(pit_values=pit_values)
    if not within_one(probs):
        raise DataError(f"pit_values run from {probs.min():.3g} to {probs.max():.3g}; expected probabilities.")
    reached = (2 * probs.flatten() - 1).abs().clamp(0, 1).sort().values  # the smallest level that includes each
    if levels is not None:
        LEVELS.check("levels", levels)
        given = torch.tensor([float(level) for level in levels], dtype=reached.dtype, device=reached.device)
        return float((torch.bucketize(given, reached, right=True).double() / len(reached) - given).abs().mean())
    # Between two neighbours a < b the coverage is constant, c, and ∫ |t - c| dt = ½ (t - c) |t - c| from a to b.
    ends = torch.cat([reached.new_zeros(1), reached, reached.new_ones(1)])
    share = torch.arange(len(ends) - 1, dtype=ends.dtype, device=ends.device) / len(reached)
    integral = lambda t: 0.5 * (t - share) * (t - share).abs()
    return float((integral(ends[1:]) - integral(ends[:-1])).sum())


def _half_width(level: float) -> float:
    """Return half the width of the central interval of N(0, 1)."""
    PROBABILITY.check("level", level)
    return float(torch.special.ndtri(torch.tensor(0.5 + 0.5 * level, dtype=torch.float64)))


def _ends(**values: Values) -> tuple[Tensor, ...]:
    """Return the ends of intervals, and targets; raise if a lower end is above its upper end."""
    low, high, *y = same_shape(**values)
    if not bool((low <= high).all()):
        raise DataError(f"low is above high in {int((low > high).sum())} intervals; expected (low, high), in order.")
    return low, high, *y
