"""Gaussian priors over the weights, and the kernel that a prior gives the outputs. A precision is 1 / variance."""

from lapwing.priors.groups import Grouped, PerLayer, PerNormalisedGroup, grouped, per_layer, per_normalised_group
from lapwing.priors.single import GPrior, Isotropic, g_prior, isotropic
from lapwing.priors.weightwise import Diagonal, diagonal

# The priors that can be saved, by the names that files use.
PRIORS = {prior.__name__: prior for prior in (Isotropic, PerLayer, Grouped, Diagonal, PerNormalisedGroup, GPrior)}

__all__ = ["diagonal", "g_prior", "grouped", "isotropic", "per_layer", "per_normalised_group"]
