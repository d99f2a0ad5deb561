"""The predictive of binary labels with Gaussian logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian, by_inputs, normal_nodes
from lapwing.core.random import uniform
from lapwing.core.settings import require_integer
from lapwing.predictives.mixture import BinaryMixture
from lapwing.predictives.protocol import MultilabelPredictive, checked_numbers


@dataclass(frozen=True, eq=False, repr=False)
class BinaryPredictive(MultilabelPredictive):
    """Predictive of one binary label or many.

    ``epistemic`` is the mutual information of labels and logits, ``aleatoric`` the expected entropy, both by
    quadrature whatever the link is.

    Args:
        belief: The Gaussian belief about the logits (B, C).
        link: "quadrature" or "probit" (closed form).

    >>> p = BinaryPredictive(FunctionGaussian(torch.zeros(1, 1), torch.ones(1, 1, 1)))
    >>> p.probs
    tensor([[0.5000]])
    """

    belief: FunctionGaussian
    link: str = "quadrature"

    @staticmethod
    def mixed(components: tuple[BinaryPredictive, ...], weights: Tensor) -> BinaryMixture:
        """Return the mixture of predictives of the same inputs."""
        return BinaryMixture(components, weights)

    @cached_property
    def _log_odds(self) -> tuple[Tensor, Tensor]:
        """log p(1) and log p(0), (B, C) each; finite where the probability itself rounds to zero."""
        return BINARY_LINKS[self.link](self.belief)

    @cached_property
    def probs(self) -> Tensor:
        return self._log_odds[0].exp()

    def log_prob(self, y: Tensor) -> Tensor:
        return self.log_prob_each(checked_numbers(y, self.probs, one=False, within=(0, 1))).sum(-1)

    def log_prob_each(self, y: Tensor) -> Tensor:
        """Return the log-probability of the target of each label by itself, (B, C)."""
        y = y.to(self.probs).reshape(self.probs.shape)
        one, zero = self._log_odds
        return y * one + (1 - y) * zero

    def known_log_prob(self, y: Tensor, known: Tensor) -> Tensor:
        return self.log_prob_each(y).masked_fill(~known, 0).sum(-1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        require_integer("n", n)
        draws = uniform((n, *self.probs.shape), generator, self.probs)
        return (draws < self.probs).to(self.probs)

    @cached_property
    def aleatoric(self) -> Tensor:
        def entropies(rows: slice) -> Tensor:
            nodes, weights = normal_nodes(self.belief, rows)
            p = nodes.sigmoid()
            return ((torch.special.entr(p) + torch.special.entr(1 - p)) * weights).sum((-1, -2))

        return by_inputs(self.belief, entropies)

    @cached_property
    def integrated_probs(self) -> Tensor:
        def probabilities(rows: slice) -> Tensor:
            nodes, weights = normal_nodes(self.belief, rows)
            return (nodes.sigmoid() * weights).sum(-1)

        return by_inputs(self.belief, probabilities)


def probit(belief: FunctionGaussian) -> tuple[Tensor, Tensor]:
    """Return log sigmoid(± m / sqrt(1 + π/8 var)), the probit approximation of log p(1) and log p(0)."""
    scaled = belief.mean / torch.sqrt(1 + math.pi / 8 * belief.variance)
    return F.logsigmoid(scaled), F.logsigmoid(-scaled)


def quadrature(belief: FunctionGaussian) -> tuple[Tensor, Tensor]:
    """Return log p(1) and log p(0) by numerical integration over the logit."""

    def logs(rows: slice) -> Tensor:
        nodes, weights = normal_nodes(belief, rows)
        each = (torch.logsumexp(F.logsigmoid(sign * nodes) + weights.log(), -1) for sign in (1, -1))
        return torch.stack(list(each), 1)

    both = by_inputs(belief, logs)
    return both[:, 0], both[:, 1]


BINARY_LINKS = {"probit": probit, "quadrature": quadrature}
