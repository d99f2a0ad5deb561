"""Mixtures of predictives of the same inputs: probabilities and densities are averaged, in log space."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent

from lapwing.core.random import classes, uniform
from lapwing.core.settings import require_integer
from lapwing.errors import DataError
from lapwing.predictives.densities import cdf, log_density, quantile, whole_quantile

REACH = 14.0  # sinh(14) standard deviations on either side of the mean: nothing is beyond, for Student tails either
NODES = 512  # of the entropy's integral
DRAWS = 2048  # for the entropy of several outputs


@runtime_checkable
class Mixable(Protocol):
    """A predictive that can be averaged with others of the same inputs."""

    @staticmethod
    def mixed(components: tuple[Any, ...], weights: Tensor) -> Any:
        """Return the mixture of these predictives; the weights sum to one."""
        ...


@dataclass(frozen=True, eq=False)
class ClassMixture:
    """A mixture of predictives of a class.

    Args:
        components: Predictives with ``log_probs`` (K, B, C), such as ``SoftmaxPredictive``; together they have as many
            leading entries as there are weights.
        weights: Their weights (K,), which sum to one.
    """

    components: tuple[Any, ...]
    weights: Tensor

    @cached_property
    def log_probs(self) -> Tensor:
        """Log-probabilities of the classes, (B, C)."""
        return log_mixed(self.weights, torch.cat([component.log_probs for component in self.components]))

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities of the classes, (B, C)."""
        return self.log_probs.exp()

    @property
    def mean(self) -> Tensor:
        """The same as ``probs``."""
        return self.probs

    @property
    def distribution(self) -> Categorical:
        """The class of each input as a ``torch.distributions`` object."""
        return Categorical(probs=self.probs, validate_args=False)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of the labels, (B,).

        Raises:
            DataError: A label is not one of the classes.
        """
        return label_log_prob(self.log_probs, y)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the targets, (n, B) class numbers; inputs are independent.

        Args:
            n: The number of draws.
            generator: Source of randomness; torch's global one if None.

        Raises:
            UnsupportedError: ``n`` is not a positive integer.
        """
        require_integer("n", n)
        return classes(self.probs.expand(n, *self.probs.shape), generator)

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of ``probs`` in nats, (B,)."""
        return torch.special.entr(self.probs).sum(-1)

    @cached_property
    def aleatoric(self) -> Tensor:
        """The expected entropy given the logits in nats, (B,): doubt that more data would not remove."""
        return mixed(self.weights, torch.cat([component.aleatoric for component in self.components]))

    @cached_property
    def mutual_information(self) -> Tensor:
        """The mutual information of label and logits in nats, (B,): doubt that more data would remove."""
        probs = mixed(self.weights, torch.cat([component.sampled_probs for component in self.components]))
        return (torch.special.entr(probs).sum(-1) - self.aleatoric).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        """The same as ``mutual_information``."""
        return self.mutual_information


@dataclass(frozen=True, eq=False)
class BinaryMixture:
    """A mixture of predictives of one binary label or many.

    The labels of one input depend on each other through the mixture: ``log_prob`` mixes their joint probabilities.

    Args:
        components: ``BinaryPredictive`` objects.
        weights: Their weights (K,), which sum to one.
    """

    components: tuple[Any, ...]
    weights: Tensor

    @cached_property
    def probs(self) -> Tensor:
        """The probability of label one, (B, C)."""
        return mixed(self.weights, torch.stack([component.probs for component in self.components]))

    @property
    def mean(self) -> Tensor:
        """The same as ``probs``."""
        return self.probs

    @property
    def distribution(self) -> Distribution:
        """The labels of one input, each with its own probability, as independent Bernoulli variables."""
        return Independent(Bernoulli(probs=self.probs, validate_args=False), 1)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of the targets, (B,), jointly over labels."""
        return log_mixed(self.weights, torch.stack([component.log_prob(y) for component in self.components]))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the targets, (n, B, C) zeros and ones; each draw takes one component for an input.

        Args:
            n: The number of draws.
            generator: Source of randomness; torch's global one if None.

        Raises:
            UnsupportedError: ``n`` is not a positive integer.
        """
        return draw(self, n, generator)

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of the labels, each by itself, in nats, summed over labels, (B,)."""
        return _binary_entropy(self.probs).sum(-1)

    @cached_property
    def aleatoric(self) -> Tensor:
        """The expected entropy given the logits in nats, (B,): doubt that more data would not remove."""
        return mixed(self.weights, torch.stack([component.aleatoric for component in self.components]))

    @cached_property
    def mutual_information(self) -> Tensor:
        """The mutual information of labels and logits in nats, (B,): doubt that more data would remove."""
        exact = mixed(self.weights, torch.stack([component.integrated_probs for component in self.components]))
        return (_binary_entropy(exact).sum(-1) - self.aleatoric).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        """The same as ``mutual_information``."""
        return self.mutual_information


