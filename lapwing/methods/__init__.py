"""Methods: one file for each way to compute a posterior, their contract in ``base.py``.

Kron and EKron share one. Methods do not import each other. Parts that several methods use live in ``curvature``,
``tangent`` and ``posteriors``; ``hfl_response.py`` and ``inducing_points.py`` are second files of HFL, and of ELLA and
VaLLA. The names below are what a new method inherits from and returns (docs/extending.md).
"""

from lapwing.methods.base import Method
from lapwing.posteriors.weight_space import SumsData, WeightPosterior

__all__ = ["Method", "SumsData", "WeightPosterior"]
