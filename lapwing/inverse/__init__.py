"""Linear inverse problems (``lw.inverse``): error bars for images that a network reconstructs from measurements."""

from lapwing.inverse.fitting import fit
from lapwing.inverse.observation import LinearOperator
from lapwing.inverse.posterior import InversePosterior
from lapwing.linalg.sparse import SparseOperator

__all__ = ["InversePosterior", "LinearOperator", "SparseOperator", "fit"]
