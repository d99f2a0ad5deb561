"""The predictive of classes with Gaussian logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.memory import runs
from lapwing.predictives.links import bridge, logit_draws, pairwise, probit
from lapwing.predictives.mixture import ClassMixture
from lapwing.predictives.protocol import ClassPredictive

TOGETHER = 32  # classes up to which the predictives of a mixture are computed at once


@dataclass(frozen=True, eq=False, repr=False)
class SoftmaxPredictive(ClassPredictive):
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

    @staticmethod
    def mixed(components: tuple[SoftmaxPredictive, ...], weights: Tensor) -> ClassMixture:
        """Return the mixture of predictives of the same inputs."""
        return ClassMixture(tuple(_stacked(components)), weights)

    @cached_property
    def log_probs(self) -> Tensor:
        return LINKS[self.link](self)

    @cached_property
    def logit_samples(self) -> Tensor:
        """Draws of the logits up to a common shift, (S, B, C): Sobol points, so equal seeds give equal draws."""
        return logit_draws(self.belief, self.samples, self.seed)

    @cached_property
    def integrated_probs(self) -> Tensor:
        """The mean of the softmax over the draws, (B, C)."""
        return self.logit_samples.softmax(-1).mean(0)

    @cached_property
    def aleatoric(self) -> Tensor:
        return self.entropy_of(self.logit_samples.softmax(-1)).mean(0)


LINKS: dict[str, Callable[[SoftmaxPredictive], Tensor]] = {
    "pairwise": lambda p: pairwise(p.belief),
    "probit": lambda p: probit(p.belief),
    "bridge": lambda p: bridge(p.belief),
    "mc": lambda p: torch.logsumexp(p.logit_samples.log_softmax(-1), 0) - math.log(p.samples),
}


def _stacked(components: Sequence[SoftmaxPredictive]) -> Iterator[SoftmaxPredictive]:
    """Yield the predictives with a leading dimension: all at once where their covariances are small."""
    mean = components[0].belief.mean
    each = mean.element_size() * mean.numel() * mean.shape[-1]
    for part in runs(len(components), each, mean.device, most=None if mean.shape[-1] <= TOGETHER else 1):
        group = components[part]
        yield replace(group[0], belief=FunctionGaussian.stacked([component.belief for component in group]))
