"""Counts with a Poisson distribution, and their predictive: a Poisson with a Gaussian log-rate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, distributions

from lapwing.core.gaussian import FunctionGaussian, normal_nodes
from lapwing.core.random import poisson
from lapwing.core.settings import require_integer
from lapwing.core.state import State, saved
from lapwing.errors import DataError, NumericalError
from lapwing.likelihoods.protocol import matched, refuse_dispersion


@saved
@dataclass(frozen=True, eq=False)
class Poisson:
    """Counts, y ~ Poisson(exp f): the outputs of the network are log-rates.

    Targets are whole numbers from zero. The loss includes log y!, so the evidence is complete.

    >>> Poisson().loss(torch.zeros(1, 1), torch.ones(1, 1))  # exp(f) - y f + log y!
    tensor([1.])
    """

    dispersion: ClassVar[Tensor] = torch.tensor(1.0, dtype=torch.float64)
    learns_dispersion: ClassVar[bool] = False

    def with_dispersion(self, phi: Tensor) -> Poisson:
        refuse_dispersion(phi, "Poisson has no dispersion to change, its variance is its mean.")
        return self

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        y = matched(f, y, "Poisson")
        wrong = (y < 0) | (y != y.round())
        if bool(wrong.any()):
            raise DataError(f"Poisson: targets include {y[wrong][0].item():g}; expected whole numbers from 0.")
        return y

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.exp() - y * f + torch.lgamma(y + 1)).sum(-1)

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.diag_embed((0.5 * f).exp())

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        rate = f.exp()
        return rate - poisson(rate, generator)

    def count(self, f: Tensor, y: Tensor) -> int:
        return f[..., 0].numel()

    def log_normaliser(self, phi: Tensor, outputs: int) -> Tensor:
        return torch.zeros_like(phi)

    def predict(self, belief: FunctionGaussian) -> CountPredictive:
        return CountPredictive(belief.marginal)

    def state(self) -> State:
        """Return the state for a file; there is nothing to store."""
        return State("Poisson")

    @classmethod
    def from_state(cls, state: State) -> Poisson:
        """Build the likelihood from its state."""
        return cls()


@dataclass(frozen=True, eq=False)
class CountPredictive:
    """Predictive of counts with a Gaussian log-rate.

    Mean and variance are closed forms; probabilities and intervals are integrated over the log-rate numerically.

    Args:
        belief: The Gaussian belief about the log-rates (B, C).

    >>> p = CountPredictive(FunctionGaussian(torch.zeros(1, 1), torch.zeros(1, 1, 1)))
    >>> p.mean.item(), p.variance.item()
    (1.0, 1.0)
    """

    belief: FunctionGaussian

    @cached_property
    def mean(self) -> Tensor:
        """The expected count, (B, C)."""
        return (self.belief.mean + 0.5 * self.belief.variance).exp()

    @cached_property
    def epistemic_variance(self) -> Tensor:
        """The variance of the rate, (B, C)."""
        return self.mean.square() * torch.expm1(self.belief.variance)

    @property
    def aleatoric_variance(self) -> Tensor:
        """The expected variance of the Poisson, which is the mean, (B, C)."""
        return self.mean

    aleatoric = aleatoric_variance

    @property
    def epistemic(self) -> Tensor:
        """The same as ``epistemic_variance``."""
        return self.epistemic_variance

    @property
    def variance(self) -> Tensor:
        """The variance of the count, (B, C)."""
        return self.epistemic_variance + self.mean

    @property
    def std(self) -> Tensor:
        """The standard deviation of the count, (B, C)."""
        return self.variance.sqrt()

    @property
    def distribution(self) -> distributions.Distribution:
        """The counts of one input as a mixture of Poisson distributions over the nodes of the quadrature."""
        nodes, weights = normal_nodes(self.belief)
        mixture = distributions.Categorical(probs=weights.expand(nodes.shape), validate_args=False)
        return distributions.Independent(
            distributions.MixtureSameFamily(
                mixture, distributions.Poisson(nodes.exp(), validate_args=False), validate_args=False
            ),
            1,
        )

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of the targets, (B,), summed over outputs."""
        nodes, weights = normal_nodes(self.belief)
        y = y.to(self.mean).reshape(self.mean.shape).unsqueeze(-1)
        each = y * nodes - nodes.exp() - torch.lgamma(y + 1)
        return torch.logsumexp(each + weights.log(), -1).sum(-1)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return whole numbers (low, high), each (B, C): the quantiles at (1 - level)/2 and (1 + level)/2.

        Raises:
            ValueError: ``level`` is not between 0 and 1.
            NumericalError: The counts overflow.
        """
        if not 0 < level < 1:
            raise ValueError(f"level is {level}; expected a probability between 0 and 1.")
        return self._quantile(0.5 - 0.5 * level), self._quantile(0.5 + 0.5 * level)

    def _quantile(self, level: float) -> Tensor:
        """Return the smallest counts whose cumulative probability reaches ``level``, by bisection."""
        nodes, weights = normal_nodes(self.belief)
        rate, weights = nodes.double().exp(), weights.double()
        low = torch.zeros_like(self.mean, dtype=torch.float64)
        high = self._reach(20).ceil()
        for _ in range(int(high.max().log2().item()) + 2):
            middle = ((low + high) / 2).floor()
            enough = (torch.special.gammaincc(middle.unsqueeze(-1) + 1, rate) * weights).sum(-1) >= level
            high = torch.where(enough, middle, high)
            low = torch.where(enough, low, middle + 1).minimum(high)
        return high.to(self.mean)

    def _reach(self, deviations: int) -> Tensor:
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
        """Return n draws of the targets, (n, B, C); inputs are independent.

        Args:
            n: The number of draws.
            generator: Source of randomness; torch's global one if None.

        Raises:
            UnsupportedError: ``n`` is not a positive integer.
        """
        require_integer("n", n)
        return poisson(self.belief.sample(n, generator).exp(), generator)

    def _log_probs(self) -> tuple[Tensor, Tensor]:
        """Return log p(k | rate) for all likely counts k, (B, C, nodes, counts), and the weights of the nodes."""
        nodes, weights = normal_nodes(self.belief, 64)
        top = int(self._reach(12).max().item())
        if top * nodes.numel() > 2**28:
            raise NumericalError(
                f"the counts run to {top}, too many to sum over; the log-rate has a standard deviation of up to "
                f"{self.belief.std.max().item():.3g}. Use the variances for an uncertainty this wide."
            )
        counts = torch.arange(top + 1, dtype=torch.float64, device=nodes.device)
        nodes = nodes.double().unsqueeze(-1)
        return counts * nodes - nodes.exp() - torch.lgamma(counts + 1), weights.double()

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of the counts in nats, summed over outputs, (B,); a sum over all likely counts."""
        each, weights = self._log_probs()
        log_p = torch.logsumexp(each + weights.log().unsqueeze(-1), -2)
        return -(log_p.exp() * log_p).sum((-1, -2)).to(self.mean)

    @cached_property
    def mutual_information(self) -> Tensor:
        """The mutual information of counts and rates in nats, (B,): entropy minus that expected at a known rate."""
        each, weights = self._log_probs()
        expected = (-(each.exp() * each).sum(-1) * weights).sum((-1, -2))
        return (self.entropy - expected.to(self.mean)).clamp_min(0)
