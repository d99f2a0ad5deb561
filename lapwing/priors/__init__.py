"""Gaussian priors over the weights (``lw.priors``), and the kernel that a prior gives the outputs.

A number given to a prior is a precision, 1 / variance. Tuners, which learn precisions, are in ``lapwing.tuners``.
"""

from lapwing.priors.groups import diagonal, grouped, per_layer, per_normalised_group
from lapwing.priors.single import g_prior, isotropic

__all__ = ["diagonal", "g_prior", "grouped", "isotropic", "per_layer", "per_normalised_group"]
