"""The posterior of an image given linear measurements, under the tangent model of a network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.core.memory import budget, gathered, refuse_beyond, runs
from lapwing.core.random import normal_rows
from lapwing.core.settings import GENERATOR, Rule, require_integer
from lapwing.core.trace import Trace
from lapwing.errors import DataError, UnsupportedError
from lapwing.inverse.classes import ClassMatrices, factorised, weighted_sum
from lapwing.inverse.matrix_free import MatrixFreeSolver
from lapwing.inverse.observation import Observation
from lapwing.inverse.problem import InverseProblem
from lapwing.linalg.operators import Solution
from lapwing.linalg.randomised import Eigenpairs
from lapwing.networks.forward import outside_autocast, outside_inference
from lapwing.priors.structured import ClassCovariance
from lapwing.tuners.evidence import Ascend, MaximiseEvidence
from lapwing.tuners.protocol import Tuner, applied

VARIANCE_SAMPLES = 1024  # draws from which variances are estimated where the covariance is too large
COPIES = 3  # float64 matrices of the size of the covariance that exist at once
PAIRS = Rule(
    "a tensor (e, 2) of integers, the flat positions of two entries of the output",
    lambda v: isinstance(v, Tensor) and v.ndim == 2 and v.shape[1] == 2 and v.dtype in (torch.int32, torch.int64),
    DataError,
)


@dataclass(frozen=True, eq=False, repr=False)
class InversePosterior:
    """The belief about an image x̂ + J (θ - w̃) given y = A x + noise. ``lw.inverse.fit`` makes one.

    The mean is the output of the network; the covariance is that of the linear Gaussian model,
    K_xx - K_xy K_yy⁻¹ K_yx with K_xx = J Σ Jᵀ and K_yy = A K_xx Aᵀ + σ² I. Another prior or noise gives a new value and
    costs no Jacobian if the class matrices are stored.

    >>> from lapwing.inverse import fit
    >>> net = torch.nn.Conv1d(1, 1, 3, padding=1)
    >>> posterior = fit(net, torch.randn(1, 1, 8), torch.randn(4), torch.eye(4, 8), prior=1.0, noise_std=0.1)
    >>> posterior.std.shape, posterior.covariance().shape, posterior.samples(5).shape
    (torch.Size([1, 8]), torch.Size([8, 8]), torch.Size([5, 1, 8]))
    """

    problem: InverseProblem
    noise_variance: Tensor
    classes: ClassMatrices | None  # None: solves by conjugate gradients
    learns_noise: bool = False
    seed: int = 0  # of the preconditioner, of probes and of sampled variances
    pairs: Eigenpairs | None = None  # of a nearby posterior, for the preconditioner
    trace: Trace | None = None

    @property
    def prior(self) -> ClassCovariance:
        """The prior over the weights; ``values`` are its hyperparameters."""
        return self.problem.prior

    @property
    def noise_std(self) -> Tensor:
        """The standard deviation σ of the noise, a scalar tensor."""
        return self.noise_variance.sqrt()

    @property
    def solver(self) -> str:
        """ "exact" (class matrices and Cholesky factors) or "cg" (products and conjugate gradients)."""
        return "cg" if self.classes is None else "exact"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image."""
        return self.problem.network.shape

    @property
    def reconstruction(self) -> Tensor:
        """The output of the network, the mean of the belief."""
        return self.problem.network.output.reshape(self.shape)

    # What tuners ask.

    @property
    def noise(self) -> Tensor | None:
        """The noise variance if it is to be learned; None if it was given."""
        return self.noise_variance if self.learns_noise else None

    def with_noise(self, noise: Tensor) -> InversePosterior:
        """Return the posterior with another noise variance."""
        return replace(self, noise_variance=noise, pairs=self._nearby)

    def with_problem(self, problem: InverseProblem) -> InversePosterior:
        """Return the posterior of a problem with other hyperparameters of the prior."""
        return replace(self, problem=problem, pairs=self._nearby)

    def with_prior(self, prior: ClassCovariance) -> InversePosterior:
        """Return the posterior under another bound prior with the same blocks, such as ``posterior.prior`` changed."""
        return self.with_problem(self.problem.with_prior(prior))

    def with_trace(self, trace: Trace) -> InversePosterior:
        """Return the posterior with the record of a tuner."""
        return replace(self, trace=trace)

    @outside_autocast
    @torch.inference_mode(False)
    def tuned(self, tuner: Tuner | None = None) -> InversePosterior:
        """Return the posterior under better hyperparameters; its ``trace`` lists what was tried.

        Args:
            tuner: An object from ``lw.tuners``: ``MaximiseEvidence`` or ``Ascend``, with a hyperprior if you like.
                None learns all hyperparameters, and the noise unless it was given: by ``MaximiseEvidence(noise=True,
                max_steps=200)``, or by ``Ascend()`` where the evidence is an estimate.

        Raises:
            DivergedError: If a hyperparameter has no optimum.
        """
        default = Ascend() if self.classes is None else MaximiseEvidence(noise=True, max_steps=200)
        return replace(applied(default if tuner is None else tuner, self), pairs=None)

    @cached_property
    def _nearby(self) -> Eigenpairs | None:
        """The eigenpairs of the preconditioner, which serve other hyperparameters too."""
        return None if self.classes is not None else self._matrix_free.pairs

    # The covariance of the measurements.

    @cached_property
    def _matrix_free(self) -> MatrixFreeSolver:
        return MatrixFreeSolver.of(self.problem, self.noise_variance, self.seed, self.pairs)

    @cached_property
    def _factor(self) -> Tensor:
        """The Cholesky factor of K_yy, from the class matrices."""
        assert self.classes is not None
        noise = self.noise_variance.detach()
        return factorised(self.classes.covariance(self.prior.coefficients().detach(), noise), noise)

    @outside_autocast
    @outside_inference
    def solve(self, rows: Tensor) -> Solution:
        """Return K_yy⁻¹ u for rows u (K, dy) with their residuals, by a Cholesky factor or by conjugate gradients.

        Raises:
            NumericalError: If conjugate gradients do not reach their tolerance.
        """
        if self.classes is None:
            return self._matrix_free.solve(rows)
        rhs = rows.to(self._factor)
        x = torch.cholesky_solve(rhs.mT, self._factor).mT
        gaps = (rhs - (x @ self._factor) @ self._factor.mT).norm(dim=1) / rhs.norm(dim=1).clamp_min(1e-300)
        return Solution(x, gaps, 1, 1e-6)

    @outside_autocast
    @outside_inference
    def log_evidence(self) -> Tensor:
        """Return the log marginal likelihood of the tangent model, with every constant, a scalar tensor.

        -½ [|y - A f|²/σ² + (θ - mean)ᵀ Σ⁻¹ (θ - mean) + log det K_yy + dy log 2π]. For a linear model at its optimum it
        equals log N(y; A h(mean), K_yy). Differentiable in the prior's values and the noise. Without class matrices the
        log-determinant is an estimate; ``evidence_error`` is its part of the standard error.
        """
        problem, noise = self.problem, self.noise_variance
        if self.classes is not None:
            logdet = self.classes.logdet(self.prior.coefficients(), noise)
        else:
            logdet = self._matrix_free.logdet()
        misfit = problem.residual.square().sum() / noise + self.prior.penalty(problem.theta)
        return -0.5 * (misfit + logdet + problem.observation.rows * math.log(2 * math.pi))

    @property
    def evidence_error(self) -> float:
        """The standard error of ``log_evidence``; zero where it is computed and not estimated."""
        return 0.0 if self.classes is not None else 0.5 * self._matrix_free.logdet_error

    # The image.

    @cached_property
    def _image_covariance(self) -> Tensor:
        """K_xx = J Σ Jᵀ (dx, dx) in float64."""
        if self.classes is not None and self.classes.image is not None:
            return weighted_sum(self.classes.image, self.prior.coefficients().detach())
        size = self.problem.network.size
        with torch.no_grad():
            return self.prior.gram(self.problem.rows(Observation(None, size, size), "rows of J")).double()

    @cached_property
    def _explained(self) -> Tensor:
        """W (dy, dx) with Wᵀ W = K_xy K_yy⁻¹ K_yx."""
        observation = self.problem.observation
        cross = observation.forward(self._image_covariance)  # (dx, dy)
        if self.classes is not None:
            factor = self._factor
        else:
            noise = self.noise_variance.detach()
            kernel = observation.forward(cross.mT)
            kernel = 0.5 * (kernel + kernel.mT)
            kernel = kernel.clone() if observation.operator is None else kernel
            kernel.diagonal().add_(noise)
            factor = factorised(kernel, noise)
        return torch.linalg.solve_triangular(factor, cross.mT, upper=False)

    @property
    def _fits(self) -> bool:
        """Whether the covariance of the image fits the byte budget."""
        size = self.problem.network.size
        return COPIES * 8 * size**2 <= budget(self.problem.network.device)

    @outside_autocast
    @outside_inference
    def covariance(self) -> Tensor:
        """Return the covariance of the flattened image, (dx, dx), in float64.

        Cost: dx backward passes if no class matrices of the image are stored.

        Raises:
            UnsupportedError: If the matrix does not fit the byte budget.
        """
        self._refuse_large()
        return self._image_covariance - self._explained.mT @ self._explained

    def _refuse_large(self) -> None:
        size = self.problem.network.size
        if not self._fits:
            raise UnsupportedError(
                f"the covariance of {size} pixels takes {COPIES * 8 * size**2 / 2**30:.3g} GiB; expected at most the "
                "byte budget. Use samples(n), or raise the budget with lw.memory.limit(...)."
            )

    @cached_property
    def variance(self) -> Tensor:
        """The variance of every pixel, in the shape of the image.

        Exact with the solver "exact" if (dx, dx) fits the byte budget, otherwise the mean square of 1,024 samples:
        ``variance_error`` says which.
        """
        return self._variance()

    @outside_autocast
    @outside_inference
    def _variance(self) -> Tensor:
        network = self.problem.network
        if self.variance_error == 0.0:
            variance = self._image_covariance.diagonal() - self._explained.square().sum(0)
            variance = variance.clamp_min(0)
        else:
            generator = torch.Generator().manual_seed(self.seed + 2)
            variance = torch.zeros(network.size, dtype=torch.float64, device=network.device)
            for chunk in self._draws(VARIANCE_SAMPLES):
                variance += self._deviations(chunk.stop - chunk.start, generator).double().square().sum(0)
            variance = variance / VARIANCE_SAMPLES
        return variance.to(network.dtype).reshape(self.shape)

    @property
    def variance_error(self) -> float:
        """The relative standard error of ``variance``; zero if it is exact."""
        exact = self.classes is not None and (self.classes.image is not None or self._fits)
        return 0.0 if exact else math.sqrt(2 / VARIANCE_SAMPLES)

    @property
    def std(self) -> Tensor:
        """The standard deviation of every pixel, in the shape of the image."""
        return self.variance.sqrt()

    # Samples.

    @outside_autocast
    @outside_inference
    def samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n images drawn from the posterior, (n, *shape), by Matheron's rule.

        Cost: two Jacobian products and a transposed one for each draw, and one solve.

        Args:
            n: The number of draws.
            generator: The source of randomness; the global generator if None.

        Raises:
            NumericalError: If conjugate gradients do not reach their tolerance.
        """
        return self._drawn(self._deviations, n, generator)

    @outside_autocast
    @outside_inference
    def prior_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n images drawn from the prior around the reconstruction, N(x̂, J Σ Jᵀ), (n, *shape).

        Args:
            n: The number of draws.
            generator: The source of randomness; the global generator if None.
        """
        return self._drawn(self._prior_deviations, n, generator)

    def _drawn(self, draw: Callable[..., Tensor], n: int, generator: torch.Generator | None) -> Tensor:
        require_integer("n", n)
        GENERATOR.check("generator", generator)
        network = self.problem.network
        refuse_beyond(
            n * network.size * network.output.element_size(), network.device, f"{n} images", "Draw fewer at once"
        )
        parts = (network.f + draw(chunk.stop - chunk.start, generator) for chunk in self._draws(n))
        return gathered(parts, n).reshape(n, *self.shape)

    def _draws(self, n: int) -> Any:
        network = self.problem.network
        each = (3 * network.selection.size + 4 * (network.size + self.problem.observation.rows)) * 8
        return runs(n, each, network.device)

    def _prior_deviations(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return J w₀ (n, dx), with w₀ from the prior."""
        network = self.problem.network
        return network.forward(self.prior.root(normal_rows(n, network.selection.size, generator, network.f)).detach())

    def _deviations(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return x₀ + K_xy K_yy⁻¹ (σ ξ - A x₀), (n, dx), with x₀ = J w₀ from the prior."""
        problem, network = self.problem, self.problem.network
        size = network.selection.size
        noise = normal_rows(n, size + problem.observation.rows, generator, network.f)
        start = network.forward(self.prior.root(noise[:, :size]).detach())
        error = self.noise_std.detach() * noise[:, size:] - problem.observation.forward(start)
        weights = problem.observation.back(self.solve(error).x)
        if self.classes is not None and self.classes.image is not None:
            return start + (weights @ self._image_covariance).to(start)
        return start + problem.image_kernel(weights)

    @outside_autocast
    @outside_inference
    def class_variances(self, pairs: Tensor) -> Tensor:
        """Return the variance of x_i - x_j for every class of the prior at coefficient one, (classes, e).

        The prior variance of x_i - x_j is their sum weighted by ``prior.coefficients()``. They are fixed numbers, from
        which a hyperprior on differences of pixels follows for all hyperparameters.

        Args:
            pairs: (e, 2) integers, flat positions i and j in the image.

        Raises:
            DataError: If they are no such integers, or out of range.
        """
        PAIRS.check("pairs", pairs)
        network = self.problem.network
        if pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) < network.size:
            raise DataError(
                f"pairs run from {int(pairs.min())} to {int(pairs.max())}; expected 0 to {network.size - 1}."
            )
        i, j = pairs.long().to(network.device).unbind(1)
        if self.classes is not None and self.classes.image is not None:
            image = self.classes.image
            return (image[:, i, i] + image[:, j, j] - image[:, i, j] - image[:, j, i]).double()
        return self._class_variances(i, j)

    def _class_variances(self, i: Tensor, j: Tensor) -> Tensor:
        """Compute ``class_variances`` from rows J_i - J_j, chunk by chunk."""
        network = self.problem.network
        names = network.selection.names
        pull = network.pullback(names)
        total = torch.zeros(len(self.prior.class_blocks), len(i), dtype=torch.float64, device=network.device)
        for chunk in network.chunks(len(i), names):
            rows = network.f.new_zeros(chunk.stop - chunk.start, network.size)
            rows.scatter_add_(1, i[chunk, None], torch.ones_like(rows[:, :1]))
            rows.scatter_add_(1, j[chunk, None], -torch.ones_like(rows[:, :1]))
            grads = pull(rows)
            total[:, chunk] = self.prior.class_lengths((name, grads[name].flatten(1)) for name in names).double()
        return total

    def summary(self) -> str:
        """Return a few lines: sizes, solver, noise and evidence."""
        problem = self.problem
        error = f" ± {self.evidence_error:.2g}" if self.classes is None else ""
        lines = [
            repr(self),
            f"noise std {float(self.noise_std):.4g}" + (" (learned)" if self.learns_noise else " (given)"),
            f"log evidence {float(self.log_evidence()):.6g}{error}",
            f"prior {type(problem.prior).__name__} with {problem.prior.values.numel()} hyperparameters",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        network = self.problem.network
        return (
            f"InversePosterior(image {self.shape}, {self.problem.observation.rows} measurements, "
            f"{network.selection.size} weights, solver {self.solver!r})"
        )
