"""Scores of normal predictions and of intervals."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def nll(mean: Tensor, std: Tensor, y: Tensor) -> float:
    """Return the mean negative log-density of y under N(mean, std²).

    Args:
        mean: Predicted means, of any shape.
        std: Predicted standard deviations, in the shape of the mean.
        y: Targets, in the same shape.

    Raises:
        ValueError: The shapes differ, or are empty.

    >>> round(nll(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
    0.9189
    """
    mean, std, y = _checked(mean, std, y)
    return float((0.5 * ((y - mean) / std).square() + std.log()).mean()) + 0.5 * math.log(2 * math.pi)


def rmse(mean: Tensor, y: Tensor) -> float:
    """Return the root mean squared error.

    Args:
        mean: Predicted means, of any shape.
        y: Targets, in the same shape.

    Raises:
        ValueError: The shapes differ, or are empty.

    >>> rmse(torch.zeros(2), torch.tensor([3.0, 3.0]))
    3.0
    """
    mean, y = _checked(mean, y)
    return float((y - mean).square().mean().sqrt())


def crps(mean: Tensor, std: Tensor, y: Tensor) -> float:
    """Return the mean continuous ranked probability score of N(mean, std²), in the units of y.

    Reference: Gneiting et al. 2005, eq. 5.

    Args:
        mean: Predicted means, of any shape.
        std: Predicted standard deviations, in the shape of the mean.
        y: Targets, in the same shape.

    Raises:
        ValueError: The shapes differ, or are empty.

    >>> round(crps(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
    0.2337
    """
    mean, std, y = _checked(mean, std, y)
    z = (y - mean) / std
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return float((std * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))).mean())


def coverage(low: Tensor, high: Tensor, y: Tensor) -> float:
    """Return the share of targets inside [low, high].

    Args:
        low: Lower ends, of any shape.
        high: Upper ends, in the same shape.
        y: Targets, in the same shape.

    Raises:
        ValueError: The shapes differ, or are empty.

    >>> coverage(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 2.0]))
    0.5
    """
    low, high, y = _checked(low, high, y)
    return float(((low <= y) & (y <= high)).double().mean())


def interval_width(low: Tensor, high: Tensor) -> float:
    """Return the mean width of the intervals.

    Args:
        low: Lower ends, of any shape.
        high: Upper ends, in the same shape.

    Raises:
        ValueError: The shapes differ, or are empty.

    >>> interval_width(torch.zeros(2), torch.tensor([1.0, 3.0]))
    2.0
    """
    low, high = _checked(low, high)
    return float((high - low).mean())


def _checked(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in float64; raise unless their shapes agree, since (B, 1) and (B,) broadcast to (B, B)."""
    shapes = [tuple(t.shape) for t in tensors]
    if len(set(shapes)) != 1 or not tensors[0].numel():
        raise ValueError(f"shapes are {', '.join(map(str, shapes))}; expected the same, with at least one entry.")
    return tuple(t.detach().double() for t in tensors)
