"""The predictive of counts: a Poisson with a Gaussian log-rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Poisson

from lapwing.core.gaussian import FunctionGaussian, by_inputs, normal_nodes
from lapwing.core.random import poisson
from lapwing.core.settings import require_integer
from lapwing.errors import DataError, NumericalError
from lapwing.predictives.densities import whole_quantile
from lapwing.predictives.mixture import CountMixture
from lapwing.predictives.protocol import NumberPredictive, checked_numbers
from lapwing.predictives.scoring import NumberScoring

FEW = 64  # nodes for sums over all likely counts


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

    @staticmethod
    def mixed(components: tuple[CountPredictive, ...], weights: Tensor) -> CountMixture:
        """Return the mixture of predictives of the same inputs."""
        return CountMixture(components, weights)

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
        mixture = Categorical(probs=weights.expand(nodes.shape), validate_args=False)
        return Independent(
            MixtureSameFamily(mixture, Poisson(nodes.exp(), validate_args=False), validate_args=False), 1
        )

    def log_prob(self, y: Tensor) -> Tensor:
        y = checked_numbers(y, self.mean, one=False, within=(0, math.inf)).unsqueeze(-1)
        if not bool((y == y.round()).all()):
            raise DataError("y has fractions; expected counts: whole numbers from 0.")

        def logs(rows: slice) -> Tensor:
            nodes, weights = normal_nodes(self.belief, rows)
            each = y[rows] * nodes - nodes.exp() - torch.lgamma(y[rows] + 1)
            return torch.logsumexp(each + weights.log(), -1).sum(-1)

        return by_inputs(self.belief, logs)

    def quantile(self, level: float) -> Tensor:
        """Return whole numbers: the smallest whose cumulative probability is at least ``level``."""
        return whole_quantile(self.cdf, level, self.reach(20)).to(self.mean)

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return the probability of at most y counts, for each output by itself, (B, C) in float64."""
        count = checked_numbers(y, self.mean.double()).floor().expand(self.mean.shape)

        def below(rows: slice) -> Tensor:
            nodes, weights = normal_nodes(self.belief, rows)
            each = torch.special.gammaincc(count[rows].clamp_min(0).unsqueeze(-1) + 1, nodes.double().exp())
            return (each * weights.double()).sum(-1)

        return torch.where(count < 0, 0.0, by_inputs(self.belief, below))

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
        require_integer("n", n)
        return poisson(self.belief.sample(n, generator).exp(), generator)

    @property
    def scoring(self) -> NumberScoring:
        return NumberScoring(discrete=True)

    def top_count(self) -> int:
        """Return the largest count that is likely for one of the inputs."""
        return int(self.reach(12).max().item())

    def _summed(self, top: int, total: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return ``total`` of log p(k | rate), (B, C, nodes, counts), for counts k up to ``top``, and of weights."""
        if FEW * top * self.mean.numel() > 2**28:
            raise NumericalError(
                f"the counts run to {top}, too many to sum over; the log-rate has a standard deviation of up to "
                f"{self.belief.std.max().item():.3g}. Use the variances for an uncertainty this wide."
            )
        counts = torch.arange(top + 1, dtype=torch.float64, device=self.mean.device)

        def part(rows: slice) -> Tensor:
            nodes, weights = normal_nodes(self.belief, rows, FEW)
            nodes = nodes.double().unsqueeze(-1)
            return total(counts * nodes - nodes.exp() - torch.lgamma(counts + 1), weights.double())

        return by_inputs(self.belief, part, 8 * FEW * (top + 1))

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of the counts in nats, summed over outputs, (B,); a sum over all likely counts."""
        log_p = self.log_probs_to(self.top_count())
        return -(log_p.exp() * log_p).sum((-1, -2)).to(self.mean)

    def log_probs_to(self, top: int) -> Tensor:
        """Return the log-probabilities of the counts from zero to ``top``, (B, C, top + 1) in float64."""
        return self._summed(top, lambda each, weights: torch.logsumexp(each + weights.log().unsqueeze(-1), -2))

    @cached_property
    def known_entropy(self) -> Tensor:
        """The entropy of the counts in nats that is expected at a known rate, (B,) in float64."""
        return self._summed(
            self.top_count(), lambda each, weights: (-(each.exp() * each).sum(-1) * weights).sum((-1, -2))
        )
