"""Binary targets, one logit or many for multilabel problems, and their predictive."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, distributions

from lapwing.core.gaussian import FunctionGaussian, normal_nodes
from lapwing.core.random import uniform
from lapwing.core.settings import require_integer
from lapwing.core.state import State, saved
from lapwing.errors import DataError
from lapwing.likelihoods.protocol import check_logit_settings, matched, plain_numbers, refuse_unused


@saved
@dataclass(frozen=True, eq=False)
class Bernoulli:
    """Binary or multilabel classification: independent sigmoids and the binary cross-entropy loss.

    Targets are 0, 1 or a probability between them.

    Args:
        pos_weight: Weight of positive labels, one or (C,), as in ``nn.BCEWithLogitsLoss``.
        ignore_index: Value of labels that do not count; None if all do.
        link: How Gaussian logits become probabilities: "probit" (closed form) or "quadrature" (to about 1e-9 for
            logits with a standard deviation of up to 30).
        temperature: Divides the curvature. Other than one it gives a tempered posterior, which has no normaliser.

    Raises:
        DataError: The link is unknown, the temperature not positive, or ``pos_weight`` negative.

    >>> Bernoulli().loss(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([0.6931])
    """

    pos_weight: float | tuple[float, ...] | Tensor | None = None
    ignore_index: int | None = None
    link: str = "probit"
    temperature: float | Tensor = 1.0
    learns_dispersion: ClassVar[bool] = False
    ignores_common_shift: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_logit_settings(self.link, BINARY_LINKS, self.temperature, pos_weight=self.pos_weight)

    @cached_property
    def dispersion(self) -> Tensor:
        return torch.as_tensor(self.temperature, dtype=torch.float64)

    def with_dispersion(self, phi: Tensor) -> Bernoulli:
        return replace(self, temperature=phi)

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        y = matched(f, y, "Bernoulli")
        known = ~self.ignored(y)
        count = 1 if self.pos_weight is None else torch.as_tensor(self.pos_weight).numel()
        if count not in (1, f.shape[-1]):
            raise DataError(f"Bernoulli: {count} positive weights for {f.shape[-1]} outputs; expected one for each.")
        if bool(((y < 0) | (y > 1))[known].any()):
            raise DataError(
                f"Bernoulli: targets run from {y[known].min().item():g} to {y[known].max().item():g}; expected 0..1."
            )
        return y

    def ignored(self, y: Tensor) -> Tensor:
        return torch.zeros_like(y, dtype=torch.bool) if self.ignore_index is None else y == self.ignore_index

    def check_prediction(self) -> None:
        refuse_unused("Bernoulli", pos_weight=self.pos_weight, temperature=self.temperature)

    def _weight(self, y: Tensor) -> Tensor:
        """Return the weight of every label, zero for ignored ones."""
        weight = (~self.ignored(y)).to(y.dtype)
        if self.pos_weight is None:
            return weight
        return weight * (1 + (torch.as_tensor(self.pos_weight, dtype=y.dtype, device=y.device) - 1) * y)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        known = ~self.ignored(y)
        safe = torch.where(known, y, torch.zeros_like(y))
        positive = None if self.pos_weight is None else torch.as_tensor(self.pos_weight, dtype=f.dtype, device=f.device)
        each = F.binary_cross_entropy_with_logits(f, safe, pos_weight=positive, reduction="none")
        return (each * known).sum(-1)

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        p = f.sigmoid()
        return torch.diag_embed((p * (1 - p) * self._weight(y)).sqrt())

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        p = f.sigmoid()
        drawn = uniform(tuple(p.shape), generator, p) < p
        return (p - drawn.to(p)) * self._weight(y).sqrt()

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        return y[..., 0].numel() if self.ignore_index is None else (~self.ignored(y)).any(-1).sum()

    def log_normaliser(self, phi: Tensor, outputs: int) -> Tensor:
        return torch.zeros_like(phi)

    def predict(self, belief: FunctionGaussian) -> BinaryPredictive:
        return BinaryPredictive(belief.marginal, self.link)

    def state(self) -> State:
        """Return settings and tensors for a file."""
        weight = plain_numbers(self.pos_weight)
        settings = {"pos_weight": weight, "ignore_index": self.ignore_index, "link": self.link}
        return State("Bernoulli", settings, {"dispersion": self.dispersion.detach()})

    @classmethod
    def from_state(cls, state: State) -> Bernoulli:
        """Build the likelihood from its state."""
        return cls(**state.settings, temperature=state.tensors["dispersion"])


@dataclass(frozen=True, eq=False)
class BinaryPredictive:
    """Predictive of one binary label or many.

    ``epistemic`` is the mutual information of labels and logits, ``aleatoric`` the expected entropy, both by
    quadrature whatever the link is.

    Args:
        belief: The Gaussian belief about the logits (B, C).
        link: "probit" (closed form) or "quadrature".

    >>> p = BinaryPredictive(FunctionGaussian(torch.zeros(1, 1), torch.ones(1, 1, 1)))
    >>> p.probs
    tensor([[0.5000]])
    """

    belief: FunctionGaussian
    link: str = "probit"

    @cached_property
    def _log_odds(self) -> tuple[Tensor, Tensor]:
        """log p(1) and log p(0), (B, C) each; finite where the probability itself rounds to zero."""
        return BINARY_LINKS[self.link](self.belief)

    @cached_property
    def probs(self) -> Tensor:
        """The probability of label one, (B, C)."""
        return self._log_odds[0].exp()

    @property
    def mean(self) -> Tensor:
        """The same as ``probs``."""
        return self.probs

    @property
    def distribution(self) -> distributions.Distribution:
        """The labels of one input as independent Bernoulli variables."""
        return distributions.Independent(distributions.Bernoulli(probs=self.probs, validate_args=False), 1)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of the targets, (B,), summed over labels."""
        y = y.to(self.probs).reshape(self.probs.shape)
        one, zero = self._log_odds
        return (y * one + (1 - y) * zero).sum(-1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the targets, (n, B, C) zeros and ones; inputs are independent.

        Args:
            n: The number of draws.
            generator: Source of randomness; torch's global one if None.

        Raises:
            UnsupportedError: ``n`` is not a positive integer.
        """
        require_integer("n", n)
        draws = uniform((n, *self.probs.shape), generator, self.probs)
        return (draws < self.probs).to(self.probs)

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of the labels in nats, summed over labels, (B,)."""
        return _entropy(self.probs).sum(-1)

    @cached_property
    def aleatoric(self) -> Tensor:
        """The expected entropy given the logits in nats, (B,): doubt that more data would not remove."""
        nodes, weights = normal_nodes(self.belief)
        return (_entropy(nodes.sigmoid()) * weights).sum((-1, -2))

    @cached_property
    def mutual_information(self) -> Tensor:
        """The mutual information of labels and logits in nats, (B,): doubt that more data would remove."""
        nodes, weights = normal_nodes(self.belief)
        exact = _entropy((nodes.sigmoid() * weights).sum(-1)).sum(-1)
        return (exact - self.aleatoric).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        """The same as ``mutual_information``."""
        return self.mutual_information


def probit(belief: FunctionGaussian) -> tuple[Tensor, Tensor]:
    """Return log sigmoid(± m / sqrt(1 + π/8 var)), the probit approximation of log p(1) and log p(0)."""
    scaled = belief.mean / torch.sqrt(1 + math.pi / 8 * belief.variance)
    return F.logsigmoid(scaled), F.logsigmoid(-scaled)


def quadrature(belief: FunctionGaussian) -> tuple[Tensor, Tensor]:
    """Return log p(1) and log p(0) by numerical integration over the logit."""
    nodes, weights = normal_nodes(belief)
    one = torch.logsumexp(F.logsigmoid(nodes) + weights.log(), -1)
    return one, torch.logsumexp(F.logsigmoid(-nodes) + weights.log(), -1)


BINARY_LINKS = {"probit": probit, "quadrature": quadrature}


def _entropy(p: Tensor) -> Tensor:
    """Return the entropy of a binary variable in nats, in the shape of ``p``."""
    return torch.special.entr(p) + torch.special.entr(1 - p)
