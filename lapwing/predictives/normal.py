"""The normal predictive of regression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import normal
from lapwing.core.settings import PROBABILITY, require_integer
from lapwing.predictives.mixture import DensityMixture
from lapwing.predictives.protocol import NumberPredictive, checked_numbers


@dataclass(frozen=True, eq=False, repr=False)
class NormalPredictive(NumberPredictive):
    """Normal predictive y ~ N(mean, cov of f + noise).

    Args:
        belief: The Gaussian belief about the outputs f (B, C).
        noise: Noise variances, in the shape of the mean.

    >>> p = NormalPredictive(FunctionGaussian(torch.zeros(1, 1), torch.full((1, 1, 1), 3.0)), torch.ones(1, 1))
    >>> p.std.item(), p.epistemic_variance.item(), p.aleatoric_variance.item()
    (2.0, 3.0, 1.0)
    >>> low, high = p.interval(0.95)
    >>> round(high.item(), 2)
    3.92
    >>> round(1 - p.cdf(2.0).item(), 4)  # the probability of more than 2, one standard deviation
    0.1587
    """

    belief: FunctionGaussian
    noise: Tensor

    @staticmethod
    def mixed(components: tuple[NormalPredictive, ...], weights: Tensor) -> DensityMixture:
        """Return the mixture of predictives of the same inputs."""
        return DensityMixture(components, weights)

    @property
    def mean(self) -> Tensor:
        return self.belief.mean

    @property
    def epistemic_variance(self) -> Tensor:
        return self.belief.variance

    @property
    def aleatoric_variance(self) -> Tensor:
        return self.noise

    @property
    def degrees(self) -> float:
        """Degrees of freedom: infinite, as of a Student distribution that is normal."""
        return math.inf

    @property
    def width(self) -> Tensor:
        """The same as ``std``."""
        return self.std

    @cached_property
    def distribution(self) -> Distribution:
        """The joint distribution of the outputs of one input; a multivariate normal if there are several."""
        if self.mean.shape[-1] == 1:
            return Independent(Normal(self.mean, self.std, validate_args=False), 1)
        cov = self.belief.cov + torch.diag_embed(self.noise)
        return MultivariateNormal(self.mean, covariance_matrix=cov, validate_args=False)

    def quantile(self, level: float) -> Tensor:
        PROBABILITY.check("level", level)
        z = torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).to(self.mean)
        return self.mean + z * self.std

    def cdf(self, y: Tensor | float) -> Tensor:
        return torch.special.ndtr((checked_numbers(y, self.mean) - self.mean) / self.std)

    def log_prob(self, y: Tensor) -> Tensor:
        out: Tensor = self.distribution.log_prob(checked_numbers(y, self.mean, one=False))
        return out

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        require_integer("n", n)
        eps = normal((n, *self.mean.shape), generator, self.mean)
        return self.belief.sample(n, generator) + eps * self.noise.sqrt()

    @property
    def entropy(self) -> Tensor:
        out: Tensor = self.distribution.entropy()
        return out

    @property
    def known_entropy(self) -> Tensor:
        return 0.5 * (2 * math.pi * math.e * self.noise).log().sum(-1)
