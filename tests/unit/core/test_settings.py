"""Numbers that a user sets."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import pytest
import torch

import lapwing as lw
from lapwing.core.settings import FLAG, POSITIVE, is_real, require_integer


@pytest.mark.parametrize("value", [3, 2**70, torch.Size([3])[0]])
def test_integers(value: Any) -> None:
    require_integer("count", value)
    require_integer("count", value, least=3)


@pytest.mark.parametrize("value", [True, 3.0, 10.5, "10", None, math.nan, torch.tensor(3)])
def test_other_than_integers(value: Any) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=re.escape(f"count is {value!r}; expected an integer.")):
        require_integer("count", value)


def test_integers_below_the_least() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"count is 0; expected at least 1\."):
        require_integer("count", 0)
    with pytest.raises(lw.errors.UnsupportedError, match=r"count is 1; expected at least 2\."):
        require_integer("count", 1, least=2)


@pytest.mark.parametrize("value", [1, 0.5, 1e-300, Fraction(1, 3)])
def test_positive_numbers(value: Any) -> None:
    POSITIVE.check("rate", value)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.inf, -math.inf, math.nan, True, "1", None, 1j])
def test_other_than_positive_numbers(value: Any) -> None:
    message = re.escape(f"rate is {value!r}; expected a positive, finite number.")
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        POSITIVE.check("rate", value)


def test_flags() -> None:
    FLAG.check("noise", True)
    FLAG.check("noise", False)
    for value in (0, 1, 0.1, "yes", None):
        with pytest.raises(lw.errors.UnsupportedError, match=re.escape(f"noise is {value!r}; expected True or False.")):
            FLAG.check("noise", value)


def test_a_long_value_is_cut() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"^rate is '9{79}; expected"):
        POSITIVE.check("rate", "9" * 1000)


def test_real_numbers() -> None:
    assert all(is_real(value) for value in (0, -1.5, math.nan, math.inf, Fraction(1, 3)))
    assert not any(is_real(value) for value in (True, "0", None, 1j))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_inducing": 10.5}, "num_inducing is 10.5; expected an integer"),
        ({"num_inducing": True}, "num_inducing is True; expected an integer"),
        ({"num_inducing": "10"}, "num_inducing is '10'; expected an integer"),
        ({"num_inducing": None}, "num_inducing is None; expected an integer"),
        ({"steps": 3.5}, "steps is 3.5; expected an integer"),
        ({"candidates": 10.5}, "candidates is 10.5; expected an integer"),
        ({"learning_rate": math.inf}, "learning_rate is inf; expected a positive, finite number"),
        ({"alpha": "0"}, "alpha is '0'; expected a number between 0 and 1"),
        ({"alpha": False}, "alpha is False; expected a number between 0 and 1"),
        ({"alpha": math.nan}, "alpha is nan; expected a number between 0 and 1"),
    ],
)
def test_settings_of_valla(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        lw.VaLLA(**settings)


def test_valla_chooses_its_number_of_steps() -> None:
    assert lw.VaLLA(steps=None).steps is None
