"""Repeated runs: the shortest time, and the mean of scores with its standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from lapwing.demo.result import mean_scores

__all__ = ["best_seconds", "mean_scores", "spread_scores"]

T = TypeVar("T")


def best_seconds(work: Callable[[], T], repeats: int = 3) -> tuple[float, T]:
    """Return the time of the shortest of some runs, and the result of the first one."""
    results, seconds = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        results.append(work())
        seconds.append(time.perf_counter() - start)
    return min(seconds), results[0]


def spread_scores(scores: Sequence[Mapping[str, float]], names: Sequence[str] | None = None) -> dict[str, float]:
    """Return the standard error of the mean over repetitions, as "NAME ±"; nothing for one repetition.

    >>> spread_scores([{"RMSE": 1.0}, {"RMSE": 3.0}])
    {'RMSE ±': 1.0}
    """
    if len(scores) < 2:
        return {}
    errors = {}
    for name in scores[0] if names is None else names:
        values = [s[name] for s in scores]
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        errors[f"{name} ±"] = (variance / len(values)) ** 0.5
    return errors
