"""Checks of numbers that a user sets."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from lapwing.errors import UnsupportedError


def is_real(value: Any) -> bool:
    """Return whether the value is a real number, NaN and infinity included; booleans are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require_integer(name: str, value: Any, least: int = 1) -> None:
    """Raise unless the value is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UnsupportedError(f"{name} is {value!r:.80}; expected an integer.")
    if value < least:
        raise UnsupportedError(f"{name} is {value}; expected at least {least}.")


def require_positive(name: str, value: Any) -> None:
    """Raise unless the value is a finite number above zero."""
    if not is_real(value) or not 0 < value < math.inf:
        raise UnsupportedError(f"{name} is {value!r:.80}; expected a positive, finite number.")


def require_positive_values(name: str, values: Any) -> None:
    """Raise unless the values are a non-empty sequence of positive, finite numbers."""
    try:
        good = len(values) > 0 and all(math.isfinite(v) and v > 0 for v in values)
    except TypeError:
        good = False
    if not good:
        raise UnsupportedError(f"{name} is {values!r:.80}; expected a list of positive, finite numbers.")


def require_flag(name: str, value: Any) -> None:
    """Raise unless the value is True or False."""
    if not isinstance(value, bool):
        raise UnsupportedError(f"{name} is {value!r:.80}; expected True or False.")
