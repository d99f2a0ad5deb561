"""Likelihoods: how targets depend on the outputs of a network, each with the predictive distribution of its targets.

``base.py`` has the contract and the objectives of methods that learn by predicting. The ``predict`` of
a likelihood computes its predictive from a Gaussian belief about the outputs, without a network or a posterior.
"""

from lapwing.likelihoods.base import Likelihood

__all__ = ["Likelihood"]
