"""Predictives of numbers: normal, Student, and counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution

from lapwing.errors import DataError, NumericalError
from lapwing.predictives.base import Mixture, NumberPredictive, check_numbers
from lapwing.predictives.scores import NumberScoring
from lapwing.runtime.settings import PROBABILITY, integer
from lapwing.runtime.threads import normal, poisson
from lapwing.values.gaussian import FunctionGaussian, by_nodes, normal_nodes

P = TypeVar("P", bound=NumberPredictive)

REACH = 14.0  # sinh(14) standard deviations on either side of the mean: nothing is beyond, for Student tails either
ENTROPY_NODES = 512  # of the entropy's integral
ENTROPY_DRAWS = 2048  # for the entropy of several outputs


def log_density(z: Tensor, degrees: float) -> Tensor:
    """Return the log-density of the standard Student distribution; of the normal one for infinite degrees."""
    if degrees == math.inf:
        return -0.5 * (z.square() + math.log(2 * math.pi))
    constant = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return constant - (degrees + 1) / 2 * torch.log1p(z.square() / degrees)


def cdf(z: Tensor, degrees: float) -> Tensor:
    r"""Return the cumulative probability; degrees are an even number, for which it is a finite sum, or infinite.

    With $\theta = \arctan(z/\sqrt\nu)$: $P(|Z| < z) = \sin\theta\,(1 + \tfrac12 \cos^2\theta + \tfrac{1\cdot3}{2\cdot4}
    \cos^4\theta + \dots)$, ν/2 terms (Abramowitz and Stegun 26.7.4).
    """
    if degrees == math.inf:
        return torch.special.ndtr(z)
    value = z.double()
    sine, cosine2 = value / (degrees + value.square()).sqrt(), degrees / (degrees + value.square())
    term = total = torch.ones_like(value)
    for k in range(1, int(degrees) // 2):
        term = term * cosine2 * (2 * k - 1) / (2 * k)
        total = total + term
    return (0.5 + 0.5 * sine * total).to(z.dtype)


def quantile(cdf: Callable[[Tensor], Tensor], level: float, centre: Tensor, width: Tensor) -> Tensor:
    """Return y with cdf(y) = level, by doubling a bracket around ``centre`` and then bisecting it to rounding."""
    PROBABILITY.check("level", level)
    low, high = centre - width, centre + width
    for _ in range(200):
        short, long = cdf(low) > level, cdf(high) < level
        if not bool((short | long).any()):
            break
        low = torch.where(short, centre - 2 * (centre - low), low)
        high = torch.where(long, centre + 2 * (high - centre), high)
    for _ in range(60 if centre.dtype == torch.float64 else 30):
        middle = 0.5 * (low + high)
        below = cdf(middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)


def whole_quantile(cdf: Callable[[Tensor], Tensor], level: float, reach: Tensor) -> Tensor:
    """Return the smallest whole numbers, up to ``reach``, whose cumulative probability is at least ``level``."""
    PROBABILITY.check("level", level)
    low, high = torch.zeros_like(reach), reach.ceil()
    for _ in range(int(high.max().log2().item()) + 2):
        middle = ((low + high) / 2).floor()
        enough = cdf(middle) >= level
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1).minimum(high)
    return high


class NumberMixture(Mixture[P], NumberPredictive):
    """An average of predictives of numbers."""

    @property
    def distribution(self) -> Distribution:
        return NumberDistribution(self)

    @cached_property
    def mean(self) -> Tensor:
        return self.average(lambda component: component.mean)

    @cached_property
    def epistemic_variance(self) -> Tensor:
        return self.average(lambda each: each.epistemic_variance + (each.mean - self.mean).square())

    @cached_property
    def aleatoric_variance(self) -> Tensor:
        return self.average(lambda component: component.aleatoric_variance)

    @property
    def known_entropy(self) -> Tensor:
        return self.average(lambda component: component.known_entropy)


class DensityMixture(NumberMixture["NormalPredictive | StudentPredictive"]):
    """A mixture of densities."""

    @cached_property
    def _families(self) -> list[tuple[float, Tensor, Tensor, Tensor]]:
        """Degrees, log-weights (k, 1, 1), means and widths (k, B, C) of the components with the same degrees."""
        families = []
        for degrees in dict.fromkeys(component.degrees for component in self.components):
            chosen = [i for i, component in enumerate(self.components) if component.degrees == degrees]
            means = torch.stack([self.components[i].mean for i in chosen])
            widths = torch.stack([self.components[i].width for i in chosen])
            log_weights = self.weights[chosen].log().to(means).reshape(-1, *[1] * (means.ndim - 1))
            families.append((degrees, log_weights, means, widths))
        return families

    def log_prob(self, y: Tensor) -> Tensor:
        if self.mean.shape[-1] > 1:
            return super().log_prob(y)
        y = check_numbers(y, self.mean, one=False)
        each = [
            log_weights + log_density((y - means) / widths, degrees) - widths.log()
            for degrees, log_weights, means, widths in self._families
        ]
        return torch.logsumexp(torch.cat(each), 0).squeeze(-1)

    def cdf(self, y: Tensor | float) -> Tensor:
        y = check_numbers(y, self.mean)
        each = [w.exp() * cdf((y - means) / widths, degrees) for degrees, w, means, widths in self._families]
        return torch.cat(each).sum(0)

    def quantile(self, level: float) -> Tensor:
        return quantile(self.cdf, level, self.mean, self.std)

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of y in nats, (B,): an integral for one output, a seeded average over draws for several."""
        if self.mean.shape[-1] > 1:
            draws = self.sample(ENTROPY_DRAWS, torch.Generator().manual_seed(0))
            return -torch.stack([self.log_prob(y) for y in draws]).mean(0)
        steps = torch.linspace(-REACH, REACH, ENTROPY_NODES, dtype=torch.float64, device=self.mean.device)
        total = torch.zeros(self.mean.shape[:-1], dtype=torch.float64, device=self.mean.device)
        for v in steps:  # y = mean + std sinh(v): a trapezoidal rule that reaches far into the tails
            log_p = self.log_prob(self.mean + self.std * torch.sinh(v)).double()
            total -= log_p.exp() * log_p * torch.cosh(v) * (steps[1] - steps[0])
        return (total * self.std.squeeze(-1).double()).to(self.mean)


