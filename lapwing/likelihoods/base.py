"""The contract of likelihoods, their Hessian in the outputs, and what methods that learn by predicting maximise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lapwing.errors import DataError, ModelError, UnsupportedError
from lapwing.predictives.base import Predictive
from lapwing.predictives.views import as_images
from lapwing.runtime.settings import HasSettings
from lapwing.runtime.states import Flag, Later, State, Stored, state_of, values_from
from lapwing.values.gaussian import FunctionGaussian, FunctionSamples

LOSS_WEIGHTS = ("class_weights", "pos_weight")  # settings that weight the loss
Numbers = float | tuple[float, ...] | Tensor  # one for all outputs, or one for each
S = TypeVar("S", bound="LogitLikelihood")
B = TypeVar("B", FunctionGaussian, FunctionSamples)


def _takes_images(predict: Callable[..., Predictive]) -> Callable[..., Predictive]:
    """Return the method ``predict(self, belief)`` of a likelihood, made to take beliefs about images too."""

    @wraps(predict)
    def predict_images(self: Likelihood, belief: FunctionGaussian) -> Predictive:
        if belief.form is None:
            return predict(self, belief)
        return as_images(predict(self, belief.pixels), belief.form)

    return predict_images


class Likelihood(HasSettings, Stored):
    """A distribution of targets given outputs f (B, [T,] C); every token counts as a datum.

    Classes inherit from it. They define ``targets``, ``loss``, ``root``, ``sampled_gradient`` and ``predict``; every
    other member has a default, that of a likelihood without a dispersion and without the capability. Their ``predict``
    gets beliefs with the outputs of a datum last; one about images (B, C, H, W) is brought into this form before.
    """

    has_logits: ClassVar[bool] = False  # whether outputs are logits: around zero and of order one, whatever the targets
    ignores_common_shift: ClassVar[bool] = False  # whether one number added to all outputs of an input changes nothing
    has_tails: ClassVar[bool] = False  # whether predictions may have heavier tails than the normal distribution
    link_temperature: float | None = None  # by which predictions divide the logits; None without logits
    ratios: Tensor | None = None  # noise variance of each output over the dispersion, (C,); None if all have the same
    degrees: float = math.inf  # of freedom of the tails; infinity for those of the normal distribution
    tail_scale: float = 1.0  # of Student tails, as a multiple of the standard deviation of the noise

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "predict" in vars(cls):  # here, so that no class can forget it
            cls.predict = _takes_images(cls.predict)  # type: ignore[method-assign]

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the targets in the shape and dtype that the other methods take; raise if they do not fit ``f``."""
        raise NotImplementedError

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the loss of every datum at unit dispersion, (B, [T]); zero for ignored data."""
        raise NotImplementedError

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        """Return R (B, [T,] C, K) with R Rᵀ the Hessian of the loss in f, or the Fisher matrix if it is indefinite."""
        raise NotImplementedError

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the gradient of the loss in f at a label drawn from the model, (B, [T,] C)."""
        raise NotImplementedError

    def hessian(self, f: Tensor, y: Tensor) -> OutputHessian:
        """Return the Hessian of the loss of every datum, in float64; zero for ignored data.

        For a Hessian in f that is diagonal, or diagonal less an outer product: fits then need no root of it. It equals
        ``root`` times its transpose. All likelihoods of the package have one.
        """
        raise NotImplementedError

    @property
    def has_hessian(self) -> bool:
        """Whether the class defines ``hessian``."""
        return type(self).hessian is not Likelihood.hessian

    def root_columns(self, f: Tensor, y: Tensor, columns: slice) -> Tensor:
        """Return ``root(f, y)[..., columns]``, without the other columns if H is diagonal: C of them may not fit."""
        if self.has_hessian and columns != slice(None):
            hessian = self.hessian(f, y)
            if hessian.outer is None:
                return _diagonal_columns(hessian.diagonal.sqrt().to(f), columns)
        return self.root(f, y)[..., columns]

    def power_energy(self, alpha: float, mean: Tensor, cov: Tensor, y: Tensor) -> Tensor:
        """Return (1/α) log E p(y | f)^α for f ~ N(mean, cov) and 0 < α < 1, (B,), differentiable in the covariance."""
        raise NotImplementedError

    @property
    def has_power_energy(self) -> bool:
        """Whether the class defines ``power_energy``."""
        return type(self).power_energy is not Likelihood.power_energy

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the loss in f at the targets themselves, (B, [T,] C), for the empirical Fisher.

        If the loss has a weight, it is that of the plain loss times the root of the weight, as in ``root``.
        """
        with torch.inference_mode(False), torch.enable_grad():
            leaf = f.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.loss(leaf, y).sum(), leaf)
        return slope

    def predict(self, belief: FunctionGaussian) -> Predictive:
        """Return the predictive distribution of y, for each input by itself."""
        raise NotImplementedError

    def predict_samples(self, samples: FunctionSamples) -> Predictive:
        """Return the predictive distribution of y from drawn functions; by default from their mean and covariance."""
        return self.predict(samples.gaussian)

    @property
    def prefers_samples(self) -> bool:
        """Whether, with many outputs, predictions are better made from drawn functions than from all variances."""
        return False

    @property
    def dispersion(self) -> Tensor:
        """phi: the noise variance or the temperature, a scalar."""
        return torch.tensor(1.0, dtype=torch.float64)

    @property
    def learns_dispersion(self) -> bool:
        """Whether fitting may set the dispersion."""
        return False

    def with_dispersion(self, phi: Tensor) -> Likelihood:
        """Return the likelihood with another dispersion."""
        if float(phi) != 1:
            raise DataError(f"dispersion {float(phi):g}; {type(self).__name__} has no dispersion to change.")
        return self

    def log_normaliser(self, phi: Tensor, outputs: int) -> Tensor:
        """Return c(phi) of one datum."""
        return torch.zeros_like(phi)

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        """Return the number of data without the ignored ones; a tensor if the answer is on a device."""
        return f[..., 0].numel()

    def check_loss(self, f: Tensor, y: Tensor, own: Tensor) -> None:
        """Raise ``ModelError`` if the mean loss differs from ``own``, the one that the model itself returns for y."""
        return

    def ignored(self, y: Tensor) -> Tensor:
        """Return a mask in the shape of ``y``, true for targets that are marked as unknown and do not count."""
        return torch.zeros_like(y, dtype=torch.bool)

    def predict_widened(self, belief: FunctionGaussian | FunctionSamples, factor: float) -> Predictive:
        """Return the predictive distribution of y from a belief, or functions, with its covariance times ``factor``."""
        if isinstance(belief, FunctionSamples):
            return self.predict_samples(belief.widened(factor))
        return self.predict(belief.widened(factor))

    def log_probs(
        self, belief: FunctionGaussian | FunctionSamples, y: Tensor, variants: Sequence[tuple[Likelihood, float]]
    ) -> Tensor:
        """Return log p(y) under variants of this likelihood, each with a factor of the covariance: (data, variants)."""
        each = (self.known_log_prob(other.predict_widened(belief, factor), y) for other, factor in variants)
        return torch.stack([log_prob.flatten() for log_prob in each], 1)

    def known_log_prob(self, predictive: Predictive, y: Tensor) -> Tensor:
        """Return the log-probability of the targets that count, (B, [T]); it is zero where none does."""
        return predictive.log_prob(y)

    def check_outputs(self, f: Tensor) -> None:
        """Raise ``ModelError`` if these are not the outputs that the likelihood takes."""
        return

    @property
    def refused_last(self) -> Mapping[str, str]:
        """Last operations of a network, such as "sigmoid", that show outputs of another kind, and what to do."""
        return {}

    def check_last(self, last: str) -> None:
        """Raise ``ModelError`` if the last operation of the network shows outputs of another kind."""
        if last in self.refused_last:
            raise ModelError(f"{type(self).__name__}: the network ends in {last}; {self.refused_last[last]}")

    def check_prediction(self) -> None:
        """Raise ``UnsupportedError`` if a setting has no effect on the predictive, or leaves it without a gradient."""
        return

    def with_link_temperature(self, temperature: float) -> Likelihood:
        """Return the likelihood with another link temperature, if it has one."""
        return self

    @property
    def logit_offset(self) -> Tensor | None:
        """The numbers, () or (C,), that predictions add to the logits after the division; None for none."""
        return None

    def with_more_offset(self, offset: Tensor) -> Likelihood:
        """Return the likelihood with this offset (C,) added to that of its predictions, if it can have one."""
        return self

    @property
    def takes_offset(self) -> bool:
        """Whether predictions can add an offset to the logits."""
        return False

    @property
    def noise_variance(self) -> Tensor | None:
        """The variance, () or (C,), of noise that is added to the outputs; None if targets have other units."""
        return None

    @property
    def learns_ratios(self) -> bool:
        """Whether fitting may set the noise variance of each output by itself."""
        return False

    def with_noise(self, noise: Tensor) -> Likelihood:
        """Return the likelihood with this dispersion, (), or with these noise variances of the outputs, (C,)."""
        return self.with_dispersion(noise)

    @property
    def needs_residuals(self) -> bool:
        """Whether the likelihood must see the residuals before the curvature can be computed."""
        return False

    def prepared(self, mean_squared_residual: Tensor) -> Likelihood:
        """Return the likelihood with all that the curvature depends on, given the residual of each output (C,)."""
        return self

    @property
    def widening(self) -> float:
        """The variance of the targets over that without tails."""
        return 1.0

    def with_tails(self, degrees: float, scale: float) -> Likelihood:
        """Return the likelihood with Student tails, if it can have tails."""
        return self


class LogitLikelihood(Likelihood):
    """A likelihood whose outputs are logits. ``temperature`` divides the curvature, ``link_temperature`` the logits.

    Predictions are made from f / ``link_temperature`` + ``logit_offset``. A class with a field ``link_offset`` takes
    offsets; its ``logit_offset`` is that of the field, less what a weighted loss has added to the logits.
    """

    temperature: float | Tensor
    link_temperature: float
    link_offset: Numbers | None = None
    has_logits: ClassVar[bool] = True

    @property
    def refused_last(self) -> Mapping[str, str]:
        return leave_out("logits", "sigmoid", "hardsigmoid", "softmax")

    @cached_property
    def dispersion(self) -> Tensor:
        return torch.as_tensor(self.temperature, dtype=torch.float64)

    def with_dispersion(self: S, phi: Tensor) -> S:
        return replace(self, temperature=phi)  # type: ignore[type-var]

    def with_link_temperature(self: S, temperature: float) -> S:
        return replace(self, link_temperature=temperature)  # type: ignore[type-var]

    @property
    def loss_weights(self) -> Numbers | None:
        """The weights of the loss that the network was trained with; None if all are one."""
        return None

    @property
    def takes_offset(self) -> bool:
        return "link_offset" in {field.name for field in fields(self)}  # type: ignore[arg-type]

    @property
    def logit_offset(self) -> Tensor | None:
        return offset_of(self.link_offset, self.loss_weights)

    def with_more_offset(self: S, offset: Tensor) -> S:
        own = self.link_offset
        return replace(self, link_offset=offset if own is None else offset + torch.as_tensor(own).to(offset))  # type: ignore[type-var]

    def link_input(self, belief: B) -> B:
        """Return the belief about the logits that predictions are made from: f / ``link_temperature`` + offset."""
        belief, offset = belief.scaled(1 / self.link_temperature), self.logit_offset
        return belief if offset is None else belief.moved(offset)

    def state(self) -> State:
        return state_of(self) if self.loss_weights is None else state_of(self, corrected=True)

    @classmethod
    def from_state(cls: type[S], state: State, owner: object = None) -> S:
        values = values_from(cls, state, corrected=Later(Flag()))
        weights = next((values[name] for name in LOSS_WEIGHTS if values.get(name) is not None), None)
        if not values.pop("corrected", False) and weights is not None:  # a file of 0.2.0, which did not correct
            correction = offset_of(None, weights)
            assert correction is not None
            values["link_offset"] = -correction
        return cls(**values)


def offset_of(link_offset: Numbers | None, weights: Numbers | None) -> Tensor | None:
    """Return the offset of the logits: the one given, less the logarithm of the weights of a weighted loss.

    A network that was trained with weights gives every class w times its odds. A weight of zero says nothing about the
    odds, and is taken for one.
    """
    parts = [] if link_offset is None else [torch.as_tensor(link_offset, dtype=torch.float64)]
    if weights is not None:
        weights = torch.as_tensor(weights, dtype=torch.float64)
        parts.append(-torch.where(weights > 0, weights, 1.0).log())
    return sum(parts[1:], parts[0]) if parts else None


def leave_out(expected: str, *operations: str) -> dict[str, str]:
    """Return the advice to leave these last operations out of the network, for ``Likelihood.refused_last``."""
    advice = f"expected {expected}. Leave it out of the model: model[:-1] of a Sequential that ends in it."
    return dict.fromkeys(operations, advice)


def losses_agree(loss: Tensor, own: Tensor) -> bool:
    """Return whether two mean losses are equal, to half of the digits of the wider rounding."""
    return bool(
        (loss - own).abs() <= max(torch.finfo(t.dtype).eps for t in (loss, own)) ** 0.5 * own.abs().clamp_min(1)
    )


def refuse_other_loss(likelihood: str, loss: Tensor, own: Tensor, remedy: str = "") -> None:
    """Raise unless the mean loss is the one that the model itself returns; ``remedy`` is the first advice."""
    if not losses_agree(loss, own):
        raise ModelError(
            f"{likelihood}: the model, given these targets as labels, returns the loss {own.item():.5g}, and the "
            f"likelihood has {loss.item():.5g}; expected the same. {remedy}If the model was trained with other "
            "labels or another loss than its own, give batches as (inputs, targets), or wrap it to return its logits."
        )


def match_targets(f: Tensor, y: Tensor, name: str) -> Tensor:
    """Return targets with one number per output, (B, [T,] C); a single output may come without its dimension."""
    if y.shape == f.shape:
        return y.to(f.dtype)
    if f.shape[-1] == 1 and y.shape == f.shape[:-1]:
        return y.unsqueeze(-1).to(f.dtype)
    raise DataError(
        f"{name}: targets have the shape {tuple(y.shape)} and outputs {tuple(f.shape)}; expected the same shape"
        + (f" or {tuple(f.shape[:-1])}" if f.shape[-1] == 1 else "")
        + ". Reshape the targets, or choose the likelihood that fits the output."
    )


def expand_weights(weights: Tensor, like: Tensor) -> Tensor:
    """Return the weights of samples (B,) in a shape that multiplies ``like`` (B, ...), and in its dtype."""
    return weights.to(like).reshape(-1, *[1] * (like.ndim - 1))


def weighted_loss(likelihood: Likelihood, f: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    """Return the loss of every datum at unit dispersion times its weight, (B, [T])."""
    loss = likelihood.loss(f, y)
    return loss if weights is None else loss * expand_weights(weights, loss)


def weighted_count(likelihood: Likelihood, f: Tensor, y: Tensor, weights: Tensor | None) -> int | Tensor:
    """Return the number of data without the ignored ones, each as often as its weight says.

    A token or pixel has the weight of its sample. One with several labels counts if one of them is known.
    """
    if weights is None:
        return likelihood.count(f, y)
    known = ~likelihood.ignored(y)
    known = known.any(-1) if y.ndim == f.ndim else known
    return known.reshape(len(known), -1).sum(1).to(weights) @ weights


def weighted_hessian(hessian: OutputHessian, weights: Tensor | None) -> OutputHessian:
    """Return the Hessian of the loss in the outputs times the weight of its sample."""
    if weights is None:
        return hessian
    diagonal = hessian.diagonal * expand_weights(weights, hessian.diagonal)
    return OutputHessian(
        diagonal, None if hessian.outer is None else hessian.outer * expand_weights(weights.sqrt(), diagonal)
    )


def weighted_seeds(seeds: Tensor, weights: Tensor | None) -> Tensor:
    """Return seeds (K, B, [T,] C), columns of roots of the curvature, times the root of the weight of their sample."""
    return seeds if weights is None else seeds * expand_weights(weights.sqrt(), seeds[0])


def as_count(value: float | Tensor) -> int | float:
    """Return a sum of weights as a number, a whole one as an integer."""
    number = float(value)
    return int(number) if number.is_integer() else number


@dataclass(frozen=True, eq=False)
class OutputHessian:
    """H of every datum in its outputs f: ``diagonal`` on the diagonal and -outer outerᵀ off it.

    The diagonal is stored as it is, not as the difference that it would be: p (1 - p) has all its digits where p is
    nearly one. Without ``outer`` H is diagonal. Memory: at most two numbers for each output, where a root has C.

    >>> p = torch.tensor([[0.5, 0.25, 0.25]])
    >>> OutputHessian(p * (1 - p), p).dense()[0]
    tensor([[ 0.2500, -0.1250, -0.1250],
            [-0.1250,  0.1875, -0.0625],
            [-0.1250, -0.0625,  0.1875]])
    """

    diagonal: Tensor  # (B, [T,] C)
    outer: Tensor | None = None  # (B, [T,] C)

    def for_output(self, output: int) -> OutputHessian:
        """Return it with the entry of one output alone, for a diagonal H."""
        assert self.outer is None, "outputs of a loss that couples them have no Hessian of their own"
        kept = torch.zeros_like(self.diagonal)
        kept[..., output] = self.diagonal[..., output]
        return OutputHessian(kept)

    def dense(self) -> Tensor:
        """Return H as a matrix, (B, [T,] C, C). For tests and small C."""
        if self.outer is None:
            return torch.diag_embed(self.diagonal)
        matrix = -self.outer.unsqueeze(-1) * self.outer.unsqueeze(-2)
        matrix.diagonal(dim1=-2, dim2=-1).copy_(self.diagonal)
        return matrix


def _diagonal_columns(values: Tensor, columns: slice) -> Tensor:
    """Return some columns of the diagonal matrices with these values (..., C), without the others."""
    first, last, _ = columns.indices(values.shape[-1])
    matrix = values.new_zeros(*values.shape, last - first)
    matrix[..., first:last, :].diagonal(dim1=-2, dim2=-1).copy_(values[..., first:last])
    return matrix


def refuse_energy(likelihood: Likelihood, alpha: float) -> None:
    """Raise unless ``energy`` is defined for this likelihood and alpha."""
    if not 0 <= alpha <= 1:
        raise UnsupportedError(f"alpha is {alpha}; expected a number between 0 and 1.")
    if 0 < alpha < 1 and not likelihood.has_power_energy:
        raise UnsupportedError(
            f"alpha is {alpha} for {type(likelihood).__name__}; between 0 and 1 only Gaussian() has a closed form. "
            "Use 0 (the evidence bound) or 1 (the predictive log-likelihood)."
        )
    if alpha > 0:
        likelihood.check_prediction()


def refuse_ignored(likelihood: Likelihood, y: Tensor, what: str = "targets") -> None:
    """Raise if a target is ignored: the predictive would take its mark for a known value."""
    if bool(likelihood.ignored(y).any()):
        raise DataError(
            f"some {what} are ignored ones, which have no predictive probability; expected known ones. "
            "Leave those data out."
        )


def energy(likelihood: Likelihood, alpha: float, mean: Tensor, cov: Tensor, y: Tensor) -> Tensor:
    r"""Return $\frac1\alpha \log E\, p(y \mid f)^\alpha$ for f ~ N(mean, cov), (B,), differentiable in the covariance.

    α = 1 is the log of the predictive density as the likelihood itself gives it (its link included). α = 0 is the
    expected log-likelihood with the curvature at the mean: exact for a Gaussian.
    """
    if alpha == 1:
        refuse_ignored(likelihood, y)
        return likelihood.predict(FunctionGaussian(mean, cov)).log_prob(y)
    if alpha == 0:
        phi = likelihood.dispersion.to(mean)
        root = likelihood.root(mean, y)
        spread = (root.mT @ cov @ root).diagonal(dim1=-2, dim2=-1).sum(-1)
        return -(likelihood.loss(mean, y) + 0.5 * spread) / phi - likelihood.log_normaliser(phi, mean.shape[-1])
    return likelihood.power_energy(alpha, mean, cov, y)
