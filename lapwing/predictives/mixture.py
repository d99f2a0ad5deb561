"""Mixtures of predictives of the same inputs: probabilities and densities are averaged, in log space."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from lapwing.predictives.base import (
    ClassPredictive,
    LabelPredictive,
    MultilabelPredictive,
    NumberPredictive,
    Predictive,
    cdf,
    checked_numbers,
    log_density,
    quantile,
    whole_quantile,
)
from lapwing.predictives.scores import NumberScoring
from lapwing.runtime.memory import gathered, runs
from lapwing.runtime.settings import integer
from lapwing.runtime.threads import uniform

P = TypeVar("P", bound=Predictive)
Q = TypeVar("Q", bound=LabelPredictive)
R = TypeVar("R", bound=NumberPredictive)

REACH = 14.0  # sinh(14) standard deviations on either side of the mean: nothing is beyond, for Student tails either
NODES = 512  # of the entropy's integral
DRAWS = 2048  # for the entropy of several outputs


@dataclass(frozen=True, eq=False, repr=False)
class Mixture(Predictive, Generic[P]):
    """An average of predictives of the same inputs.

    Args:
        components: The predictives.
        weights: Their weights (K,), which sum to one.
    """

    components: tuple[P, ...]
    weights: Tensor

    def each(self, part: Callable[[P], Tensor]) -> Tensor:
        """Return a part of every component, (K, ...)."""
        return torch.cat(self._values(part))

    def _values(self, part: Callable[[P], Tensor]) -> list[Tensor]:
        """Return a part of the components, (k, B, ...) each: K leading entries together."""
        return [part(component).unsqueeze(0) for component in self.components]

    def average(self, part: Callable[[P], Tensor]) -> Tensor:
        """Return Σ w_k v_k of a part v of the components."""
        return self._over_inputs(part, lambda v: (self.weights.to(v).reshape(-1, *[1] * (v.ndim - 1)) * v).sum(0))

    def log_average(self, part: Callable[[P], Tensor]) -> Tensor:
        """Return log Σ w_k exp(v_k) of a part v of the components."""
        weights = lambda v: self.weights.log().to(v).reshape(-1, *[1] * (v.ndim - 1))
        return self._over_inputs(part, lambda v: torch.logsumexp(v + weights(v), 0))

    def _over_inputs(self, part: Callable[[P], Tensor], summed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a sum over the components (K, B, ...), for as many inputs at a time as fit the byte budget."""
        values = self._values(part)
        first, each = values[0], 3 * len(self.weights) * values[0].element_size()
        if first.ndim == 1 or not first.numel():
            return summed(torch.cat(values))
        some = runs(first.shape[1], each * first[0, 0].numel(), first.device)
        return gathered((summed(torch.cat([v[:, rows] for v in values])) for rows in some), first.shape[1])

    def log_prob(self, y: Tensor) -> Tensor:
        return self.log_average(lambda component: component.log_prob(y))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws, (n, B, [T,] C): for each input a component, then a draw from it."""
        integer().check("n", n)
        mean = self.mean
        edges = self.weights.to(mean.device).cumsum(0)[:-1].contiguous()
        cells = torch.searchsorted(edges, uniform((n, *mean.shape[:-1]), generator, mean).to(edges), right=True)
        out = torch.zeros((n, *mean.shape), dtype=mean.dtype, device=mean.device)
        for k, component in enumerate(self.components):
            chosen = cells == k
            if bool(chosen.any()):
                out = torch.where(chosen.unsqueeze(-1), component.sample(n, generator), out)
        return out


class LabelMixture(Mixture[Q], LabelPredictive):
    """An average of predictives of labels."""

    @cached_property
    def integrated_probs(self) -> Tensor:
        return self.average(lambda component: component.integrated_probs)

    @cached_property
    def aleatoric(self) -> Tensor:
        return self.average(lambda component: component.aleatoric)


class ClassMixture(ClassPredictive, LabelMixture[ClassPredictive]):
    """A mixture of predictives of a class.

    Args:
        components: Predictives with ``log_probs`` (K, B, C), such as ``SoftmaxPredictive``; together they have as many
            leading entries as there are weights.
        weights: Their weights (K,), which sum to one.
    """

    def _values(self, part: Callable[[ClassPredictive], Tensor]) -> list[Tensor]:
        return [part(component) for component in self.components]

    @cached_property
    def log_probs(self) -> Tensor:
        return self.log_average(lambda component: component.log_probs)


class BinaryMixture(LabelMixture[MultilabelPredictive], MultilabelPredictive):
    """A mixture of predictives of one binary label or many.

    The labels of one input depend on each other through the mixture: ``log_prob`` mixes their joint probabilities.
    """

    @cached_property
    def probs(self) -> Tensor:
        return self.average(lambda component: component.probs)

    def known_log_prob(self, y: Tensor, known: Tensor) -> Tensor:
        return self.log_average(lambda component: component.known_log_prob(y, known))


class NumberMixture(Mixture[R], NumberPredictive):
    """An average of predictives of numbers."""

    @property
    def distribution(self) -> Distribution:
        return MixtureDistribution(self)

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


class DensityMixture(NumberMixture[Any]):
    """A mixture of densities: of ``NormalPredictive`` and ``StudentPredictive`` objects."""

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
        y = checked_numbers(y, self.mean, one=False)
        each = [
            log_weights + log_density((y - means) / widths, degrees) - widths.log()
            for degrees, log_weights, means, widths in self._families
        ]
        return torch.logsumexp(torch.cat(each), 0).squeeze(-1)

    def cdf(self, y: Tensor | float) -> Tensor:
        y = checked_numbers(y, self.mean)
        each = [w.exp() * cdf((y - means) / widths, degrees) for degrees, w, means, widths in self._families]
        return torch.cat(each).sum(0)

    def quantile(self, level: float) -> Tensor:
        return quantile(self.cdf, level, self.mean, self.std)

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


class CountMixture(NumberMixture[Any]):
    """A mixture of ``CountPredictive`` objects."""

    def cdf(self, y: Tensor | float) -> Tensor:
        return self.average(lambda component: component.cdf(y))

    def quantile(self, level: float) -> Tensor:
        reach = self.each(lambda component: component.reach(20)).amax(0)
        return whole_quantile(self.cdf, level, reach).to(self.mean)

    @property
    def scoring(self) -> NumberScoring:
        return NumberScoring(discrete=True)

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of the counts, each output by itself, in nats, summed over outputs, (B,)."""
        top = max(component.top_count() for component in self.components)
        log_p = self.log_average(lambda component: component.log_probs_to(top))
        return -(log_p.exp() * log_p).sum((-1, -2)).to(self.mean)


class MixtureDistribution(Distribution):
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
