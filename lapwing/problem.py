"""The problem of inference: a network, a likelihood and a prior."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing.errors import DataError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.losses import Statistics
from lapwing.networks.network import Network
from lapwing.priors.bound import BoundPrior


@dataclass(frozen=True, eq=False)
class Problem:
    """The network, the likelihood and the prior; everything but the data."""

    network: Network
    likelihood: Likelihood
    prior: BoundPrior
    learn_prior: bool = False  # whether the precisions are to be learned: set if the user gave no prior

    def with_likelihood(self, likelihood: Likelihood) -> Problem:
        """Return the problem with another likelihood."""
        return replace(self, likelihood=likelihood)

    def with_prior(self, prior: BoundPrior) -> Problem:
        """Return the problem with another prior."""
        return replace(self, prior=prior)

    def with_known_prior(self) -> Problem:
        """Return the problem with a prior that is no longer to be learned."""
        return replace(self, learn_prior=False)

    def with_residual_noise(self, statistics: Statistics) -> Problem:
        """Return the problem with the noise set to the mean squared residual, if the likelihood leaves it open."""
        if not self.likelihood.learns_dispersion:
            return self
        phi = 2 * statistics.loss / (statistics.data * statistics.outputs)
        if phi < 1e-30:
            raise DataError(
                f"the network fits its {statistics.data} targets exactly, so the residuals say nothing about the "
                "noise; expected residuals that are not zero. Give the noise: Gaussian(noise_std=...)."
            )
        noise = torch.tensor(phi, dtype=torch.float64, device=self.network.device)
        return self.with_likelihood(self.likelihood.with_dispersion(noise))
