"""Labels: one class out of C, binary labels, one or many; with the predictives of Gaussian logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.errors import DataError, ModelError, UnsupportedError
from lapwing.likelihoods.base import LogitLikelihood, OutputHessian, losses_agree, match_targets, refuse_other_loss
from lapwing.predictives.base import Predictive, check_distributions, is_soft
from lapwing.predictives.labels import (
    BINARY_LINKS,
    LINKS,
    BinaryPredictive,
    SoftmaxPredictive,
    SoftmaxSamples,
    log_softmax,
    softmax,
)
from lapwing.runtime.settings import (
    FINITE,
    FLAG,
    INTEGER,
    NONE,
    NOT_NEGATIVE,
    NUMBER,
    Rule,
    integer,
    is_integer,
    is_real,
    one_of,
    setting,
)
from lapwing.runtime.states import MEMBERS, SMALLEST, Admitted, Array, Either, Later, ListOf, Maybe, Real, Whole, saved
from lapwing.runtime.threads import classes, uniform
from lapwing.values.gaussian import FunctionGaussian, FunctionSamples

OFFSET = Later(Either(Real(), ListOf(Real(), 1), ListOf(Real(), "C")))  # of logits, in files
CLASS_WEIGHTS = Maybe(ListOf(Real(0), "C"))  # in files
AVERAGED = ("pairwise", "mc")  # links that stand for the average softmax; the others were chosen for their formula

SMOOTHING = Rule("a number from 0, below 1", lambda v: is_real(v) and 0 <= v < 1, DataError)

CLASS_DIM = Rule(
    "-1: classes are the last dimension of outputs (B, T, C). Wrap a model that returns (B, C, T) in a module whose "
    "forward returns model(x).transpose(1, 2)",
    lambda v: v is None or (is_integer(v) and v == -1),
)


def check_offset(likelihood: LogitLikelihood, count: int) -> None:
    """Raise unless the offset of the logits has one number, or one for each of ``count`` outputs."""
    size = 1 if likelihood.link_offset is None else torch.as_tensor(likelihood.link_offset).numel()
    if size not in (1, count):
        raise DataError(f"{type(likelihood).__name__}: {size} offsets for {count} outputs; expected one for each.")


def refuse_unused(likelihood: str, neutral: float = 1, /, **settings: object) -> None:
    """Raise if one of these settings differs from its neutral value: the predictive does not depend on it."""
    for name, value in settings.items():
        if value is not None and bool((torch.as_tensor(value) != neutral).any()):
            raise UnsupportedError(
                f"{name} of {likelihood} is {value}; expected none, since the predictive log-likelihood, on which "
                f"FMGP() and VaLLA() with alpha above 0 learn, is not tempered, smoothed or weighted. Use "
                f"VaLLA(alpha=0), or no {name}."
            )


def divide_by_root(slope: Tensor, weight: Tensor) -> Tensor:
    """Return the slope of a weighted loss divided by the root of its weight; zero where the weight is."""
    return torch.where(weight > 0, slope * weight.clamp_min(torch.finfo(weight.dtype).tiny).rsqrt(), 0.0)


@saved
@dataclass(frozen=True, eq=False)
class Categorical(LogitLikelihood):
    """Classification into C classes: a softmax over logits and the cross-entropy loss.

    Targets are class numbers (B, [T]), or probabilities of the classes (B, [T,] C) in floating point.

    Args:
        class_weights: Weight of each class (C,), as in ``nn.CrossEntropyLoss``, if the network was trained with it.
            The loss and the curvature have it. Predictions are corrected for it: they are those for data in which
            every datum counts once, p(c) divided by the weight of c and normalised. A weight of zero corrects nothing.
        ignore_index: Target of data that do not count, as in ``nn.CrossEntropyLoss``.
        link: How Gaussian logits become probabilities: "pairwise" (closed form, from the variances of differences of
            logits), "probit" (closed form, from the variances alone), "bridge" (Laplace bridge to a Dirichlet) or
            "mc" (the mean of ``samples`` softmax draws).
        samples: Quasi-random draws of logits for "mc", and for ``aleatoric`` and ``epistemic`` of the predictive.
        seed: Seed of these draws.
        temperature: Divides the curvature. Other than one it gives a tempered posterior, which has no normaliser.
        link_temperature: Divides the logits in predictions, their standard deviations too, as temperature scaling
            does. The posterior does not depend on it.
        link_offset: Added to the logits of predictions after that division, one number for each class (C,): a class
            with a higher number is more probable everywhere. The posterior does not depend on it. ``fit`` learns it
            with validation data.
        shift: Whether output t predicts target t + 1, as in causal language models whose labels are their input
            tokens. The last output then has no target.
        class_dim: -1 states that the classes are the last dimension of outputs (B, T, C). It is needed only where T
            and C are equal, so that the shape does not show it.
        label_smoothing: As in ``nn.CrossEntropyLoss``: the share of every target that is spread evenly over all
            classes. It changes the loss and the evidence; without class weights the curvature does not depend on it.

    Raises:
        DataError: The link is unknown, the temperature not positive, a class weight negative, or ``label_smoothing``
            not below 1.
        UnsupportedError: ``class_dim`` is not the last dimension.

    >>> likelihood = Categorical(link="bridge")
    >>> likelihood.loss(torch.zeros(1, 2), torch.tensor([1]))
    tensor([0.6931])
    """

    class_weights: Tensor | tuple[float, ...] | None = setting(None, NOT_NEGATIVE | NONE, stored=CLASS_WEIGHTS)
    ignore_index: int = setting(-100, INTEGER)
    link: str = setting("pairwise", one_of(LINKS, DataError))
    samples: int = setting(128, integer(), stored=Whole(1, MEMBERS))
    seed: int = setting(0, integer(0))
    temperature: float | Tensor = setting(1.0, NUMBER, stored=Array((), SMALLEST), stored_as="dispersion")
    link_temperature: float = setting(1.0, NUMBER)
    link_offset: Tensor | tuple[float, ...] | None = setting(None, FINITE | NONE, stored=OFFSET)
    shift: bool = setting(False, FLAG)
    class_dim: int | None = setting(None, CLASS_DIM)
    label_smoothing: float = setting(0.0, SMOOTHING, stored=Later(Admitted(SMOOTHING)))
    ignores_common_shift: ClassVar[bool] = True

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        count = f.shape[-1]
        if count == 1:
            raise DataError("Categorical: the network has one output; expected two or more. Use Bernoulli().")
        if self.class_weights is not None and len(self.class_weights) != count:
            raise DataError(f"Categorical: {len(self.class_weights)} class weights for {count} classes.")
        check_offset(self, count)
        if is_soft(y, f):
            if self.shift:
                raise DataError("Categorical(shift=True): targets are probabilities; expected tokens (B, T).")
            return check_distributions(y.to(f.dtype))
        if y.shape == (*f.shape[:-1], 1):
            y = y.squeeze(-1)
        if y.shape != f.shape[:-1] or y.is_floating_point() or y.is_complex():
            raise DataError(
                f"Categorical: targets have the shape {tuple(y.shape)} and dtype {y.dtype}, outputs "
                f"{tuple(f.shape)}; expected whole class numbers of shape {tuple(f.shape[:-1])}, or "
                f"probabilities in floating point of shape {tuple(f.shape)}. Use y.argmax(-1) for one-hot targets, or "
                "Bernoulli() for several labels at once"
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
        if not self.shift:
            return y
        if y.ndim != 2:
            raise DataError(f"Categorical(shift=True): targets {tuple(y.shape)}; expected tokens (B, T).")
        return torch.cat([y[:, 1:], torch.full_like(y[:, :1], self.ignore_index)], 1)

    def check_outputs(self, f: Tensor) -> None:
        """Raise if the outputs are probabilities, which as logits would be near uniform, or do not show the classes."""
        if self.shift and f.ndim != 3:
            raise ModelError(
                f"Categorical(shift=True): outputs have the shape {tuple(f.shape)}; expected tokens (B, T, C), of "
                "which each predicts the next target. Leave out shift."
            )
        if f.ndim == 3 and f.shape[1] == f.shape[2] and self.class_dim is None:
            raise ModelError(
                f"Categorical: outputs have the shape {tuple(f.shape)}, which may be (B, T, C) or (B, C, T); expected "
                "classes last. Say so with Categorical(class_dim=-1), or wrap a model that returns (B, C, T) in a "
                "module whose forward returns model(x).transpose(1, 2)."
            )
        if bool((f >= 0).all()) and bool(((f.double().sum(-1) - 1).abs() < 1e-3).all()):
            raise ModelError(
                "Categorical: all outputs are at least zero and sum to one for each input, as probabilities do; "
                "expected logits. Leave the softmax out of the model: model[:-1] of a Sequential that ends in one."
            )

    def ignored(self, y: Tensor) -> Tensor:
        return torch.zeros_like(y, dtype=torch.bool) if y.is_floating_point() else y == self.ignore_index

    def known_log_prob(self, predictive: Predictive, y: Tensor) -> Tensor:
        if y.is_floating_point():  # probabilities, all of which count
            return super().known_log_prob(predictive, y)
        ignored = self.ignored(y)
        return predictive.log_prob(y.masked_fill(ignored, 0)).masked_fill(ignored, 0)

    def check_prediction(self) -> None:
        if self.link == "mc":
            raise UnsupportedError(
                "link is 'mc': a predictive made of draws has no gradient to learn by; use "
                "link='pairwise', 'probit' or 'bridge'."
            )
        refuse_unused("Categorical", class_weights=self.class_weights, temperature=self.temperature)
        refuse_unused("Categorical", 0, label_smoothing=self.label_smoothing)

    def _weight(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Return the weight of every datum, Σ_c w_c t_c for a target t, or None if all are one."""
        if self.class_weights is None:
            return self.ignored(y).logical_not_().to(f.dtype) if self._ignores(y) else None
        table = torch.as_tensor(self.class_weights, dtype=f.dtype, device=f.device)
        ignored = self.ignored(y)
        weight = y.to(f.dtype) @ table if y.is_floating_point() else table[y.masked_fill(ignored, 0)]
        if self.label_smoothing:
            weight = torch.lerp(weight, table.mean().expand_as(weight), self.label_smoothing)
        return weight if y.is_floating_point() else weight.masked_fill(ignored, 0)

    def _ignores(self, y: Tensor) -> bool:
        """Return whether some target is ignored; always true for classes on a GPU, where asking would wait for it."""
        if y.is_floating_point() or y.is_cuda:
            return not y.is_floating_point()
        low = int(y.min())
        return (low < 0 or self.ignore_index >= 0) and bool(self.ignored(y).any())

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy -Σ_c w_c t_c log p_c, with t the target after label smoothing."""
        log_p = log_softmax(f)
        if self.class_weights is not None:
            log_p = log_p * torch.as_tensor(self.class_weights, dtype=f.dtype, device=f.device)
        ignores = self._ignores(y)
        if y.is_floating_point():
            nll = -(y.to(f.dtype) * log_p).sum(-1)
        else:
            safe = y.masked_fill(self.ignored(y), 0) if ignores else y
            nll = -log_p.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
        if self.label_smoothing:
            nll = torch.lerp(nll, -log_p.mean(-1), self.label_smoothing)
        return nll.masked_fill(self.ignored(y), 0) if ignores else nll

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        r"""Return R = diag(√p) Q (B, [T,] C, C - 1) with Q orthonormal and orthogonal to √p.

        Q is a Householder reflection that takes √p to the last axis, without its last column: closed form,
        no jitter, and R Rᵀ = diag(p) - p pᵀ to rounding.
        """
        return self.root_columns(f, y, slice(None))

    def root_columns(self, f: Tensor, y: Tensor, columns: slice) -> Tensor:
        first, last, _ = columns.indices(f.shape[-1] - 1)
        root_p = (0.5 * log_softmax(f)).exp()
        v = root_p.clone()
        v[..., -1] += 1
        scaled = v / (1 + root_p[..., -1:])  # 2 / vᵀv = 1 / (1 + √p_last)
        q = -v.unsqueeze(-1) * scaled[..., first:last].unsqueeze(-2)
        q[..., first:last, :].diagonal(dim1=-2, dim2=-1).add_(1)
        root = root_p.unsqueeze(-1) * q
        weight = self._weight(f, y)
        return root if weight is None else root * weight.sqrt()[..., None, None]

    def hessian(self, f: Tensor, y: Tensor) -> OutputHessian:
        p = softmax(f.double())
        top = p.argmax(-1, keepdim=True)
        others = p.scatter(-1, top, 0.0).sum(-1, keepdim=True)  # 1 - p of the largest, where nothing cancels
        diagonal = (1 - p).mul_(p).scatter_(-1, top, p.gather(-1, top) * others)
        weight = self._weight(f, y)
        if weight is None:
            return OutputHessian(diagonal, p)
        weight = weight.double().unsqueeze(-1)
        return OutputHessian(diagonal * weight, p * weight.sqrt())

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        p = softmax(f)
        gradient = p - F.one_hot(classes(p, generator), p.shape[-1])
        weight = self._weight(f, y)
        return gradient if weight is None else gradient * weight.sqrt().unsqueeze(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        slope, weight = super().gradient(f, y), None if self.class_weights is None else self._weight(f, y)
        return slope if weight is None else divide_by_root(slope, weight.unsqueeze(-1))

    def check_loss(self, f: Tensor, y: Tensor, own: Tensor) -> None:
        remedy = ""
        if f.ndim == 3 and not self.shift and losses_agree(replace(self, shift=True)._mean_loss(f, y), own):
            remedy = "Its output t predicts label t + 1, as in causal language models: use Categorical(shift=True). "
        refuse_other_loss("Categorical", self._mean_loss(f, y), own, remedy)

    def _mean_loss(self, f: Tensor, y: Tensor) -> Tensor:
        y = self.targets(f, y)
        return replace(self, class_weights=None, label_smoothing=0.0).loss(f, y).sum() / self.count(f, y)

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        return (y != self.ignore_index).sum() if self._ignores(y) else f[..., 0].numel()

    def predict(self, belief: FunctionGaussian) -> SoftmaxPredictive:
        return SoftmaxPredictive(self.link_input(belief.marginal), self.link, self.samples, self.seed)

    def predict_samples(self, samples: FunctionSamples) -> SoftmaxSamples:
        return SoftmaxSamples((self.link_input(samples),))

    @property
    def loss_weights(self) -> Tensor | tuple[float, ...] | None:
        return self.class_weights

    @property
    def prefers_samples(self) -> bool:
        return self.link in AVERAGED


LABEL_WEIGHTS = Maybe(Either(Real(0), ListOf(Real(0), 1), ListOf(Real(0), "C")))  # of positive labels, in files


@saved
@dataclass(frozen=True, eq=False)
class Bernoulli(LogitLikelihood):
    """Binary or multilabel classification: independent sigmoids and the binary cross-entropy loss.

    Targets are 0, 1 or a probability between them.

    Args:
        pos_weight: Weight of positive labels, one or (C,), as in ``nn.BCEWithLogitsLoss``, if the network was trained
            with it. The loss and the curvature have it. Predictions are corrected for it: they are those for data in
            which every label counts once, with the odds divided by the weight. Zero corrects nothing.
        ignore_index: Value of labels that do not count; None if all do.
        link: How Gaussian logits become probabilities: "quadrature" (to about 1e-9 for logits with a standard
            deviation of up to 30) or "probit" (closed form).
        temperature: Divides the curvature. Other than one it gives a tempered posterior, which has no normaliser.
        link_temperature: Divides the logits in predictions, their standard deviations too, as temperature scaling
            does. The posterior does not depend on it.
        link_offset: Added to the logits of predictions after that division, one number or (C,): a label with a higher
            number is more probable everywhere. The posterior does not depend on it. ``fit`` learns it with validation
            data.

    Raises:
        DataError: The link is unknown, the temperature not positive, or ``pos_weight`` negative.

    >>> Bernoulli().loss(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([0.6931])
    """

    pos_weight: float | tuple[float, ...] | Tensor | None = setting(None, NOT_NEGATIVE | NONE, stored=LABEL_WEIGHTS)
    ignore_index: int | None = setting(None, INTEGER | NONE)
    link: str = setting("quadrature", one_of(BINARY_LINKS, DataError))
    temperature: float | Tensor = setting(1.0, NUMBER, stored=Array((), SMALLEST), stored_as="dispersion")
    link_temperature: float = setting(1.0, NUMBER)
    link_offset: float | tuple[float, ...] | Tensor | None = setting(None, FINITE | NONE, stored=OFFSET)

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        y = match_targets(f, y, "Bernoulli")
        known = ~self.ignored(y)
        count = 1 if self.pos_weight is None else torch.as_tensor(self.pos_weight).numel()
        if count not in (1, f.shape[-1]):
            raise DataError(f"Bernoulli: {count} positive weights for {f.shape[-1]} outputs; expected one for each.")
        check_offset(self, f.shape[-1])
        if bool(((y < 0) | (y > 1))[known].any()):
            raise DataError(
                f"Bernoulli: targets run from {y[known].min().item():g} to {y[known].max().item():g}; expected 0..1."
            )
        return y

    def check_loss(self, f: Tensor, y: Tensor, own: Tensor) -> None:
        y = self.targets(f, y)
        loss = replace(self, pos_weight=None).loss(f, y).sum() / (~self.ignored(y)).sum()
        refuse_other_loss("Bernoulli", loss, own)

    def ignored(self, y: Tensor) -> Tensor:
        return torch.zeros_like(y, dtype=torch.bool) if self.ignore_index is None else y == self.ignore_index

    def known_log_prob(self, predictive: Any, y: Tensor) -> Tensor:
        return predictive.known_log_prob(y, ~self.ignored(y))

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

    def hessian(self, f: Tensor, y: Tensor) -> OutputHessian:
        wide = f.double()
        return OutputHessian(wide.sigmoid() * (-wide).sigmoid() * self._weight(y))

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        p = f.sigmoid()
        drawn = uniform(tuple(p.shape), generator, p) < p
        return (p - drawn.to(p)) * self._weight(y).sqrt()

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return divide_by_root(super().gradient(f, y), self._weight(y).to(f))

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        return y[..., 0].numel() if self.ignore_index is None else (~self.ignored(y)).any(-1).sum()

    def predict(self, belief: FunctionGaussian) -> BinaryPredictive:
        return BinaryPredictive(self.link_input(belief.marginal), self.link)

    @property
    def loss_weights(self) -> float | tuple[float, ...] | Tensor | None:
        return self.pos_weight
