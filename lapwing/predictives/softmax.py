"""The predictive of classes with Gaussian logits."""

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


@dataclass(frozen=True, eq=False)
class SoftmaxPredictive:
    """Predictive of a class with Gaussian logits.

    ``entropy`` is that of ``probs``. ``epistemic`` is the mutual information of label and logits, ``aleatoric`` the
    expected entropy; both come from seeded draws of the logits whatever the link is.

    Args:
        belief: The Gaussian belief about the logits (B, C).
        link: "probit", "bridge" or "mc".
        samples: The number of draws.
        seed: The seed of the draws.

    >>> p = SoftmaxPredictive(FunctionGaussian(torch.zeros(1, 2), torch.eye(2)[None]))
    >>> p.probs
    tensor([[0.5000, 0.5000]])
    """

    belief: FunctionGaussian
    link: str = "probit"
    samples: int = 256
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
        """Draws of the logits, (S, B, C); equal seeds give equal draws."""
        generator = torch.Generator().manual_seed(self.seed)
        return self.belief.sample(self.samples, generator)

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
        if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < self.log_probs.shape[-1]:
            raise DataError(
                f"classes run from {int(y.min())} to {int(y.max())}; expected 0..{self.log_probs.shape[-1] - 1}."
            )
        return self.log_probs.gather(-1, y.long().reshape(*self.log_probs.shape[:-1], 1)).squeeze(-1)

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
        p = self.logit_samples.softmax(-1)
        return (_entropy(p.mean(0)) - _entropy(p).mean(0)).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        """The same as ``mutual_information``."""
        return self.mutual_information


def probit(predictive: SoftmaxPredictive) -> Tensor:
    """Return log softmax(m / sqrt(1 + π/8 var)), (B, C). It needs variances only."""
    belief = predictive.belief
    return (belief.mean / torch.sqrt(1 + math.pi / 8 * belief.variance)).log_softmax(-1)


def bridge(predictive: SoftmaxPredictive) -> Tensor:
    """Return the log mean (B, C) of the Dirichlet distribution matched to the logits (Hobbhahn et al. 2022).

    Logits are defined up to a common shift, so mean and covariance are first projected to logits that sum to zero.
    """
    belief = predictive.belief
    mean, cov = belief.mean - belief.mean.mean(-1, keepdim=True), belief.cov
    count = mean.shape[-1]
    rows = cov.mean(-1)
    spread = cov.diagonal(dim1=-2, dim2=-1) - 2 * rows + rows.mean(-1, keepdim=True)
    floor = 1e3 * torch.finfo(mean.dtype).eps * (1 + cov.diagonal(dim1=-2, dim2=-1))
    none = (spread <= floor).all(-1, keepdim=True)  # without variance there is nothing to match
    variance = spread.maximum(floor)
    # exp(m_k) Σ_l exp(-m_l) / C², in logs so that confident logits do not overflow
    peak = (mean + torch.logsumexp(-mean, -1, keepdim=True)).clamp_max(80).exp() / count**2
    alpha = (1 - 2 / count + peak) / variance
    return torch.where(none, mean.log_softmax(-1), alpha.log() - alpha.sum(-1, keepdim=True).log())


def mc(predictive: SoftmaxPredictive) -> Tensor:
    """Return the log of the mean of softmax draws, (B, C)."""
    return torch.logsumexp(predictive.logit_samples.log_softmax(-1), 0) - math.log(predictive.samples)


LINKS = {"probit": probit, "bridge": bridge, "mc": mc}


def _entropy(p: Tensor) -> Tensor:
    """Return the entropy of class probabilities (..., C) in nats."""
    return torch.special.entr(p).sum(-1)
