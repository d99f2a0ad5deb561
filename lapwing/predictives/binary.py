"""From Gaussian logits to probabilities of one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Distribution, Independent

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import uniform
from lapwing.core.settings import require_integer
from lapwing.predictives.quadrature import normal_nodes

BINARY_LINKS = ("probit", "quadrature")


@dataclass(frozen=True, eq=False)
class BinaryPredictive:
    """Probabilities of one, (B, C), for one label or many."""

    belief: FunctionGaussian
    link: str = "probit"

    @cached_property
    def _log_odds(self) -> tuple[Tensor, Tensor]:
        """log p(1) and log p(0), kept in logs so that a confident mistake costs what it should and not infinity."""
        if self.link == "probit":
            scaled = self.belief.mean / torch.sqrt(1 + math.pi / 8 * self.belief.variance)
            return F.logsigmoid(scaled), F.logsigmoid(-scaled)
        nodes, weights = normal_nodes(self.belief)
        one = torch.logsumexp(F.logsigmoid(nodes) + weights.log(), -1)
        return one, torch.logsumexp(F.logsigmoid(-nodes) + weights.log(), -1)

    @cached_property
    def probs(self) -> Tensor:
        return self._log_odds[0].exp()

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def distribution(self) -> Distribution:
        return Independent(BernoulliDistribution(probs=self.probs, validate_args=False), 1)

    def log_prob(self, y: Tensor) -> Tensor:
        """(B,), summed over labels."""
        y = y.to(self.probs).reshape(self.probs.shape)
        one, zero = self._log_odds
        return (y * one + (1 - y) * zero).sum(-1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, C) zeros and ones."""
        require_integer("n", n)
        draws = uniform((n, *self.probs.shape), generator, self.probs)
        return (draws < self.probs).to(self.probs)

    @cached_property
    def entropy(self) -> Tensor:
        """(B,), summed over labels."""
        return _entropy(self.probs).sum(-1)

    @cached_property
    def aleatoric(self) -> Tensor:
        """The expected entropy, (B,)."""
        nodes, weights = normal_nodes(self.belief)
        return (_entropy(nodes.sigmoid()) * weights).sum((-1, -2))

    @cached_property
    def mutual_information(self) -> Tensor:
        nodes, weights = normal_nodes(self.belief)
        exact = _entropy((nodes.sigmoid() * weights).sum(-1)).sum(-1)
        return (exact - self.aleatoric).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        return self.mutual_information


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p) + torch.special.entr(1 - p)
