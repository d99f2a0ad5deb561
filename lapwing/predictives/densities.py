"""Standard normal and Student distributions: densities, probabilities and quantiles."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.core.settings import PROBABILITY


def log_density(z: Tensor, degrees: float) -> Tensor:
    """Return the log-density of the standard Student distribution; of the normal one for infinite degrees."""
    if degrees == math.inf:
        return -0.5 * (z.square() + math.log(2 * math.pi))
    constant = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return constant - (degrees + 1) / 2 * torch.log1p(z.square() / degrees)


def cdf(z: Tensor, degrees: float) -> Tensor:
    r"""Return the cumulative probability; degrees are an even number, for which it is a finite sum, or infinite.

    With $\theta = \arctan(z/\sqrt\nu)$: $P(|Z| < z) = \sin\theta\,(1 + \tfrac12 \cos^2\theta + \tfrac{1\cdot3}{2\cdot4}
    \cos^4\theta + \dots)$, ν/2 terms (Abramowitz and Stegun 26.7.4).
    """
    if degrees == math.inf:
        return torch.special.ndtr(z)
    value = z.double()
    sine, cosine2 = value / (degrees + value.square()).sqrt(), degrees / (degrees + value.square())
    term = total = torch.ones_like(value)
    for k in range(1, int(degrees) // 2):
        term = term * cosine2 * (2 * k - 1) / (2 * k)
        total = total + term
    return (0.5 + 0.5 * sine * total).to(z.dtype)


def quantile(cdf: Callable[[Tensor], Tensor], level: float, centre: Tensor, width: Tensor) -> Tensor:
    """Return y with cdf(y) = level, by doubling a bracket around ``centre`` and then bisecting it to rounding."""
    PROBABILITY.check("level", level)
    low, high = centre - width, centre + width
    for _ in range(200):
        short, long = cdf(low) > level, cdf(high) < level
        if not bool((short | long).any()):
            break
        low = torch.where(short, centre - 2 * (centre - low), low)
        high = torch.where(long, centre + 2 * (high - centre), high)
    for _ in range(60 if centre.dtype == torch.float64 else 30):
        middle = 0.5 * (low + high)
        below = cdf(middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)


def whole_quantile(cdf: Callable[[Tensor], Tensor], level: float, reach: Tensor) -> Tensor:
    """Return the smallest whole numbers, up to ``reach``, whose cumulative probability is at least ``level``."""
    PROBABILITY.check("level", level)
    low, high = torch.zeros_like(reach), reach.ceil()
    for _ in range(int(high.max().log2().item()) + 2):
        middle = ((low + high) / 2).floor()
        enough = cdf(middle) >= level
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1).minimum(high)
    return high
