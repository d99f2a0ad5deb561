"""From Gaussian logits to class probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import classes
from lapwing.core.settings import require_integer
from lapwing.errors import DataError

LINKS = ("probit", "bridge", "mc")


@dataclass(frozen=True, eq=False)
class SoftmaxPredictive:
    """Class probabilities under a Gaussian belief about the logits.

    ``epistemic`` is the mutual information between the label and the weights, ``aleatoric`` the expected
    entropy; both come from seeded draws of the logits. ``entropy`` is that of ``probs``.
    """

    belief: FunctionGaussian
    link: str = "probit"
    samples: int = 256
    seed: int = 0

    @cached_property
    def log_probs(self) -> Tensor:
        """(B, C), kept in logs so that a confident mistake costs what it should and not infinity."""
        if self.link == "probit":
            return probit(self.belief)
        if self.link == "bridge":
            return bridge(self.belief)
        return torch.logsumexp(self.logit_samples.log_softmax(-1), 0) - math.log(self.samples)

    @cached_property
    def probs(self) -> Tensor:
        """(B, C)"""
        return self.log_probs.exp()

    @cached_property
    def logit_samples(self) -> Tensor:
        """(S, B, C), the same for the same seed."""
        generator = torch.Generator().manual_seed(self.seed)
        return self.belief.sample(self.samples, generator)

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def distribution(self) -> CategoricalDistribution:
        return CategoricalDistribution(probs=self.probs, validate_args=False)

    def log_prob(self, y: Tensor) -> Tensor:
        """(B,)"""
        if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < self.log_probs.shape[-1]:
            raise DataError(
                f"classes run from {int(y.min())} to {int(y.max())}; expected 0..{self.log_probs.shape[-1] - 1}."
            )
        return self.log_probs.gather(-1, y.long().reshape(*self.log_probs.shape[:-1], 1)).squeeze(-1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, B) class numbers."""
        require_integer("n", n)
        return classes(self.probs.expand(n, *self.probs.shape), generator)

    @cached_property
    def entropy(self) -> Tensor:
        return _entropy(self.probs)

    @cached_property
    def aleatoric(self) -> Tensor:
        """The expected entropy, (B,): doubt that stays however much is known about the weights."""
        return _entropy(self.logit_samples.softmax(-1)).mean(0)

    @cached_property
    def mutual_information(self) -> Tensor:
        """(B,), at least zero."""
        p = self.logit_samples.softmax(-1)
        return (_entropy(p.mean(0)) - _entropy(p).mean(0)).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        return self.mutual_information


def probit(belief: FunctionGaussian) -> Tensor:
    """log softmax(m / sqrt(1 + pi/8 var)): needs variances alone."""
    return (belief.mean / torch.sqrt(1 + math.pi / 8 * belief.variance)).log_softmax(-1)


def bridge(belief: FunctionGaussian) -> Tensor:
    """The log mean of the Dirichlet matched to the logits (Hobbhahn et al. 2022).

    Logits are known up to a shift, so mean and covariance are projected to logits that sum to zero first.
    """
    mean, cov = belief.mean - belief.mean.mean(-1, keepdim=True), belief.cov
    count = mean.shape[-1]
    rows = cov.mean(-1)
    spread = cov.diagonal(dim1=-2, dim2=-1) - 2 * rows + rows.mean(-1, keepdim=True)
    floor = 1e3 * torch.finfo(mean.dtype).eps * (1 + cov.diagonal(dim1=-2, dim2=-1))
    none = (spread <= floor).all(-1, keepdim=True)  # no spread, nothing to match: the plain network
    variance = spread.maximum(floor)
    # exp(m_k) Σ_l exp(-m_l) / C²: kept in logs so that confident logits do not overflow
    peak = (mean + torch.logsumexp(-mean, -1, keepdim=True)).clamp_max(80).exp() / count**2
    alpha = (1 - 2 / count + peak) / variance
    return torch.where(none, mean.log_softmax(-1), alpha.log() - alpha.sum(-1, keepdim=True).log())


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)
