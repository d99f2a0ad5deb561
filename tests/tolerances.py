"""How near is near enough: always a power of the dtype's rounding unit, relative to the largest entry."""

from __future__ import annotations

import torch
from scipy import stats
from torch import Tensor

EXACT = 2 / 3  # 4e-11 in float64, 2e-5 in float32: sums and products of well-scaled numbers
SOLVED = 1 / 2  # 1e-8 in float64, 3e-4 in float32: after an optimisation, or a badly conditioned solve
TRAINED = 1 / 4  # 1e-4 in float64: after steps of Adam, which divides the rounding of small gradients by its epsilon


def tolerance(dtype: torch.dtype, power: float = EXACT) -> float:
    return float(torch.finfo(dtype).eps ** power)


def assert_close(actual: Tensor, expected: Tensor, power: float = EXACT, dtype: torch.dtype | None = None) -> None:
    """Same shape, finite, and no entry further off than the tolerance times the largest expected entry."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert bool(torch.isfinite(actual).all()), "not finite"
    limit = tolerance(actual.dtype if dtype is None else dtype, power)
    wide, target = actual.detach().double(), expected.detach().double()
    scale = target.abs().max().item() if target.numel() else 0.0
    gap = (wide - target).abs().max().item() if target.numel() else 0.0
    assert gap <= limit * scale, f"off by {gap / max(scale, 1e-300):.2e} of the largest entry; allowed {limit:.2e}"


def assert_near(actual: Tensor, expected: Tensor, limit: float) -> None:
    """Same shape, and no entry further off than ``limit``, an absolute error that the caller derives."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    gap = (actual.detach().double() - expected.detach().double()).abs().max().item()
    assert gap <= limit, f"off by {gap:.2e}; allowed {limit:.2e}"


def assert_within(samples: Tensor, expected: Tensor, errors: float = 5.0) -> None:
    """The mean of the first dimension agrees with what is expected within so many standard errors of its own.

    ``samples`` (n, ...) are independent estimates. Five standard errors: a false alarm in 1.7 million.
    """
    assert samples.shape[1:] == expected.shape
    mean, error = samples.mean(0), samples.std(0) / len(samples) ** 0.5
    floor = tolerance(samples.dtype) * expected.abs().max()
    worst = ((mean - expected).abs() / (error + floor)).max().item()
    assert worst <= errors, f"off by {worst:.1f} standard errors"
    assert bool((error <= 0.2 * expected.abs().max()).all()), "the standard error is too large to say anything"


def student(level: float, degrees: int) -> float:
    """Return t with P(|T| ≤ t) = level for Student's t: the half-width of an interval, in standard errors."""
    return float(stats.t.ppf(0.5 + 0.5 * level, degrees))


def least_hits(trials: int, level: float, alarm: float = 1e-4) -> int:
    """Return how many of independent intervals of this level must contain the truth; fewer have probability < alarm."""
    return int(stats.binom.ppf(alarm, trials, level))
