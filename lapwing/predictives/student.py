"""The predictive of regression with tails heavier than the normal distribution's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import StudentT

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import normal
from lapwing.core.settings import require_integer
from lapwing.predictives.densities import cdf, quantile
from lapwing.predictives.mixture import DensityMixture
from lapwing.predictives.protocol import NumberPredictive, checked_numbers


@dataclass(frozen=True, eq=False, repr=False)
class StudentPredictive(NumberPredictive):
    """Student predictive y ~ mean + scale · (cov of f + noise)^½ · t with ``degrees`` degrees of freedom.

    The outputs of one input share one χ² variable, so they are jointly a multivariate Student distribution. The
    variances of f and of the noise are multiplied alike by scale² degrees / (degrees - 2), so that their ratio stays.

    Args:
        belief: The Gaussian belief about the outputs f (B, C).
        noise: Noise variances, in the shape of the mean.
        degrees: The degrees of freedom ν, above two.
        scale: The factor of the standard deviation.

    >>> p = StudentPredictive(FunctionGaussian(torch.zeros(1, 1), torch.full((1, 1, 1), 3.0)), torch.ones(1, 1), 4.0)
    >>> p.variance.item(), p.epistemic_variance.item(), p.aleatoric_variance.item()
    (8.0, 6.0, 2.0)
    """

    belief: FunctionGaussian
    noise: Tensor
    degrees: float
    scale: float = 1.0

    @staticmethod
    def mixed(components: tuple[StudentPredictive, ...], weights: Tensor) -> DensityMixture:
        """Return the mixture of predictives of the same inputs."""
        return DensityMixture(components, weights)

    @property
    def mean(self) -> Tensor:
        return self.belief.mean

    @property
    def widening(self) -> float:
        """The variance over that of the normal distribution: scale² degrees / (degrees - 2)."""
        return self.scale**2 * self.degrees / (self.degrees - 2)

    @property
    def epistemic_variance(self) -> Tensor:
        return self.widening * self.belief.variance

    @property
    def aleatoric_variance(self) -> Tensor:
        return self.widening * self.noise

    @property
    def distribution(self) -> StudentT:
        """The distribution of each output by itself, (B, C)."""
        return StudentT(self.degrees, self.mean, self.width, validate_args=False)

    @cached_property
    def width(self) -> Tensor:
        """The scale of the Student distribution of each output, (B, C); less than ``std``."""
        return self.scale * (self.belief.variance + self.noise).sqrt()

    def cdf(self, y: Tensor | float) -> Tensor:
        return cdf((checked_numbers(y, self.mean) - self.mean) / self.width, self.degrees)

    def quantile(self, level: float) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64)
        t = quantile(lambda y: cdf(y, self.degrees), level, zero, zero + 1).to(self.mean)
        return self.mean + t * self.width

    def log_prob(self, y: Tensor) -> Tensor:
        y = checked_numbers(y, self.mean, one=False)
        outputs, nu = y.shape[-1], self.degrees
        if outputs == 1:
            width = self.width.squeeze(-1)
            distance, log_det = ((y - self.mean).squeeze(-1) / width).square(), 2 * width.log()
        else:
            factor = torch.linalg.cholesky(self.scale**2 * (self.belief.cov + torch.diag_embed(self.noise)))
            gap = torch.linalg.solve_triangular(factor, (y - self.mean).unsqueeze(-1), upper=False).squeeze(-1)
            distance, log_det = gap.square().sum(-1), 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = math.lgamma((nu + outputs) / 2) - math.lgamma(nu / 2) - outputs / 2 * math.log(nu * math.pi)
        return constant - 0.5 * log_det - (nu + outputs) / 2 * torch.log1p(distance / nu)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        require_integer("n", n)
        eps = normal((n, *self.mean.shape), generator, self.mean) * self.noise.sqrt()
        deviation = self.belief.sample(n, generator) - self.mean + eps
        return self.mean + self.scale * deviation / self._chi(n, generator).sqrt()

    def _chi(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return n draws of χ²/ν for each input, (n, B, [T,] 1): a gamma variable by Marsaglia and Tsang's method."""
        shape = (n, *self.mean.shape[:-1], 1)
        d = self.degrees / 2 - 1 / 3
        out = torch.zeros(shape, dtype=self.mean.dtype, device=self.mean.device)
        open_ = torch.ones(shape, dtype=torch.bool, device=self.mean.device)
        while bool(open_.any()):
            z = normal(shape, generator, self.mean)
            u = torch.special.ndtr(normal(shape, generator, self.mean))
            v = (1 + z / math.sqrt(9 * d)).pow(3)
            good = (v > 0) & (u.log() < 0.5 * z.square() + d - d * v + d * v.clamp_min(1e-30).log())
            out = torch.where(open_ & good, d * v, out)
            open_ = open_ & ~good
        return out / (self.degrees / 2)

    @cached_property
    def entropy(self) -> Tensor:
        outputs = self.mean.shape[-1]
        if outputs == 1:
            log_det = 2 * self.width.squeeze(-1).log()
        else:
            log_det = torch.linalg.slogdet(self.scale**2 * (self.belief.cov + torch.diag_embed(self.noise)))[1]
        return 0.5 * log_det + self._standard_entropy(outputs)

    @property
    def known_entropy(self) -> Tensor:
        outputs = self.mean.shape[-1]
        return outputs * math.log(self.scale) + 0.5 * self.noise.log().sum(-1) + self._standard_entropy(outputs)

    def _standard_entropy(self, outputs: int) -> float:
        """Return the entropy of the multivariate Student distribution with unit scale."""
        nu, half = self.degrees, (self.degrees + outputs) / 2
        digamma = lambda value: float(torch.special.digamma(torch.tensor(value, dtype=torch.float64)))
        constant = math.lgamma(nu / 2) - math.lgamma(half) + outputs / 2 * math.log(nu * math.pi)
        return constant + half * (digamma(half) - digamma(nu / 2))
