"""Methods: the ways to compute a posterior, their contract in ``base.py``.

Small methods share a file: those with a Gaussian over the weights (``weight_space.py``), and baselines without a
posterior of their own (``members.py``). Files do not import each other. Parts that several of them use live in
``curvature``, ``tangent`` and ``posteriors``; ``hfl_response.py`` and ``inducing_points.py`` are second files of HFL
and VaLLA. The names below are what a new method inherits from and returns (docs/extending.md).
"""

from lapwing.methods.base import Method
from lapwing.posteriors.weight_space import SumsData, WeightPosterior

__all__ = ["Method", "SumsData", "WeightPosterior"]
