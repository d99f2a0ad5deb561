"""Linear inverse problems (``lw.inverse``): error bars for images that a network reconstructs from measurements."""

from lapwing.inverse.posterior import InversePosterior, fit
from lapwing.inverse.problem import LinearOperator
from lapwing.linalg.operators import SparseOperator

__all__ = ["InversePosterior", "LinearOperator", "SparseOperator", "fit"]
