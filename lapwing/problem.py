"""What is being inferred: a network, how targets depend on it, and what was believed before."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lapwing.likelihoods.protocol import Likelihood
from lapwing.networks.network import Network
from lapwing.priors.gaussian import Prior


@dataclass(frozen=True, eq=False)
class Problem:
    """The network, the likelihood and the prior; everything but the data."""

    network: Network
    likelihood: Likelihood
    prior: Prior
    learn_prior: bool = False  # whether the precisions are to be learned; set where no prior was given

    def with_likelihood(self, likelihood: Likelihood) -> Problem:
        return replace(self, likelihood=likelihood)

    def with_prior(self, prior: Prior) -> Problem:
        return replace(self, prior=prior)
