"""The settings that Kron and EKron have in common."""

from __future__ import annotations

from lapwing.core.errors import UnsupportedError
from lapwing.core.settings import refuse_other_than_whole
from lapwing.curvature.sweep import checked_curvature


def check_settings(curvature: str, sharing: str, full_limit: int) -> None:
    checked_curvature(curvature)
    if sharing not in ("expand", "reduce"):
        raise UnsupportedError(f"sharing is {sharing!r}; expected 'expand' or 'reduce'.")
    refuse_other_than_whole("full_limit", full_limit, least=0)
