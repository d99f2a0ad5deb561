"""The predictive of classes with Gaussian logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import classes
from lapwing.core.settings import require_integer
from lapwing.predictives.links import bridge, logit_draws, pairwise, probit
from lapwing.predictives.mixture import ClassMixture, label_log_prob

TOGETHER = 32  # classes up to which the predictives of a mixture are computed at once


@dataclass(frozen=True, eq=False)
class SoftmaxPredictive:
    """Predictive of a class with Gaussian logits.

    ``entropy`` is that of ``probs``. ``epistemic`` is the mutual information of label and logits, ``aleatoric`` the
    expected entropy; both come from quasi-random draws of the logits whatever the link is.

    Args:
        belief: The Gaussian belief about the logits (B, C).
        link: "pairwise", "probit", "bridge" or "mc".
        samples: The number of draws.
        seed: The seed of the draws.

    >>> p = SoftmaxPredictive(FunctionGaussian(torch.zeros(1, 2), torch.eye(2)[None]))
    >>> p.probs
    tensor([[0.5000, 0.5000]])
    """

    belief: FunctionGaussian
    link: str = "pairwise"
    samples: int = 128
    seed: int = 0

    @cached_property
    def log_probs(self) -> Tensor:
        """Log-probabilities of the classes, (B, C); finite where the probability itself rounds to zero."""
        return LINKS[self.link](self)

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities of the classes, (B, C)."""
        return self.log_probs.exp()

    @cached_property
    def logit_samples(self) -> Tensor:
        """Draws of the logits up to a common shift, (S, B, C): Sobol points, so equal seeds give equal draws."""
        return logit_draws(self.belief, self.samples, self.seed)

    @cached_property
    def sampled_probs(self) -> Tensor:
        """The mean of the softmax over the draws, (B, C)."""
        return self.logit_samples.softmax(-1).mean(0)

    @staticmethod
    def mixed(components: tuple[SoftmaxPredictive, ...], weights: Tensor) -> ClassMixture:
        """Return the mixture of predictives of the same inputs."""
        return ClassMixture(tuple(_stacked(components)), weights)

    @property
    def mean(self) -> Tensor:
        """The same as ``probs``."""
        return self.probs

    @property
    def distribution(self) -> CategoricalDistribution:
        """The class of each input as a ``torch.distributions`` object."""
        return CategoricalDistribution(probs=self.probs, validate_args=False)

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
        return _entropy(self.probs)

    @cached_property
    def aleatoric(self) -> Tensor:
        """The expected entropy given the logits in nats, (B,): doubt that more data would not remove."""
        return _entropy(self.logit_samples.softmax(-1)).mean(0)

    @cached_property
    def mutual_information(self) -> Tensor:
        """The mutual information of label and logits in nats, (B,): doubt that more data would remove."""
        return (_entropy(self.sampled_probs) - self.aleatoric).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        """The same as ``mutual_information``."""
        return self.mutual_information


LINKS: dict[str, Callable[[SoftmaxPredictive], Tensor]] = {
    "pairwise": lambda p: pairwise(p.belief),
    "probit": lambda p: probit(p.belief),
    "bridge": lambda p: bridge(p.belief),
    "mc": lambda p: torch.logsumexp(p.logit_samples.log_softmax(-1), 0) - math.log(p.samples),
}


def _stacked(components: Sequence[SoftmaxPredictive]) -> Iterator[SoftmaxPredictive]:
    """Yield the predictives with a leading dimension: all at once where their covariances are small."""
    outputs = components[0].belief.mean.shape[-1]
    step = len(components) if outputs <= TOGETHER else 1
    for start in range(0, len(components), step):
        group = components[start : start + step]
        yield replace(group[0], belief=FunctionGaussian.stacked([component.belief for component in group]))


def _entropy(p: Tensor) -> Tensor:
    """Return the entropy of class probabilities (..., C) in nats."""
    return torch.special.entr(p).sum(-1)
