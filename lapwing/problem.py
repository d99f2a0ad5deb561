"""What is being inferred: a network, how targets depend on it, and what was believed before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing.errors import DataError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.losses import Statistics
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

    def with_known_prior(self) -> Problem:
        """Return the problem with its prior as it is: nothing learns it any more."""
        return replace(self, learn_prior=False)

    def with_residual_noise(self, statistics: Statistics) -> Problem:
        """Return the problem with the noise set to the mean squared residual, if the likelihood leaves it open."""
        if not self.likelihood.learns_dispersion:
            return self
        phi = 2 * statistics.loss / (statistics.data * statistics.outputs)
        if phi < 1e-30:
            raise DataError(
                f"the network fits its {statistics.data} targets exactly, so the residuals say nothing about the "
                "noise; expected some. Give it: Gaussian(noise_std=...)."
            )
        noise = torch.tensor(phi, dtype=torch.float64, device=self.network.device)
        return self.with_likelihood(self.likelihood.with_dispersion(noise))

    def with_starting_precision(self, statistics: Statistics) -> Problem:
        """Return the problem with prior precisions near the optimum of the evidence, from which to learn them.

        Each is half of the largest possible γ over |w|², group by group: weights k times as large start at a precision
        k² times as small. A prior with one precision for each weight starts at the same one for all, since a single
        square says nothing.
        """
        prior, theta = self.prior, self.network.theta().double()
        share = 0.5 * min(1.0, statistics.data * statistics.outputs / theta.numel())
        if prior.values.numel() == theta.numel():
            common = share * theta.numel() / theta.square().sum().clamp_min(1e-12)
            precisions = torch.full_like(prior.values, float(common))
        else:
            precisions = (share * prior.counts / prior.squares(theta).clamp_min(1e-12)).clamp(1e-6, 1e8)
        return self.with_prior(prior.with_precision(precisions.reshape(prior.values.shape)))
