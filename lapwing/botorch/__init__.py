"""Bayesian optimisation with BoTorch: a fitted posterior as a model, and functions drawn from it.

Needs BoTorch: ``pip install 'lapwing[integrations]'``. Nothing else in the package imports this one.
"""

from __future__ import annotations

try:
    import botorch as _botorch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "lapwing.botorch needs the package botorch, which is not installed: pip install 'lapwing[integrations]'."
    ) from error

from lapwing.botorch.model import LapwingModel
from lapwing.botorch.surrogate import surrogate
from lapwing.botorch.thompson import thompson

__all__ = ["LapwingModel", "surrogate", "thompson"]