@dataclass(frozen=True, eq=False)
class DensityMixture:
    """A mixture of densities: of ``NormalPredictive`` and ``StudentPredictive`` objects.

    Args:
        components: Predictives with ``mean``, variances, ``cdf``, ``log_prob``, ``sample`` and ``noise_entropy``.
        weights: Their weights (K,), which sum to one.
    """

    components: tuple[Any, ...]
    weights: Tensor

    @property
    def distribution(self) -> Distribution:
        """The joint distribution of the outputs of one input as a ``torch.distributions`` object."""
        return MixtureDistribution(self)

    @cached_property
    def mean(self) -> Tensor:
        """The predicted mean, (B, C)."""
        return mixed(self.weights, torch.stack([component.mean for component in self.components]))

    @cached_property
    def epistemic_variance(self) -> Tensor:
        """The variance of f, which more data would lower, (B, C)."""
        return _epistemic_variance(self)

    @cached_property
    def aleatoric_variance(self) -> Tensor:
        """The expected variance of the noise, which more data would not lower, (B, C)."""
        return mixed(self.weights, torch.stack([component.aleatoric_variance for component in self.components]))

    @property
    def epistemic(self) -> Tensor:
        """The same as ``epistemic_variance``."""
        return self.epistemic_variance

    @property
    def aleatoric(self) -> Tensor:
        """The same as ``aleatoric_variance``."""
        return self.aleatoric_variance

    @property
    def variance(self) -> Tensor:
        """The variance of y, noise included, (B, C)."""
        return self.epistemic_variance + self.aleatoric_variance

    @property
    def std(self) -> Tensor:
        """The standard deviation of y, noise included, (B, C)."""
        return self.variance.sqrt()

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
        """Return the log-density of the targets, (B,), jointly over the outputs."""
        if self.mean.shape[-1] > 1:
            return log_mixed(self.weights, torch.stack([component.log_prob(y) for component in self.components]))
        y = y.to(self.mean).reshape(self.mean.shape)
        each = [
            log_weights + log_density((y - means) / widths, degrees) - widths.log()
            for degrees, log_weights, means, widths in self._families
        ]
        return torch.logsumexp(torch.cat(each), 0).squeeze(-1)

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return the probability of at most y, for each output by itself, (B, C).

        Args:
            y: One number, or (B, C).

        Raises:
            ValueError: ``y`` has another shape.
        """
        y = torch.as_tensor(y).to(self.mean)
        if y.ndim and y.shape != self.mean.shape:
            raise ValueError(f"y has the shape {tuple(y.shape)}; expected {tuple(self.mean.shape)}, or one number.")
        each = [w.exp() * cdf((y - means) / widths, degrees) for degrees, w, means, widths in self._families]
        return torch.cat(each).sum(0)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return (low, high), each (B, C): the mixture's quantiles at (1 - level)/2 and (1 + level)/2.

        Raises:
            ValueError: ``level`` is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"level is {level}; expected a probability between 0 and 1.")
        low, high = (quantile(self.cdf, 0.5 + sign * 0.5 * level, self.mean, self.std) for sign in (-1, 1))
        return low, high

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the targets, (n, B, C); inputs are independent, and each draws its component first.

        Args:
            n: The number of draws.
            generator: Source of randomness; torch's global one if None.

        Raises:
            UnsupportedError: ``n`` is not a positive integer.
        """
        return draw(self, n, generator)

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of y in nats, (B,): an integral for one output, a seeded average over draws for several."""
        if self.mean.shape[-1] > 1:
            draws = self.sample(DRAWS, torch.Generator().manual_seed(0))
            return -torch.stack([self.log_prob(y) for y in draws]).mean(0)
        steps = torch.linspace(-REACH, REACH, NODES, dtype=torch.float64, device=self.mean.device)
        total = torch.zeros(self.mean.shape[:-1], dtype=torch.float64, device=self.mean.device)
        for v in steps:  # y = mean + std sinh(v): a trapezoidal rule that reaches far into the tails
            log_p = self.log_prob(self.mean + self.std * torch.sinh(v)).double()
            total -= log_p.exp() * log_p * torch.cosh(v) * (steps[1] - steps[0])
        return (total * self.std.squeeze(-1).double()).to(self.mean)

    @property
    def mutual_information(self) -> Tensor:
        """The mutual information of y and f in nats, (B,): entropy minus that expected at a known f."""
        known = mixed(self.weights, torch.stack([component.noise_entropy for component in self.components]))
        return (self.entropy - known).clamp_min(0)


@dataclass(frozen=True, eq=False)
class CountMixture:
    """A mixture of predictives of counts.

    Args:
        components: ``CountPredictive`` objects.
        weights: Their weights (K,), which sum to one.
    """

    components: tuple[Any, ...]
    weights: Tensor

    @property
    def distribution(self) -> Distribution:
        """The joint distribution of the outputs of one input as a ``torch.distributions`` object."""
        return MixtureDistribution(self)

    @cached_property
    def mean(self) -> Tensor:
        """The expected count, (B, C)."""
        return mixed(self.weights, torch.stack([component.mean for component in self.components]))

    @cached_property
    def epistemic_variance(self) -> Tensor:
        """The variance of the rate, (B, C)."""
        return _epistemic_variance(self)

    @property
    def aleatoric_variance(self) -> Tensor:
        """The expected variance of the Poisson, which is the mean, (B, C)."""
        return self.mean

    @property
    def epistemic(self) -> Tensor:
        """The same as ``epistemic_variance``."""
        return self.epistemic_variance

    @property
    def aleatoric(self) -> Tensor:
        """The same as ``aleatoric_variance``."""
        return self.mean

    @property
    def variance(self) -> Tensor:
        """The variance of the count, (B, C)."""
        return self.epistemic_variance + self.mean

    @property
    def std(self) -> Tensor:
        """The standard deviation of the count, (B, C)."""
        return self.variance.sqrt()

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of the targets, (B,), jointly over outputs."""
        return log_mixed(self.weights, torch.stack([component.log_prob(y) for component in self.components]))

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return the probability of at most y counts, for each output by itself, (B, C)."""
        return mixed(self.weights, torch.stack([component.cdf(y) for component in self.components]))

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return whole numbers (low, high), each (B, C): the quantiles at (1 - level)/2 and (1 + level)/2.

        Raises:
            ValueError: ``level`` is not between 0 and 1.
            NumericalError: The counts overflow.
        """
        if not 0 < level < 1:
            raise ValueError(f"level is {level}; expected a probability between 0 and 1.")
        reach = torch.stack([component.reach(20) for component in self.components]).amax(0)
        low, high = (whole_quantile(self.cdf, 0.5 + sign * 0.5 * level, reach) for sign in (-1, 1))
        return low.to(self.mean), high.to(self.mean)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the targets, (n, B, C); inputs are independent, and each draws its component first.

        Args:
            n: The number of draws.
            generator: Source of randomness; torch's global one if None.

        Raises:
            UnsupportedError: ``n`` is not a positive integer.
        """
        return draw(self, n, generator)

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of the counts, each output by itself, in nats, summed over outputs, (B,)."""
        top = max(component.top_count() for component in self.components)
        log_p = log_mixed(self.weights, torch.stack([component.log_probs_to(top) for component in self.components]))
        return -(log_p.exp() * log_p).sum((-1, -2)).to(self.mean)

    @cached_property
    def mutual_information(self) -> Tensor:
        """The mutual information of counts and rates in nats, (B,): entropy minus that expected at a known rate."""
        known = mixed(self.weights, torch.stack([component.expected_entropy for component in self.components]))
        return (self.entropy - known.to(self.mean)).clamp_min(0)


