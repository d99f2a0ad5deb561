"""Bayesian linear regression on given features: a matrix, or an operator with millions of rows or columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import NumericalError, UnsupportedError
from lapwing.linalg.krylov import block_conjugate_gradients
from lapwing.linalg.operators import Design, OperatorDesign, Solution, back_product, forward_product, gram_product
from lapwing.linalg.ridge import Frame, Regression, Ridge, check_settings, relative_variances
from lapwing.posteriors.base import NOT_CONVERGED, Step, Trace
from lapwing.predictives.numbers import NormalPredictive
from lapwing.runtime.settings import FLAG, GENERATOR, integer, refuse_other_calls
from lapwing.runtime.threads import generator_or_default
from lapwing.values.gaussian import FunctionGaussian

__all__ = ["LinearPosterior", "OperatorDesign", "fit"]

CONVERGED = 1e-4  # change of a log precision or log noise variance at which learning stops


def fit(
    features: Tensor | OperatorDesign,
    targets: Tensor,
    *,
    precision: float | None = None,
    noise_std: float | None = None,
    prior: Tensor | OperatorDesign | None = None,
    noise: Tensor | None = None,
    num_samples: int = 16,
    tolerance: float = 1e-3,
    generator: torch.Generator | None = None,
) -> LinearPosterior:
    """Fit y_i = X_i w + noise with w ~ N(0, (α A)⁻¹) and noise ~ N(0, φ B_i), through products with X alone.

    A precision α or noise variance φ that is not given is learned by expectation maximisation: α = γ/wᵀAw and
    φ = SSE/(n - γ), with γ, the effective number of parameters, estimated from the samples. One Krylov basis serves
    every precision and noise. No (P, P) and no (n, n) matrix is formed.

    Args:
        features: X (n, P), or (n, C, P) for C targets of each datum; or an ``OperatorDesign`` with n, or n C, rows.
        targets: The targets, (n,), (n, 1) or (n, C). With features (n, P), C outputs share them: weights are (C, P).
        precision: The prior precision α of the weights; None to learn it.
        noise_std: The standard deviation √φ of the noise; None to learn it.
        prior: The known matrix A of the prior precision α A: its diagonal (P,), the matrix (P, P), or an
            ``OperatorDesign`` S (P, q) with S Sᵀ = A⁻¹; None for the identity. Outputs with shared features have one A.
        noise: The known relative noise: variances B_i (n,) or (n, C), or covariances (n, C, C); None for the identity.
        num_samples: The number K of posterior samples.
        tolerance: The relative residual that every sample must reach. The mean is solved to 1e-8.
        generator: The source of the samples' noise; None for a generator with seed 0.

    Returns:
        The posterior of the weights. Mean and samples are computed when they are first used.

    Raises:
        DataError: Features or targets are not finite real numbers, or their shapes do not match; a prior or noise is
            not symmetric and positive definite; a setting is invalid.
        NumericalError: The two functions of an ``OperatorDesign`` are not transposes of each other, or change between
            calls; the precision or the noise has no optimum; a solve does not reach its tolerance.
        UnsupportedError: ``num_samples`` is not a positive integer.

    >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double()
    >>> posterior = fit(x, x.sum(1), precision=1.0, noise_std=0.1)
    >>> [round(float(w), 2) for w in posterior.mean]
    [1.0, 1.0, 1.0]
    """
    check_settings(precision, noise_std, num_samples, tolerance)
    GENERATOR.check("generator", generator)
    white = Regression.build(features, targets, prior, noise)
    ridge, y = Ridge.draw(white.design, num_samples, generator_or_default(generator), keep=True), white.y
    phi = noise_std**2 if noise_std else float(y.square().mean()) or 1.0
    # αφ starts at the trace of XᵀX/n, estimated with ε. Some eigenvalue of XᵀX is above it, so γ ≥ 1/2 in all units.
    alpha = precision or float(ridge.back.square().sum(1).mean()) / (len(y) * phi) or 1.0
    start = LinearPosterior(ridge, y, alpha, phi, tolerance, frame=white.frame)
    if precision is not None and noise_std is not None:
        return start
    return start.tuned(precision is None, noise_std is None)


@dataclass(frozen=True, eq=False)
class LinearPosterior:
    """The posterior w ~ N(mean, Λ⁻¹), Λ = Σ X_iᵀ B_i⁻¹ X_i / φ + α A, known by its mean and samples.

    ``lw.linear.fit`` makes one. It computes in coordinates where A and B_i are the identity.

    Args:
        ridge: The features in those coordinates, with the noise of the samples.
        y: The targets in those coordinates, (n C,).
        precision: The prior precision α.
        noise_variance: The variance φ of the noise.
        tolerance: The relative residual that every sample must reach.
        trace: The steps of learning; None if precision and noise were given.
        frame: How those coordinates relate to weights, features and targets.

    >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double()
    >>> posterior = fit(x, x.sum(1), precision=1.0, noise_std=0.1)
    >>> posterior.samples(4).shape, posterior.predict(x[:5]).mean.shape
    (torch.Size([4, 3]), torch.Size([5, 1]))
    """

    ridge: Ridge
    y: Tensor
    precision: float
    noise_variance: float
    tolerance: float = 1e-3
    trace: Trace | None = None
    frame: Frame = Frame()

    @property
    def design(self) -> Design:
        """The features X (n C, size) in coordinates where A and B_i are the identity."""
        return self.ridge.design

    @cached_property
    def mean(self) -> Tensor:
        """The posterior mean (P,), or (C, P) for outputs with shared features."""
        return self.frame.weights(self._white_mean[None])[0]

    @cached_property
    def _white_mean(self) -> Tensor:
        """The solution of (XᵀX + αφ) u = Xᵀ y."""
        shift = self.precision * self.noise_variance
        rhs = back_product(self.design, self.y[None])
        solution = block_conjugate_gradients(
            lambda v: gram_product(self.design, v) + shift * v,
            rhs,
            root=self.ridge.basis_reaching(shift, self.tolerance).inverse_root(shift),
            tolerance=max(min(self.tolerance, 1e-8), 30 * torch.finfo(self.design.like.dtype).eps),
            truncated=True,
        )
        advice = f"Raise the precision{self.ridge.float64_hint}."
        return solution.require_convergence("linear.fit", advice).x[0]

    @cached_property
    def solution(self) -> Solution:
        """The samples minus the mean where A is the identity, (K, size), with the residual of each."""
        return self.ridge.samples(self.precision, self.noise_variance, self.tolerance)

    def samples(self, n: int | None = None) -> Tensor:
        """Return posterior samples of the weights.

        Args:
            n: How many of the K stored samples, in their order; None for all.

        Returns:
            Weights (n, P), or (n, C, P) for outputs with shared features.

        Raises:
            UnsupportedError: More samples are asked for than are stored.
            NumericalError: A sample does not reach the tolerance.
        """
        if n is not None:
            integer(0).check("n", n)
            count = len(self.solution.x)
            if n > count:
                raise UnsupportedError(
                    f"{n} samples were asked for and {count} are stored; expected at most as many. Raise num_samples."
                )
        return self.mean + self._deviations[:n]

    @cached_property
    def gamma(self) -> tuple[float, float]:
        """The effective number of parameters γ and its standard error over the samples."""
        each = self._scaled_outputs.square().sum(1)
        error = float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else math.inf
        return float(each.mean()), error

    @cached_property
    def _scaled_outputs(self) -> Tensor:
        """X z / √φ (K, n) for every sample z around the mean."""
        return forward_product(self.design, self.solution.x) / math.sqrt(self.noise_variance)

    @cached_property
    def _residual_degrees(self) -> float:
        """n - γ as the mean of |ε - X z / √φ|²: unbiased like γ, and positive where γ is close to n."""
        assert self.ridge.eps is not None
        return float((self.ridge.eps - self._scaled_outputs).square().sum(1).mean())

    @cached_property
    def _squared_error(self) -> float:
        """Σ (y_i - X_i w)ᵀ B_i⁻¹ (y_i - X_i w) at the mean."""
        return float((self.y - forward_product(self.design, self._white_mean[None])[0]).square().sum())

    def log_evidence(self, probes: int = 8, steps: int = 20) -> tuple[float, float]:
        """Estimate log p(y). All of it is exact but the log-determinant log det(I + XᵀX/αφ).

        Args:
            probes: Random vectors for the part of the log-determinant that the Krylov basis does not contain.
            steps: Lanczos steps for each of them.

        Returns:
            The log evidence and its standard error.

        Raises:
            UnsupportedError: ``probes`` is less than 2 or ``steps`` less than 1, or they are not integers.
        """
        integer(2).check("probes", probes)
        integer().check("steps", steps)
        shift = self.precision * self.noise_variance
        self.ridge.basis_reaching(shift, self.tolerance)  # so that the answer is the same before and after samples
        logdet = self.ridge.logdet(torch.tensor(shift, dtype=torch.float64, device=self.y.device), probes, steps)
        n, phi = len(self.y), self.noise_variance
        fit = self._squared_error / phi + self.precision * float(self._white_mean.square().sum())
        known = n * math.log(2 * math.pi * phi) + self.frame.noise_logdet
        return -0.5 * (known + float(logdet.value) + fit), 0.5 * logdet.error

    def functions(self, features: Tensor) -> FunctionGaussian:
        """Return the Gaussian belief about X w, without noise: ``predict`` has the shapes and errors.

        The mean is (B, C); the covariance (B, C, C) is estimated from the samples.
        """
        x = self.frame.check_features(features, self.mean.shape[-1]).double().to(self.y.device)
        outputs = self.frame.functions(x, self._deviations)  # (B, C, K)
        mean = self.frame.functions(x, self.mean[None])[..., 0]
        return FunctionGaussian(mean, outputs @ outputs.mT / outputs.shape[-1])

    @cached_property
    def _deviations(self) -> Tensor:
        """The samples of the weights minus their mean, (K, P) or (K, C, P)."""
        return self.frame.weights(self.solution.x)

    def predict(self, features: Tensor, noise: Tensor | None = None) -> NormalPredictive:
        """Return the predictive distribution of targets, with the noise.

        Args:
            features: Rows (B, P), or (B, C, P) if each of C outputs has its own features.
            noise: Relative noise variances of these rows, (B,) or (B, C), which φ multiplies; None for one.

        Returns:
            A normal distribution (B, C) whose epistemic variance is estimated from the samples.

        Raises:
            DataError: The features are not finite floating-point numbers of that shape, or the noise is not positive.
        """
        belief = self.functions(features)
        relative = torch.ones_like(belief.mean) if noise is None else relative_variances(noise, belief.mean)
        return NormalPredictive(belief, self.noise_variance * relative)

    def tuned(self, precision: bool = True, noise: bool = True, max_steps: int = 200) -> LinearPosterior:
        """Learn the precision, the noise, or both by expectation maximisation, from the same noise of the samples.

        Args:
            precision: Whether to learn the precision.
            noise: Whether to learn the noise variance.
            max_steps: The largest number of steps.

        Returns:
            The posterior at the optimum, with a trace of the steps.

        Raises:
            NumericalError: There is no optimum, or ``max_steps`` are far from enough.
        """
        FLAG.check("precision", precision)
        FLAG.check("noise", noise)
        integer().check("max_steps", max_steps)
        current, steps = self, list[Step]()
        least = 1e-13 * float(self.y.square().mean())  # a smaller noise variance is rounding
        for _ in range(max_steps):
            try:
                gamma, error = current.gamma
            except NumericalError as failed:
                if not steps:
                    raise
                raise _no_optimum(current.precision, current.noise_variance, steps[-1]) from failed
            squares = float(current._white_mean.square().sum())
            alpha = current.precision if not precision else gamma / squares if squares > 0 else math.inf
            phi = current._squared_error / current._residual_degrees if noise else current.noise_variance
            steps.append(Step(gamma, (current.precision,), (current.noise_variance,), gamma, error))
            good = math.isfinite(alpha) and math.isfinite(phi) and alpha > 0 and gamma > 1e-6 * precision
            if not good or not phi > least * noise:
                raise _no_optimum(alpha, phi, steps[-1])
            change = max(abs(math.log(alpha / current.precision)), abs(math.log(phi / current.noise_variance)))
            current = replace(current, precision=alpha, noise_variance=phi)
            if change < CONVERGED:
                break
        if change > NOT_CONVERGED and max_steps > 1:
            raise _no_optimum(current.precision, current.noise_variance, steps[-1])
        gamma, error = current.gamma
        finding = f"gamma {gamma:.4g} ± {error:.2g}"
        finding += "" if change < CONVERGED else f"; the last step still changed a logarithm by {change:.2g}"
        return replace(current, trace=Trace("linear.fit", "gamma", tuple(steps), (finding,)))


def _no_optimum(alpha: float, phi: float, last: Step) -> NumericalError:
    """Return the error for learning that does not converge to an optimum."""
    return NumericalError(
        f"linear.fit: precision {alpha:.3g} and noise variance {phi:.3g} after {last}; expected an optimum. There is "
        "none if the features do not explain the targets or the targets have no noise. Give precision=... or "
        "noise_std=...."
    )


refuse_other_calls(globals())
