"""Numbers: regression with Gaussian noise, the same for all inputs or given by the network, and counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.errors import DataError
from lapwing.likelihoods.base import Likelihood, OutputHessian, leave_out, match_targets, refuse_other_loss
from lapwing.predictives.numbers import CountPredictive, NormalPredictive, StudentPredictive
from lapwing.runtime.settings import FLAG, NONE, NUMBER, NUMBERS, Rule, is_real, of_class, setting
from lapwing.runtime.states import ABOVE_ZERO, SMALLEST, Array, Either, ListOf, Maybe, Real, saved
from lapwing.runtime.threads import poisson, sequential_normal
from lapwing.values.gaussian import FunctionGaussian, FunctionSamples

TENSOR_OR_NONE = of_class("a tensor, or None", Tensor | None, DataError)  # a search sets values
NOISE = Maybe(Either(ABOVE_ZERO, ListOf(ABOVE_ZERO, "C")))  # in files
DEGREES = Rule(
    "an even number from 4, or infinity",
    lambda v: is_real(v) and (v == math.inf or (v >= 4 and v % 2 == 0)),
    DataError,
)


@saved
@dataclass(frozen=True, eq=False)
class Gaussian(Likelihood):
    """Regression with Gaussian noise, y = f(x) + noise, and the squared loss.

    Args:
        noise_std: Standard deviation of the noise: a number, or one for each output (sequence or tensor). None
            estimates it from the residuals.
        per_output: Estimate one noise for each output. Noise that differs between outputs changes the curvature
            itself: ``Full``, ``Kron`` and ``Diagonal`` keep one curvature for each output and learn each noise (C times
            the memory). For other methods the residuals fix the ratios, and only their common scale is learned.
        degrees: Degrees of freedom of Student tails, an even number from 4; infinity, the default, is the normal
            distribution. Tails change predictions, not the posterior's curvature.
        tail_scale: Factor of the standard deviation that goes with Student tails.
        phi: The common noise variance. Fitting sets it.
        ratios: Noise variance of each output over ``phi``, (C,). Fitting sets it.

    Raises:
        DataError: ``noise_std`` is not positive and finite, or has more than one dimension; ``degrees`` or
            ``tail_scale`` is out of range.

    Cost: ``per_output=True`` takes one more forward pass over the data before the fit.

    >>> Gaussian(noise_std=0.5).dispersion.item()
    0.25
    """

    noise_std: float | tuple[float, ...] | Tensor | None = setting(None, NUMBERS | NONE, stored=NOISE)
    per_output: bool = setting(False, FLAG)
    degrees: float = setting(math.inf, DEGREES, stored=Maybe(Real(4), math.inf))
    tail_scale: float = setting(1.0, NUMBER)
    phi: Tensor | None = setting(None, TENSOR_OR_NONE, stored=Array((), SMALLEST), stored_as="dispersion")
    ratios: Tensor | None = setting(None, TENSOR_OR_NONE, stored=Maybe(Array(("C",), SMALLEST)))
    has_tails: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_std is None:
            return
        std = torch.as_tensor(self.noise_std, dtype=torch.float64)
        if self.phi is None:
            object.__setattr__(self, "phi", std.square() if std.ndim == 0 else torch.tensor(1.0, dtype=torch.float64))
        if self.ratios is None and std.ndim == 1:
            object.__setattr__(self, "ratios", std.square())

    @property
    def dispersion(self) -> Tensor:
        return torch.tensor(1.0, dtype=torch.float64) if self.phi is None else self.phi

    @property
    def learns_dispersion(self) -> bool:
        return self.noise_std is None

    @property
    def noise_variance(self) -> Tensor:
        return self.dispersion if self.ratios is None else self.dispersion * self.ratios.to(self.dispersion)

    def with_dispersion(self, phi: Tensor) -> Gaussian:
        return replace(self, phi=phi)

    @property
    def learns_ratios(self) -> bool:
        return self.per_output and self.learns_dispersion and self.ratios is not None

    def with_noise(self, noise: Tensor) -> Gaussian:
        if noise.ndim == 0:
            return self.with_dispersion(noise)
        return replace(self, phi=torch.ones_like(noise[0]), ratios=noise)

    @property
    def needs_residuals(self) -> bool:
        return self.per_output and self.ratios is None

    def prepared(self, mean_squared_residual: Tensor) -> Gaussian:
        floor = 1e-12 * mean_squared_residual.max().clamp_min(1e-30)
        return replace(self, ratios=mean_squared_residual.clamp_min(floor))

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        if self.ratios is not None and len(self.ratios) != f.shape[-1]:
            raise DataError(f"{len(self.ratios)} noise values for {f.shape[-1]} outputs; expected one for each.")
        return match_targets(f, y, "Gaussian")

    def check_loss(self, f: Tensor, y: Tensor, own: Tensor) -> None:
        refuse_other_loss("Gaussian", (f - self.targets(f, y)).square().mean(), own)

    def check_outputs(self, f: Tensor) -> None:
        (NUMBER | NONE).check("phi", self.phi)
        (NUMBERS | NONE).check("ratios", self.ratios)

    def _scale(self, f: Tensor) -> Tensor:
        return f.new_ones(f.shape[-1]) if self.ratios is None else self.ratios.to(f).rsqrt()

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return 0.5 * ((f - y) * self._scale(f)).square().sum(-1)

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.diag(self._scale(f)).expand(*f.shape, f.shape[-1])

    def hessian(self, f: Tensor, y: Tensor) -> OutputHessian:
        return OutputHessian(self._scale(f.double()).square().expand(f.shape))

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        return sequential_normal(tuple(f.shape), generator, f) * self._scale(f)

    def log_normaliser(self, phi: Tensor, outputs: int) -> Tensor:
        extra = 0.0 if self.ratios is None else 0.5 * self.ratios.to(phi).log().sum()
        return 0.5 * outputs * torch.log(2 * math.pi * phi) + extra

    def power_energy(self, alpha: float, mean: Tensor, cov: Tensor, y: Tensor) -> Tensor:
        noise = self.noise_variance.to(mean).expand(mean.shape[-1])
        factor = torch.linalg.cholesky(torch.diag(noise) + alpha * cov)
        gap = torch.linalg.solve_triangular(factor, (y - mean).unsqueeze(-1), upper=False).squeeze(-1)
        growth = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - noise.log().sum()
        constant = noise.log().sum() + mean.shape[-1] * math.log(2 * math.pi)
        return -0.5 * (gap.square().sum(-1) + growth / alpha + constant)

    def with_tails(self, degrees: float, scale: float) -> Gaussian:
        return replace(self, degrees=degrees, tail_scale=scale)

    @property
    def widening(self) -> float:
        """The variance of y over that of normal noise and a Gaussian belief; other than one with Student tails."""
        return self.tail_scale**2 * (1.0 if self.degrees == math.inf else self.degrees / (self.degrees - 2))

    def predict(self, belief: FunctionGaussian) -> NormalPredictive | StudentPredictive:
        return self._with_noise(belief.marginal, self.noise_variance.to(belief.mean).expand(belief.mean.shape))

    def _with_noise(self, belief: FunctionGaussian, noise: Tensor) -> NormalPredictive | StudentPredictive:
        """Return the predictive distribution of y with these noise variances, in the shape of the mean."""
        if self.degrees == math.inf:
            return NormalPredictive(belief.widened(self.widening), self.widening * noise)
        return StudentPredictive(belief, noise, self.degrees, self.tail_scale)

    def log_probs(
        self, belief: FunctionGaussian | FunctionSamples, y: Tensor, variants: Sequence[tuple[Likelihood, float]]
    ) -> Tensor:
        """Variants with the same tails are taken together if there is one output: they are many, and each is small."""
        if isinstance(belief, FunctionSamples) or belief.mean.shape[-1] > 1:
            return super().log_probs(belief, y, variants)
        mean, cov = belief.mean.reshape(-1, 1), belief.variance.reshape(-1, 1, 1)
        groups: dict[tuple[float, float], list[int]] = {}
        for number, (other, _) in enumerate(variants):
            groups.setdefault((other.degrees, other.tail_scale), []).append(number)
        out = mean.new_empty(len(mean), len(variants))
        for tails, numbers in groups.items():
            alike = [variants[number] for number in numbers]
            stacked = FunctionGaussian(mean.repeat(len(alike), 1), torch.cat([factor * cov for _, factor in alike]))
            noises = (other.noise_variance for other, _ in alike)
            noise = torch.cat([each.reshape(1) for each in noises if each is not None]).to(mean)
            predictive = self.with_tails(*tails)._with_noise(stacked, noise.repeat_interleave(len(mean)).unsqueeze(1))
            out[:, numbers] = predictive.log_prob(y.reshape(-1, 1).repeat(len(alike), 1)).reshape(len(alike), -1).T
        return out


@saved
@dataclass(frozen=True, eq=False)
class HeteroscedasticGaussian(Likelihood):
    """Regression with noise that depends on the input: outputs f = (m, s) are D means and then D log-variances.

    The Hessian in (m, s) is indefinite, so the curvature is the Fisher matrix, diag(exp(-s), 1/2).

    >>> likelihood = HeteroscedasticGaussian()
    >>> likelihood.loss(torch.zeros(1, 2), torch.zeros(1, 1))  # ½ log 2π
    tensor([0.9189])
    """

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        if f.shape[-1] % 2:
            raise DataError(
                f"HeteroscedasticGaussian: the network has {f.shape[-1]} outputs; expected an even number: "
                "the means first, then as many log-variances."
            )
        return match_targets(f[..., : f.shape[-1] // 2], y, "HeteroscedasticGaussian")

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        each = log_variance + (y - mean).square() * (-log_variance).exp() + math.log(2 * math.pi)
        return 0.5 * each.sum(-1)

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        return torch.diag_embed(torch.cat([(-0.5 * log_variance).exp(), torch.full_like(mean, math.sqrt(0.5))], -1))

    def hessian(self, f: Tensor, y: Tensor) -> OutputHessian:
        mean, log_variance = f.double().chunk(2, -1)
        return OutputHessian(torch.cat([(-log_variance).exp(), torch.full_like(mean, 0.5)], -1))

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        eps = sequential_normal(tuple(mean.shape), generator, f)
        return torch.cat([-eps * (-0.5 * log_variance).exp(), 0.5 * (1 - eps.square())], -1)

    def predict(self, belief: FunctionGaussian) -> NormalPredictive:
        size = belief.mean.shape[-1] // 2
        noise = (belief.mean[..., size:] + 0.5 * belief.variance[..., size:]).exp()  # E exp(s) of a Gaussian s
        means = FunctionGaussian(belief.mean[..., :size], belief.marginal.cov[..., :size, :size])
        return NormalPredictive(means, noise)


@saved
@dataclass(frozen=True, eq=False)
class Poisson(Likelihood):
    """Counts, y ~ Poisson(exp f): the outputs of the network are log-rates.

    Targets are whole numbers from zero. The loss includes log y!, so the evidence is complete.

    >>> Poisson().loss(torch.zeros(1, 1), torch.ones(1, 1))  # exp(f) - y f + log y!
    tensor([1.])
    """

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        y = match_targets(f, y, "Poisson")
        wrong = (y < 0) | (y != y.round())
        if bool(wrong.any()):
            raise DataError(f"Poisson: targets include {y[wrong][0].item():g}; expected whole numbers from 0.")
        return y

    @property
    def refused_last(self) -> dict[str, str]:
        return leave_out("log-rates", "exp", "softplus")

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.exp() - y * f + torch.lgamma(y + 1)).sum(-1)

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.diag_embed((0.5 * f).exp())

    def hessian(self, f: Tensor, y: Tensor) -> OutputHessian:
        return OutputHessian(f.double().exp())

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        rate = f.exp()
        return rate - poisson(rate, generator)

    def predict(self, belief: FunctionGaussian) -> CountPredictive:
        return CountPredictive(belief.marginal)
