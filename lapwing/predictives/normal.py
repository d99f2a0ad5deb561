"""The normal predictive of regression."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import normal
from lapwing.core.settings import require_integer


@dataclass(frozen=True, eq=False)
class NormalPredictive:
    """Normal predictive y ~ N(mean, cov of f + noise).

    Args:
        belief: The Gaussian belief about the outputs f (B, C).
        noise: Noise variances, in the shape of the mean.

    >>> p = NormalPredictive(FunctionGaussian(torch.zeros(1, 1), torch.full((1, 1, 1), 3.0)), torch.ones(1, 1))
    >>> p.std.item(), p.epistemic_variance.item(), p.aleatoric_variance.item()
    (2.0, 3.0, 1.0)
    """

    belief: FunctionGaussian
    noise: Tensor

    @property
    def mean(self) -> Tensor:
        """The predicted mean, (B, C)."""
        return self.belief.mean

    @cached_property
    def variance(self) -> Tensor:
        """The variance of y, noise included, (B, C)."""
        return self.belief.variance + self.noise

    @property
    def std(self) -> Tensor:
        """The standard deviation of y, noise included, (B, C)."""
        return self.variance.sqrt()

    @property
    def epistemic_variance(self) -> Tensor:
        """The variance of f, which more data would lower, (B, C)."""
        return self.belief.variance

    @property
    def aleatoric_variance(self) -> Tensor:
        """The variance of the noise, which more data would not lower, (B, C)."""
        return self.noise

    epistemic = epistemic_variance
    aleatoric = aleatoric_variance

    @cached_property
    def distribution(self) -> Distribution:
        """The joint distribution of the outputs of one input; a multivariate normal if there are several."""
        if self.mean.shape[-1] == 1:
            return Independent(Normal(self.mean, self.std, validate_args=False), 1)
        cov = self.belief.cov + torch.diag_embed(self.noise)
        return MultivariateNormal(self.mean, covariance_matrix=cov, validate_args=False)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return (low, high), each (B, C), between which each output by itself lies with probability ``level``.

        Raises:
            ValueError: ``level`` is not between 0 and 1.

        >>> p = NormalPredictive(FunctionGaussian(torch.zeros(1, 1), torch.full((1, 1, 1), 3.0)), torch.ones(1, 1))
        >>> low, high = p.interval(0.95)
        >>> round(high.item(), 2)
        3.92
        """
        if not 0 < level < 1:
            raise ValueError(f"level is {level}; expected a probability between 0 and 1.")
        z = torch.special.ndtri(torch.tensor(0.5 + 0.5 * level, dtype=torch.float64)).to(self.mean)
        return self.mean - z * self.std, self.mean + z * self.std

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return the probability of at most y, for each output by itself, (B, C).

        Args:
            y: One number, or (B, C).

        Raises:
            ValueError: ``y`` has another shape.

        >>> p = NormalPredictive(FunctionGaussian(torch.zeros(1, 1), torch.full((1, 1, 1), 3.0)), torch.ones(1, 1))
        >>> round(1 - p.cdf(2.0).item(), 4)  # the probability of more than 2, one standard deviation
        0.1587
        """
        y = torch.as_tensor(y).to(self.mean)
        if y.ndim and y.shape != self.mean.shape:
            raise ValueError(f"y has the shape {tuple(y.shape)}; expected {tuple(self.mean.shape)}, or one number.")
        return torch.special.ndtr((y - self.mean) / self.std)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-density of the targets, (B,)."""
        return self.distribution.log_prob(y.to(self.mean).reshape(self.mean.shape))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the targets, (n, B, C); inputs are independent.

        Args:
            n: The number of draws.
            generator: Source of randomness; torch's global one if None.

        Raises:
            UnsupportedError: ``n`` is not a positive integer.
        """
        require_integer("n", n)
        eps = normal((n, *self.mean.shape), generator, self.mean)
        return self.belief.sample(n, generator) + eps * self.noise.sqrt()

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats, (B,)."""
        return self.distribution.entropy()

    @property
    def mutual_information(self) -> Tensor:
        """The mutual information of y and f in nats, (B,): entropy minus the entropy of the noise."""
        noise = Independent(Normal(self.mean, self.noise.sqrt(), validate_args=False), 1)
        return self.entropy - noise.entropy()
