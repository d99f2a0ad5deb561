"""Settings of tuners are checked when the tuner is made."""

from __future__ import annotations

import math
from typing import Any

import pytest

import lapwing as lw

TUNERS = lw.tuners
DATA: Any = []
INTEGERS: list[tuple[Any, str, int]] = [
    (TUNERS.Ascend, "steps", 0),
    (TUNERS.FixedPoint, "max_steps", 1),
    (TUNERS.LinearMode, "max_steps", 1),
    (TUNERS.LinearMode, "rounds", 1),
    (TUNERS.MaximiseBound, "block", 1),
    (TUNERS.MaximiseBound, "steps", 1),
    (TUNERS.MaximiseEvidence, "max_steps", 1),
    (TUNERS.SampleEM, "max_steps", 1),
    (lambda **settings: TUNERS.CrossValidated(DATA, **settings), "folds", 2),
]
NUMBERS: list[tuple[Any, str]] = [
    (TUNERS.Ascend, "rate"),
    (TUNERS.FixedPoint, "tolerance"),
    (TUNERS.LinearMode, "tolerance"),
    (TUNERS.LinearMode, "solver_tolerance"),
    (TUNERS.MaximiseBound, "rate"),
    (TUNERS.MaximiseEvidence, "tolerance"),
    (TUNERS.SampleEM, "tolerance"),
    (TUNERS.SampleEM, "solver_tolerance"),
]
FLAGS: list[tuple[Any, str]] = [
    *[(make, "noise") for make in (TUNERS.Ascend, TUNERS.FixedPoint, TUNERS.MaximiseBound, TUNERS.MaximiseEvidence)],
    (TUNERS.SampleEM, "noise"),
]


@pytest.mark.parametrize(("make", "name", "least"), INTEGERS)
def test_integers(make: Any, name: str, least: int) -> None:
    assert make(**{name: least}) is not None
    message = f"{name} is {least - 1}; expected an integer of at least {least}"
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        make(**{name: least - 1})
    for value in (least + 0.5, "3", None, True):
        with pytest.raises(lw.errors.UnsupportedError, match=f"{name} is {value!r}; expected an integer"):
            make(**{name: value})


@pytest.mark.parametrize(("make", "name"), NUMBERS)
def test_positive_numbers(make: Any, name: str) -> None:
    for value in (0.0, -1.0, math.nan, math.inf, "1", True):
        with pytest.raises(lw.errors.UnsupportedError, match=f"{name} is {value!r}; expected a positive, finite"):
            make(**{name: value})


@pytest.mark.parametrize(("make", "name"), FLAGS)
def test_flags(make: Any, name: str) -> None:
    """A noise of 0.1 would otherwise be taken for True."""
    for value in (0.1, 1, "yes", None):
        with pytest.raises(lw.errors.UnsupportedError, match=f"{name} is {value!r}; expected True or False"):
            make(**{name: value})


@pytest.mark.parametrize("make", [TUNERS.Grid, TUNERS.CrossValidated, TUNERS.Temperature])
def test_metrics(make: Any) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"metric is 'nll'; expected a function of \(predictive"):
        make(DATA, metric="nll")
