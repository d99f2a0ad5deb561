"""Scores of repeated runs: their mean and its standard error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lapwing.demo.result import mean_scores

__all__ = ["mean_scores", "spread_scores"]


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
