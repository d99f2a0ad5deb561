"""Classification into C classes, and the predictive of classes with Gaussian logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, distributions

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import classes
from lapwing.core.settings import require_integer
from lapwing.core.state import State, saved
from lapwing.errors import DataError, ModelError, UnsupportedError
from lapwing.likelihoods.protocol import check_logit_settings, plain_numbers, refuse_unused


@saved
@dataclass(frozen=True, eq=False)
class Categorical:
    """Classification into C classes: a softmax over logits and the cross-entropy loss.

    Args:
        class_weights: Weight of each class (C,), as in ``nn.CrossEntropyLoss``.
        ignore_index: Target of data that do not count, as in ``nn.CrossEntropyLoss``.
        link: How Gaussian logits become probabilities: "probit" (closed form), "bridge" (Laplace bridge to a
            Dirichlet) or "mc" (the mean of ``samples`` softmax draws).
        samples: Draws of logits for "mc", and for ``aleatoric`` and ``epistemic`` of the predictive.
        seed: Seed of these draws.
        temperature: Divides the curvature. Other than one it gives a tempered posterior, which has no normaliser.

    Raises:
        DataError: The link is unknown, the temperature not positive, or a class weight negative.

    >>> likelihood = Categorical(link="bridge")
    >>> likelihood.loss(torch.zeros(1, 2), torch.tensor([1]))
    tensor([0.6931])
    """

    class_weights: Tensor | tuple[float, ...] | None = None
    ignore_index: int = -100
    link: str = "probit"
    samples: int = 256
    seed: int = 0
    temperature: float | Tensor = 1.0
    learns_dispersion: ClassVar[bool] = False
    ignores_common_shift: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_logit_settings(self.link, LINKS, self.temperature, class_weights=self.class_weights)

    @cached_property
    def dispersion(self) -> Tensor:
        return torch.as_tensor(self.temperature, dtype=torch.float64)

    def with_dispersion(self, phi: Tensor) -> Categorical:
        return replace(self, temperature=phi)

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        count = f.shape[-1]
        if count == 1:
            raise DataError("Categorical: the network has one output; expected two or more. Use Bernoulli().")
        if y.shape == (*f.shape[:-1], 1):
            y = y.squeeze(-1)
        if y.shape != f.shape[:-1] or y.is_floating_point() or y.is_complex():
            raise DataError(
                f"Categorical: targets have the shape {tuple(y.shape)} and dtype {y.dtype}, outputs "
                f"{tuple(f.shape)}; expected whole class numbers of shape {tuple(f.shape[:-1])}. "
                "Use y.argmax(-1) for one-hot targets, or Bernoulli() for several labels at once"
                f"{'; classes are the last dimension of outputs (B, T, C)' if f.ndim == 3 else ''}."
            )
        y = y.long()
        low, high = (int(bound) for bound in y.aminmax())
        known = y if low >= 0 and high < count else y[y != self.ignore_index]
        if known.numel() and not (int(known.min()) >= 0 and int(known.max()) < count):
            low, high = int(known.min()), int(known.max())
            raise DataError(
                f"Categorical: targets run from {low} to {high}; expected 0..{count - 1}, or "
                f"ignore_index={self.ignore_index}."
            )
        if self.class_weights is not None and len(self.class_weights) != count:
            raise DataError(f"Categorical: {len(self.class_weights)} class weights for {count} classes.")
        return y

    def check_outputs(self, f: Tensor) -> None:
        """Raise if the outputs are probabilities; taken for logits they would give predictions near uniform."""
        if bool((f >= 0).all()) and bool(((f.double().sum(-1) - 1).abs() < 1e-3).all()):
            raise ModelError(
                "Categorical: all outputs are at least zero and sum to one for each input, as probabilities do; "
                "expected logits. Leave the softmax out of the model: model[:-1] of a Sequential that ends in one."
            )

    def ignored(self, y: Tensor) -> Tensor:
        return y == self.ignore_index

    def check_prediction(self) -> None:
        if self.link == "mc":
            raise UnsupportedError(
                "link is 'mc': a predictive made of draws has no gradient to learn by; use link='probit' or 'bridge'."
            )
        refuse_unused("Categorical", class_weights=self.class_weights, temperature=self.temperature)

    def _weight(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Return the weight of every datum, or None if all are one."""
        if self.class_weights is None and not self._ignores(y):
            return None
        ignored = self.ignored(y)
        table = f.new_ones(f.shape[-1])
        if self.class_weights is not None:
            table = torch.as_tensor(self.class_weights, dtype=f.dtype, device=f.device)
        return table[y.masked_fill(ignored, 0)].masked_fill(ignored, 0)

    def _ignores(self, y: Tensor) -> bool:
        """Return whether some target is ignored; always true on a GPU, where asking would wait for the device."""
        if y.is_cuda:
            return True
        low = int(y.min())
        return (low < 0 or self.ignore_index >= 0) and bool(self.ignored(y).any())

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        weight = self._weight(f, y)
        safe = y if weight is None else y.masked_fill(self.ignored(y), 0)
        nll = -F.log_softmax(f, -1).gather(-1, safe.unsqueeze(-1)).squeeze(-1)
        return nll if weight is None else nll * weight

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        r"""Return R = diag(√p) Q (B, [T,] C, C - 1) with Q orthonormal and orthogonal to √p.

        Q is a Householder reflection that takes √p to the last axis, without its last column: closed form,
        no jitter, and R Rᵀ = diag(p) - p pᵀ to rounding.
        """
        root_p = (0.5 * F.log_softmax(f, -1)).exp()
        v = root_p.clone()
        v[..., -1] += 1
        scaled = v / (1 + root_p[..., -1:])  # 2 / vᵀv = 1 / (1 + √p_last)
        q = -v.unsqueeze(-1) * scaled[..., :-1].unsqueeze(-2)
        q.diagonal(dim1=-2, dim2=-1).add_(1)
        root = root_p.unsqueeze(-1) * q
        weight = self._weight(f, y)
        return root if weight is None else root * weight.sqrt()[..., None, None]

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        p = f.softmax(-1)
        gradient = p - F.one_hot(classes(p, generator), p.shape[-1])
        weight = self._weight(f, y)
        return gradient if weight is None else gradient * weight.sqrt().unsqueeze(-1)

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        return (y != self.ignore_index).sum() if self._ignores(y) else y.numel()

    def log_normaliser(self, phi: Tensor, outputs: int) -> Tensor:
        return torch.zeros_like(phi)

    def predict(self, belief: FunctionGaussian) -> SoftmaxPredictive:
        return SoftmaxPredictive(belief.marginal, self.link, self.samples, self.seed)

    def state(self) -> State:
        """Return settings and tensors for a file."""
        link = {"link": self.link, "samples": self.samples, "seed": self.seed}
        settings = {"class_weights": plain_numbers(self.class_weights), "ignore_index": self.ignore_index, **link}
        return State("Categorical", settings, {"dispersion": self.dispersion.detach()})

    @classmethod
    def from_state(cls, state: State) -> Categorical:
        """Build the likelihood from its state."""
        return cls(**state.settings, temperature=state.tensors["dispersion"])


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
    def distribution(self) -> distributions.Categorical:
        """The class of each input as a ``torch.distributions`` object."""
        return distributions.Categorical(probs=self.probs, validate_args=False)

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