class CountMixture(NumberMixture["CountPredictive"]):
    """A mixture of predictives of counts."""

    scoring: ClassVar[NumberScoring] = NumberScoring(discrete=True)

    def cdf(self, y: Tensor | float) -> Tensor:
        return self.average(lambda component: component.cdf(y))

    def quantile(self, level: float) -> Tensor:
        reach = torch.cat(self._values(lambda component: component.reach(20))).amax(0)
        return whole_quantile(self.cdf, level, reach).to(self.mean)

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of the counts, each output by itself, in nats, summed over outputs, (B,)."""
        top = max(component.top_count() for component in self.components)
        log_p = self.log_average(lambda component: component.log_probs_to(top))
        return -(log_p.exp() * log_p).sum((-1, -2)).to(self.mean)


class NumberDistribution(Distribution):
    """A predictive of numbers as a ``torch.distributions`` object, jointly over the outputs of an input."""

    def __init__(self, predictive: NumberPredictive) -> None:
        self.predictive = predictive
        shape = predictive.mean.shape
        super().__init__(shape[:-1], shape[-1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.predictive.mean

    @property
    def variance(self) -> Tensor:
        return self.predictive.variance

    def log_prob(self, value: Tensor) -> Tensor:
        return self.predictive.log_prob(value)

    def sample(self, sample_shape: Iterable[int] = ()) -> Tensor:
        shape = torch.Size(sample_shape)
        return self.predictive.sample(max(1, shape.numel())).reshape(*shape, *self.mean.shape)

    def entropy(self) -> Tensor:
        return self.predictive.entropy


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
    degrees: ClassVar[float] = math.inf  # of freedom, as of a Student distribution that is normal

    mixed = staticmethod(DensityMixture)

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
    def width(self) -> Tensor:
        """Another name of ``std``."""
        return self.std

    @cached_property
    def distribution(self) -> Distribution:
        """The joint distribution of the outputs of one input; a multivariate normal if there are several."""
        if self.mean.shape[-1] == 1:
            return distributions.Independent(distributions.Normal(self.mean, self.std, validate_args=False), 1)
        cov = self.belief.cov + torch.diag_embed(self.noise)
        return distributions.MultivariateNormal(self.mean, covariance_matrix=cov, validate_args=False)

    def quantile(self, level: float) -> Tensor:
        PROBABILITY.check("level", level)
        z = torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).to(self.mean)
        return self.mean + z * self.std

    def cdf(self, y: Tensor | float) -> Tensor:
        return torch.special.ndtr((check_numbers(y, self.mean) - self.mean) / self.std)

    def log_prob(self, y: Tensor) -> Tensor:
        return self.distribution.log_prob(check_numbers(y, self.mean, one=False))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        integer().check("n", n)
        eps = normal((n, *self.mean.shape), generator, self.mean)
        return self.belief.sample(n, generator) + eps * self.noise.sqrt()

    @property
    def entropy(self) -> Tensor:
        return self.distribution.entropy()

    @property
    def known_entropy(self) -> Tensor:
        return 0.5 * (2 * math.pi * math.e * self.noise).log().sum(-1)


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

    mixed = staticmethod(DensityMixture)

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
    def distribution(self) -> distributions.StudentT:
        """The distribution of each output by itself, (B, C)."""
        return distributions.StudentT(self.degrees, self.mean, self.width, validate_args=False)

    @cached_property
    def width(self) -> Tensor:
        """The scale of the Student distribution of each output, (B, C); less than ``std``."""
        return self.scale * (self.belief.variance + self.noise).sqrt()

    def cdf(self, y: Tensor | float) -> Tensor:
        return cdf((check_numbers(y, self.mean) - self.mean) / self.width, self.degrees)

    def quantile(self, level: float) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64)
        t = quantile(lambda y: cdf(y, self.degrees), level, zero, zero + 1).to(self.mean)
        return self.mean + t * self.width

    def log_prob(self, y: Tensor) -> Tensor:
        y = check_numbers(y, self.mean, one=False)
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
        integer().check("n", n)
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


COUNT_NODES = 64  # nodes for sums over all likely counts


@dataclass(frozen=True, eq=False, repr=False)
class CountPredictive(NumberPredictive):
    """Predictive of counts with a Gaussian log-rate.

    Mean and variance are closed forms; probabilities and intervals are integrated over the log-rate numerically.

    Args:
        belief: The Gaussian belief about the log-rates (B, C).

    >>> p = CountPredictive(FunctionGaussian(torch.zeros(1, 1), torch.zeros(1, 1, 1)))
    >>> p.mean.item(), p.variance.item()
    (1.0, 1.0)
    """

    belief: FunctionGaussian

    scoring: ClassVar[NumberScoring] = NumberScoring(discrete=True)

    mixed = staticmethod(CountMixture)

    @cached_property
    def mean(self) -> Tensor:
        return (self.belief.mean + 0.5 * self.belief.variance).exp()

    @cached_property
    def epistemic_variance(self) -> Tensor:
        """The variance of the rate, (B, C)."""
        return self.mean.square() * torch.expm1(self.belief.variance)

    @property
    def aleatoric_variance(self) -> Tensor:
        """The expected variance of the Poisson, which is the mean, (B, C)."""
        return self.mean

    @property
    def distribution(self) -> Distribution:
        """The counts of one input as a mixture of Poisson distributions over the nodes of the quadrature."""
        nodes, weights = normal_nodes(self.belief)
        each = distributions.Poisson(nodes.exp(), validate_args=False)
        shares = distributions.Categorical(probs=weights.expand(nodes.shape), validate_args=False)
        mixture = distributions.MixtureSameFamily(shares, each, validate_args=False)
        return distributions.Independent(mixture, 1)

    def log_prob(self, y: Tensor) -> Tensor:
        y = check_numbers(y, self.mean, one=False, within=(0, math.inf)).unsqueeze(-1)
        if not bool((y == y.round()).all()):
            raise DataError("y has fractions; expected counts: whole numbers from 0.")

        def logs(f: Tensor, weights: Tensor, rows: slice) -> Tensor:
            each = y[rows] * f - f.exp() - torch.lgamma(y[rows] + 1)
            return torch.logsumexp(each + weights.log(), -1).sum(-1)

        return by_nodes(self.belief, logs)

    def quantile(self, level: float) -> Tensor:
        """Return whole numbers: the smallest whose cumulative probability is at least ``level``."""
        return whole_quantile(self.cdf, level, self.reach(20)).to(self.mean)

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return the probability of at most y counts, for each output by itself, (B, C) in float64."""
        count = check_numbers(y, self.mean.double()).floor().expand(self.mean.shape)

        def below(f: Tensor, weights: Tensor, rows: slice) -> Tensor:
            each = torch.special.gammaincc(count[rows].clamp_min(0).unsqueeze(-1) + 1, f.double().exp())
            return (each * weights.double()).sum(-1)

        return torch.where(count < 0, 0.0, by_nodes(self.belief, below))

    def reach(self, deviations: int) -> Tensor:
        """Return counts beyond which the probability is negligible, (B, C) in float64; raise if they overflow."""
        reach = (self.mean + deviations * self.std + 20).double()
        if not bool(torch.isfinite(reach).all()):
            raise NumericalError(
                f"the counts overflow: the log-rate has a mean of up to {self.belief.mean.max().item():.3g} and a "
                f"standard deviation of up to {self.belief.std.max().item():.3g}; expected a rate and a variance that "
                f"{self.mean.dtype} holds. Raise the prior precision, or use log_prob."
            )
        return reach

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        integer().check("n", n)
        return poisson(self.belief.sample(n, generator).exp(), generator)

    def top_count(self) -> int:
        """Return the largest count that is likely for one of the inputs."""
        return int(self.reach(12).max().item())

    def _sum_over_counts(self, top: int, total: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return ``total`` of log p(k | rate), (B, C, nodes, counts), for counts k up to ``top``, and of weights."""
        if COUNT_NODES * top * self.mean.numel() > 2**28:
            raise NumericalError(
                f"the counts run to {top}, too many to sum over; the log-rate has a standard deviation of up to "
                f"{self.belief.std.max().item():.3g}. Use the variances for an uncertainty this wide."
            )
        counts = torch.arange(top + 1, dtype=torch.float64, device=self.mean.device)

        def part(f: Tensor, weights: Tensor, rows: slice) -> Tensor:
            f = f.double().unsqueeze(-1)
            return total(counts * f - f.exp() - torch.lgamma(counts + 1), weights.double())

        return by_nodes(self.belief, part, COUNT_NODES, 8 * COUNT_NODES * (top + 1))

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of the counts in nats, summed over outputs, (B,); a sum over all likely counts."""
        log_p = self.log_probs_to(self.top_count())
        return -(log_p.exp() * log_p).sum((-1, -2)).to(self.mean)

    def log_probs_to(self, top: int) -> Tensor:
        """Return the log-probabilities of the counts from zero to ``top``, (B, C, top + 1) in float64."""
        return self._sum_over_counts(top, lambda each, weights: torch.logsumexp(each + weights.log().unsqueeze(-1), -2))

    @cached_property
    def known_entropy(self) -> Tensor:
        """The entropy of the counts in nats that is expected at a known rate, (B,) in float64."""
        return self._sum_over_counts(
            self.top_count(), lambda each, weights: (-(each.exp() * each).sum(-1) * weights).sum((-1, -2))
        )
