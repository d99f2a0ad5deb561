"""The result of an experiment: scores, the numbers behind its pictures, settings, seed and versions."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import lapwing


def versions() -> dict[str, str]:
    """Return the versions of everything that could change the numbers."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "lapwing": lapwing.__version__}


@dataclass(frozen=True)
class Row:
    """The scores of one method; ``group`` names the data set where there are several."""

    name: str
    scores: dict[str, float]
    group: str = ""


@dataclass(frozen=True)
class Result:
    """The result of an experiment. It holds plain numbers only, so that it goes to JSON and comes back equal."""

    experiment: str
    settings: dict[str, Any]
    seed: int
    rows: tuple[Row, ...]
    seconds: dict[str, float]
    arrays: dict[str, list[float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=versions)

    def to_json(self) -> str:
        """Return the result as JSON. Raise ValueError if a number is not finite, since JSON has no such numbers."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Return the result that ``to_json`` wrote."""
        fields: dict[str, Any] = json.loads(text)
        rows = tuple(Row(**row) for row in fields.pop("rows"))
        return cls(rows=rows, notes=tuple(fields.pop("notes")), **fields)


def plain(settings: Any) -> dict[str, Any]:
    """Return a settings dataclass as JSON would give it back: tuples become lists, paths become text."""
    fields: dict[str, Any] = json.loads(json.dumps(asdict(settings), default=str))
    return fields


def mean_scores(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every score over repetitions.

    >>> mean_scores([{"RMSE": 1.0}, {"RMSE": 2.0}])
    {'RMSE': 1.5}
    """
    return {name: sum(s[name] for s in scores) / len(scores) for name in scores[0]}


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
