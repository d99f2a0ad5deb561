"""Gaussian priors over the weights (``lw.priors``), and the kernel that a prior gives the outputs.

A number given to a prior is a precision, 1 / variance. Tuners, which learn precisions, are in ``lapwing.tuners``.
"""

from lapwing.priors.filters import FilterGP, filter_gp
from lapwing.priors.given import diagonal, g_prior, grouped, isotropic, per_layer, per_normalised_group

__all__ = [
    "FilterGP", "diagonal", "filter_gp", "g_prior", "grouped", "isotropic", "per_layer", "per_normalised_group",
]  # fmt: skip
