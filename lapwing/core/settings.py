"""Checks of numbers that a user sets."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from lapwing.errors import UnsupportedError


def is_real(value: Any) -> bool:
    """Whether it is a number, NaN and infinity included; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def refuse_other_than_whole(name: str, value: Any, least: int = 1) -> None:
    """Raise unless it is a whole number of at least so many."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UnsupportedError(f"{name} is {value!r:.80}; expected a whole number.")
    if value < least:
        raise UnsupportedError(f"{name} is {value}; expected at least {least}.")


def refuse_other_than_positive(name: str, value: Any) -> None:
    """Raise unless it is a number above nought, and finite."""
    if not is_real(value) or not 0 < value < math.inf:
        raise UnsupportedError(f"{name} is {value!r:.80}; expected a positive number that is finite.")
