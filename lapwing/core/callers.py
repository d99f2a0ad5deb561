"""Warnings that name the line of the user, however many calls of the library are between."""

from __future__ import annotations

import sys
import warnings

from lapwing.errors import CalibrationWarning

BETWEEN = (__name__.partition(".")[0], "torch", "contextlib")  # whose frames are not the user's: torch has decorators


def warn_caller(message: str) -> None:
    """Give a ``CalibrationWarning`` at the first line outside of the library that led here."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, CalibrationWarning, stacklevel=depth)
