"""Gaussian priors over the weights. A number or tensor is always a precision."""

from lapwing.priors.gaussian import diagonal, g_prior, grouped, isotropic, per_layer, per_normalised_group

__all__ = ["diagonal", "g_prior", "grouped", "isotropic", "per_layer", "per_normalised_group"]