class MixtureDistribution(Distribution):
    """A mixture of densities or counts as a ``torch.distributions`` object, jointly over the outputs of an input."""

    def __init__(self, predictive: DensityMixture | CountMixture) -> None:
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


def mixed(weights: Tensor, values: Tensor) -> Tensor:
    """Return Σ w_k v_k of values (K, ...)."""
    return torch.einsum("k,k...->...", weights.to(values), values)


def log_mixed(weights: Tensor, values: Tensor) -> Tensor:
    """Return log Σ w_k exp(v_k) of values (K, ...)."""
    return torch.logsumexp(values + weights.log().to(values).reshape(-1, *[1] * (values.ndim - 1)), 0)


def label_log_prob(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return the log-probability of each label, (B,); raise ``DataError`` if one is not among the classes."""
    count = log_probs.shape[-1]
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < count:
        raise DataError(f"classes run from {int(y.min())} to {int(y.max())}; expected 0..{count - 1}.")
    return log_probs.gather(-1, y.long().reshape(*log_probs.shape[:-1], 1)).squeeze(-1)


def draw(mixture: BinaryMixture | DensityMixture | CountMixture, n: int, generator: torch.Generator | None) -> Tensor:
    """Return n draws of a mixture, (n, B, [T,] C): for each input a component, then a draw from it."""
    require_integer("n", n)
    mean = mixture.mean
    inputs = (n, *mean.shape[:-1])
    edges = mixture.weights.to(mean.device).cumsum(0)[:-1].contiguous()
    cells = torch.searchsorted(edges, uniform(inputs, generator, mean).to(edges), right=True)
    out = torch.zeros((n, *mean.shape), dtype=mean.dtype, device=mean.device)
    for k, component in enumerate(mixture.components):
        chosen = cells == k
        if bool(chosen.any()):
            out = torch.where(chosen.unsqueeze(-1), component.sample(n, generator), out)
    return out


def _epistemic_variance(mixture: DensityMixture | CountMixture) -> Tensor:
    """Return the variance of f within the components and between their means, (B, C)."""
    parts = [each.epistemic_variance + (each.mean - mixture.mean).square() for each in mixture.components]
    return mixed(mixture.weights, torch.stack(parts))


def _binary_entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p) + torch.special.entr(1 - p)
