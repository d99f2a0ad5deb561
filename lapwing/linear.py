"""Bayesian linear regression on given features: a matrix, or an operator with millions of rows or columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import check_finite
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import generator_or_default
from lapwing.core.settings import is_real, require_integer
from lapwing.core.trace import NOT_CONVERGED, Step, Trace
from lapwing.errors import DataError, NumericalError, UnsupportedError
from lapwing.linalg.cg import Solution, block_conjugate_gradients
from lapwing.linalg.design import (
    Design,
    MatrixDesign,
    OperatorDesign,
    back_product,
    forward_product,
    gram_product,
    refuse_unpaired,
)
from lapwing.linalg.ridge import Ridge, deflating
from lapwing.predictives.normal import NormalPredictive

WIDE = (torch.float32, torch.float64)


def fit(
    features: Tensor | OperatorDesign,
    targets: Tensor,
    *,
    precision: float | None = None,
    noise_std: float | None = None,
    num_samples: int = 16,
    tolerance: float = 1e-3,
    generator: torch.Generator | None = None,
) -> LinearPosterior:
    """y = X w + noise with w ~ N(0, I / precision): the posterior, by products with X alone.

    ``features`` (n, P), or an ``OperatorDesign`` with its products. What is None is learned by expectation
    maximisation: precision = γ/|w|², noise variance = SSE/(n - γ), with γ from the samples. One Krylov basis serves
    every precision and noise.

    >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double()
    >>> found = fit(x, x.sum(1), precision=1.0, noise_std=0.1)
    >>> [round(float(w), 2) for w in found.mean]
    [1.0, 1.0, 1.0]
    """
    design = _design(features)
    y = _checked(design, targets)
    _refuse_settings(precision, noise_std, num_samples, tolerance, generator)
    if isinstance(design, OperatorDesign):
        refuse_unpaired(design)
    generator = generator_or_default(generator)
    ridge = Ridge.drawn(design, num_samples, generator, keep=True)
    phi = noise_std**2 if noise_std else float(y.square().mean()) or 1.0
    # Where αφ is the trace of XᵀX/n, as ε estimates it, an eigenvalue is above it: γ is a half or more in any units.
    alpha = precision or float(ridge.back.square().sum(1).mean()) / (design.rows * phi) or 1.0
    start = LinearPosterior(ridge, y, alpha, phi, tolerance)
    if precision is not None and noise_std is not None:
        return start
    return start.tuned(precision is None, noise_std is None)


def _design(features: Tensor | OperatorDesign) -> Design:
    """Products in float32 or float64 and without gradients; a matrix in half precision becomes float32."""
    if isinstance(features, Tensor):
        x = _features(features.detach())
        return MatrixDesign(x if x.dtype in WIDE else x.float())
    if not isinstance(features, OperatorDesign):
        raise DataError(f"features are a {type(features).__name__}; expected a tensor or an OperatorDesign.")
    if features.like.dtype not in WIDE:
        raise DataError(
            f"the functions of an OperatorDesign take {features.like.dtype}; expected float32 or float64. Compute in "
            "one of them, and give a like=... of it."
        )
    return replace(features, forward=_detached(features.forward), back=_detached(features.back))


def _detached(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(v: Tensor) -> Tensor:
        image = function(v)
        if not isinstance(image, Tensor) or image.is_complex():
            seen = image.dtype if isinstance(image, Tensor) else f"a {type(image).__name__}"
            raise DataError(f"a function of an OperatorDesign gave {seen}; expected a tensor of real numbers.")
        return image.detach()

    return apply


def _features(x: Tensor, columns: int | None = None) -> Tensor:
    """Rows of finite numbers, of so many columns where that is known."""
    if not isinstance(x, Tensor):
        raise DataError(f"features are a {type(x).__name__}; expected a tensor (rows, {columns or 'columns'}).")
    if x.ndim != 2 or x.numel() == 0 or x.shape[1] != (columns or x.shape[1]):
        raise DataError(f"features have the shape {tuple(x.shape)}; expected (rows, {columns or 'columns'}).")
    if not x.dtype.is_floating_point:
        raise DataError(f"features are {x.dtype}; expected floating-point numbers.")
    check_finite(x.detach(), "features")
    return x


def _refuse_settings(precision: Any, noise_std: Any, num_samples: Any, tolerance: Any, generator: Any) -> None:
    for name, value in (("precision", precision), ("noise_std", noise_std)):
        if value is not None and not (is_real(value) and 0 < value < math.inf):
            raise DataError(f"{name} is {value!r:.80}; expected a positive number, or None to learn it.")
    require_integer("num_samples", num_samples)
    if not (is_real(tolerance) and 0 < tolerance < 1):
        raise DataError(f"tolerance is {tolerance!r:.80}; expected a relative residual between 0 and 1.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise DataError(f"generator is {generator!r:.80}; expected a torch.Generator, or None.")


def _checked(design: Design, targets: Tensor) -> Tensor:
    if not isinstance(targets, Tensor):
        raise DataError(f"targets are a {type(targets).__name__}; expected a tensor ({design.rows},).")
    if targets.is_complex():
        raise DataError(f"targets are {targets.dtype}; expected real numbers.")
    y = targets.detach().reshape(-1).double().to(design.like.device)
    if len(y) != design.rows or targets.shape[:1] != (design.rows,):
        raise DataError(
            f"{design.rows} rows of features and targets {tuple(targets.shape)}; expected ({design.rows},)."
        )
    if not bool(torch.isfinite(y).all()):
        raise DataError("targets hold NaN or infinity; expected finite numbers.")
    return y


@dataclass(frozen=True, eq=False)
class LinearPosterior:
    """w ~ N(mean, Λ⁻¹) with Λ = XᵀX/φ + α, known by its mean and samples."""

    ridge: Ridge
    y: Tensor
    precision: float  # α
    noise_variance: float  # φ
    tolerance: float = 1e-3
    trace: Trace | None = None

    @property
    def design(self) -> Design:
        return self.ridge.design

    @cached_property
    def mean(self) -> Tensor:
        """(P,): the solution of (XᵀX + αφ) w = Xᵀ y."""
        shift = self.precision * self.noise_variance
        rhs = back_product(self.design, self.y[None])
        found = block_conjugate_gradients(
            lambda v: gram_product(self.design, v) + shift * v,
            rhs,
            root=deflating(self.ridge.reaching(shift, self.tolerance), shift),
            tolerance=max(min(self.tolerance, 1e-8), 30 * torch.finfo(self.design.like.dtype).eps),
            truncated=True,
        )
        return found.settled("linear.fit", f"Raise the precision{self.ridge.wider}.").x[0]

    @cached_property
    def solution(self) -> Solution:
        """Samples around the mean (K, P), with the residual of each."""
        return self.ridge.samples(self.precision, self.noise_variance, self.tolerance)

    def samples(self, n: int | None = None) -> Tensor:
        """(n, P) weights; the first of those stored."""
        count = len(self.solution.x)
        if n is not None:
            require_integer("n", n, least=0)
        if n is not None and n > count:
            raise UnsupportedError(f"{n} samples were asked for and {count} are stored; raise num_samples.")
        return self.mean + self.solution.x[:n]

    @cached_property
    def _moved(self) -> Tensor:
        """X z / √φ for every sample, (K, n)."""
        return forward_product(self.design, self.solution.x) / math.sqrt(self.noise_variance)

    @cached_property
    def _undecided(self) -> float:
        """n - γ as the mean of |ε - X z / √φ|²: as unbiased as γ, and above nought where γ nears n."""
        assert self.ridge.eps is not None
        return float((self.ridge.eps - self._moved).square().sum(1).mean())

    @cached_property
    def gamma(self) -> tuple[float, float]:
        """The effective number of parameters and its standard error."""
        each = self._moved.square().sum(1)
        error = float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else math.inf
        return float(each.mean()), error

    @cached_property
    def _squared_error(self) -> float:
        return float((self.y - forward_product(self.design, self.mean[None])[0]).square().sum())

    def log_evidence(self, probes: int = 8, steps: int = 20) -> tuple[float, float]:
        """log p(y), exact but for its log-determinant, and the standard error of that."""
        require_integer("probes", probes, least=2)
        require_integer("steps", steps)
        shift = self.precision * self.noise_variance
        self.ridge.reaching(shift, self.tolerance)  # what a basis has is exact, and it is the same after samples
        logdet = self.ridge.logdet(torch.tensor(shift, dtype=torch.float64, device=self.y.device), probes, steps)
        n, phi = len(self.y), self.noise_variance
        fit = self._squared_error / phi + self.precision * float(self.mean.square().sum())
        return -0.5 * (n * math.log(2 * math.pi * phi) + float(logdet.value) + fit), 0.5 * logdet.error

    def predict(self, features: Tensor) -> NormalPredictive:
        """For rows of features (B, P): mean, and variance from the samples, with the noise."""
        x = _features(features, self.design.size).double().to(self.y.device)
        moved = x @ self.solution.x.mT  # (B, K)
        cov = moved.square().mean(1)[:, None, None]
        belief = FunctionGaussian((x @ self.mean)[:, None], cov)
        return NormalPredictive(belief, torch.full_like(belief.mean, self.noise_variance))

    def tuned(self, precision: bool = True, noise: bool = True, max_steps: int = 200) -> LinearPosterior:
        """Expectation maximisation over the precision, the noise, or both; the noise of the samples stays the same."""
        current, steps = self, list[Step]()
        least = 1e-13 * float(self.y.square().mean())  # a noise below that of rounding
        for _ in range(max_steps):
            try:
                gamma, error = current.gamma
            except NumericalError as failed:
                if not steps:
                    raise
                raise _without_optimum(current.precision, current.noise_variance, steps[-1]) from failed
            squares = float(current.mean.square().sum())
            alpha = current.precision if not precision else gamma / squares if squares > 0 else math.inf
            phi = current._squared_error / current._undecided if noise else current.noise_variance
            steps.append(Step(gamma, (current.precision,), (current.noise_variance,), gamma, error))
            good = math.isfinite(alpha) and math.isfinite(phi) and alpha > 0 and gamma > 1e-6 * precision
            if not good or not phi > least * noise:
                raise _without_optimum(alpha, phi, steps[-1])
            moved = max(abs(math.log(alpha / current.precision)), abs(math.log(phi / current.noise_variance)))
            current = replace(current, precision=alpha, noise_variance=phi)
            if moved < 1e-4:
                break
        if moved > NOT_CONVERGED and max_steps > 1:
            raise _without_optimum(current.precision, current.noise_variance, steps[-1])
        gamma, error = current.gamma
        finding = f"gamma {gamma:.4g} ± {error:.2g}"
        finding += "" if moved < 1e-4 else f"; a logarithm still moved by {moved:.2g} at the last step"
        return replace(current, trace=Trace("linear.fit", "gamma", tuple(steps), (finding,)))


def _without_optimum(alpha: float, phi: float, last: Step) -> NumericalError:
    return NumericalError(
        f"linear.fit: precision {alpha:.3g} and noise variance {phi:.3g} after {last}; expected an optimum. Features "
        "that say nothing about the targets have none, nor have targets without noise. Give precision=... or "
        "noise_std=...."
    )
