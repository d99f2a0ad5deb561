"""Gaussian priors over the weights, and the kernel that a prior gives the outputs. A precision is 1 / variance."""

from lapwing.priors.groups import diagonal, grouped, per_layer, per_normalised_group
from lapwing.priors.single import g_prior, isotropic

__all__ = ["diagonal", "g_prior", "grouped", "isotropic", "per_layer", "per_normalised_group"]
