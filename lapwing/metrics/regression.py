"""Scores of predicted numbers: means, normal distributions and draws."""

from __future__ import annotations

import math

import torch

from lapwing.core.settings import FLAG
from lapwing.errors import DataError
from lapwing.metrics.arrays import Values, draws, normal, same_shape


def normal_nll(mean: Values, std: Values, y: Values) -> float:
    """Return the mean negative log-density of y under N(mean, std²).

    Args:
        mean: Predicted means, of any shape.
        std: Predicted standard deviations, in the shape of the mean.
        y: Targets, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> round(normal_nll(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
    0.9189
    """
    mean, std, y = normal(mean, std, y)
    return float((0.5 * ((y - mean) / std).square() + std.log()).mean()) + 0.5 * math.log(2 * math.pi)


def rmse(mean: Values, y: Values) -> float:
    """Return the root mean squared error.

    Args:
        mean: Predicted means, of any shape.
        y: Targets, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> rmse(torch.zeros(2), torch.tensor([3.0, 3.0]))
    3.0
    """
    mean, y = same_shape(mean=mean, y=y)
    return float((y - mean).square().mean().sqrt())


def mae(mean: Values, y: Values) -> float:
    """Return the mean absolute error.

    Args:
        mean: Predicted means or medians, of any shape.
        y: Targets, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> mae(torch.zeros(2), torch.tensor([3.0, -1.0]))
    2.0
    """
    mean, y = same_shape(mean=mean, y=y)
    return float((y - mean).abs().mean())


def crps(mean: Values, std: Values, y: Values) -> float:
    """Return the mean continuous ranked probability score of N(mean, std²), in the units of y.

    Reference: Gneiting et al. 2005, eq. 5.

    Args:
        mean: Predicted means, of any shape.
        std: Predicted standard deviations, in the shape of the mean.
        y: Targets, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> round(crps(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
    0.2337
    """
    mean, std, y = normal(mean, std, y)
    z = (y - mean) / std
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return float((std * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))).mean())


def crps_samples(samples: Values, y: Values, *, fair: bool = False) -> float:
    """Return the mean continuous ranked probability score of draws, in the units of y: E|x - y| - ½ E|x - x'|.

    By default it is the score of the draws themselves, as a distribution with S steps. A few draws of a good
    distribution score worse than the distribution; ``fair=True`` removes this bias by leaving out the pairs of a draw
    with itself (Ferro 2014).

    Args:
        samples: Draws of the targets, noise included, (S, ...).
        y: Targets, (...).
        fair: Whether to estimate the score of the distribution that the draws come from. Needs two draws.

    Raises:
        DataError: Shapes do not fit, or numbers are not finite.

    >>> round(crps_samples(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([2.0])), 4)
    0.8889
    """
    FLAG.check("fair", fair)
    samples, y = draws(samples, y)
    count = len(samples)
    if fair and count < 2:
        raise DataError("samples holds one draw; expected at least two with fair=True.")
    errors = (samples - y).sort(0).values  # without y, so that a common offset of all does not round away
    weights = 2 * torch.arange(count, dtype=errors.dtype, device=errors.device) - (count - 1)
    spread = torch.tensordot(weights, errors, 1) / (count * (count - 1 if fair else count))  # ½ E|x - x'|
    return float((errors.abs().mean(0) - spread).mean())
