"""The posterior of an image given linear measurements, under the tangent model of a network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.memory import gathered, refuse_beyond
from lapwing.core.settings import GENERATOR, NUMBER, Rule, require_integer, seen
from lapwing.core.trace import Trace
from lapwing.errors import DataError, UnsupportedError
from lapwing.inverse.belief import Belief
from lapwing.inverse.classes import ClassMatrices
from lapwing.inverse.problem import InverseProblem
from lapwing.linalg.operators import Solution
from lapwing.linalg.randomised import Eigenpairs
from lapwing.networks.forward import outside_autocast, outside_inference
from lapwing.priors.bound import Prior
from lapwing.priors.structured import ClassCovariance
from lapwing.tuners.evidence import Ascend, MaximiseEvidence
from lapwing.tuners.protocol import Tuner, applied

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
        return self.problem.network.output.reshape(self.shape).clone()

    # What tuners ask.

    @property
    def noise(self) -> Tensor | None:
        """The noise variance if it is to be learned; None if it was given."""
        return self.noise_variance if self.learns_noise else None

    def with_noise(self, noise: Tensor | float) -> InversePosterior:
        """Return the posterior with another noise variance."""
        if not isinstance(noise, Tensor):
            NUMBER.check("noise", noise)
            noise = torch.tensor(noise, dtype=torch.float64, device=self.noise_variance.device)
        return replace(self, noise_variance=noise, pairs=self._nearby)

    def with_problem(self, problem: InverseProblem) -> InversePosterior:
        """Return the posterior of a problem with other hyperparameters of the prior."""
        return replace(self, problem=problem, pairs=self._nearby)

    def with_prior(self, prior: ClassCovariance | Prior | float) -> InversePosterior:
        """Return the posterior under another prior with the same blocks, such as ``posterior.prior`` changed."""
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
            UnsupportedError: If the tuner is one of those that need the data of ``lw.fit``.
        """
        refuse_other_tuners(tuner)
        default = Ascend() if self.classes is None else MaximiseEvidence(noise=True, max_steps=200)
        return replace(applied(default if tuner is None else tuner, self), pairs=None)

    @cached_property
    def _nearby(self) -> Eigenpairs | None:
        """The eigenpairs of the preconditioner, which serve other hyperparameters too."""
        return None if self.classes is not None else self.belief.matrix_free.pairs

    # What users ask.

    @cached_property
    def belief(self) -> Belief:
        """The covariances behind the answers."""
        return Belief(self.problem, self.noise_variance, self.classes, self.seed, self.pairs)

    @outside_autocast
    @outside_inference
    def solve(self, rows: Tensor) -> Solution:
        """Return K_yy⁻¹ u for rows u (K, dy) with their residuals, by a Cholesky factor or by conjugate gradients.

        Raises:
            NumericalError: If a residual is above the tolerance, 1e-8 for conjugate gradients (1e-4 in float32).
            DataError: If the rows have another shape.
        """
        width = self.problem.observation.rows
        if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != width:
            raise DataError(f"rows is {seen(rows)}; expected (K, {width}).")
        return self.belief.solve(rows)

    @outside_autocast
    @outside_inference
    def log_evidence(self) -> Tensor:
        """Return the log marginal likelihood of the tangent model, with every constant, a scalar tensor.

        -½ [|y - A f|²/σ² + (θ - mean)ᵀ Σ⁻¹ (θ - mean) + log det K_yy + dy log 2π]. For a linear model at its optimum it
        equals log N(y; A h(mean), K_yy). Differentiable in the prior's values and the noise. Without class matrices the
        log-determinant is an estimate; ``evidence_error`` is its part of the standard error.
        """
        problem = self.problem
        misfit = problem.residual.square().sum() / self.noise_variance + self.prior.penalty(problem.theta)
        return -0.5 * (misfit + self.belief.logdet() + problem.observation.rows * math.log(2 * math.pi))

    @property
    def evidence_error(self) -> float:
        """The standard error of ``log_evidence``; zero where it is computed and not estimated."""
        return 0.0 if self.classes is not None else 0.5 * self.belief.matrix_free.logdet_error

    @outside_autocast
    @outside_inference
    def covariance(self) -> Tensor:
        """Return the covariance of the flattened image, (dx, dx), in float64.

        Cost: dx backward passes if no class matrices of the image are stored.

        Raises:
            UnsupportedError: If the matrix does not fit the byte budget.
        """
        return self.belief.covariance()

    @property
    def variance(self) -> Tensor:
        """The variance of every pixel, in the shape of the image.

        Exact with the solver "exact" if (dx, dx) fits the byte budget, otherwise the mean square of 1,024 samples:
        ``variance_error`` says which.
        """
        return self._variance.clone()

    @cached_property
    @outside_autocast
    @outside_inference
    def _variance(self) -> Tensor:
        return self.belief.variance().to(self.problem.network.dtype).reshape(self.shape)

    @property
    def variance_error(self) -> float:
        """The relative standard error of ``variance``; zero if it is exact."""
        return self.belief.variance_error

    @property
    def std(self) -> Tensor:
        """The standard deviation of every pixel, in the shape of the image."""
        return self.variance.sqrt()

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
        return self._drawn(self.belief.deviations, n, generator)

    @outside_autocast
    @outside_inference
    def prior_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n images drawn from the prior around the reconstruction, N(x̂, J Σ Jᵀ), (n, *shape).

        Args:
            n: The number of draws.
            generator: The source of randomness; the global generator if None.
        """
        return self._drawn(self.belief.prior_deviations, n, generator)

    def _drawn(self, draw: Callable[..., Tensor], n: int, generator: torch.Generator | None) -> Tensor:
        require_integer("n", n)
        GENERATOR.check("generator", generator)
        network = self.problem.network
        size = n * network.size * network.output.element_size()
        refuse_beyond(size, network.device, f"{n} images", "Draw fewer at once")
        parts = (network.f + draw(chunk.stop - chunk.start, generator) for chunk in self.belief.chunks(n))
        return gathered(parts, n).reshape(n, *self.shape)

    @outside_autocast
    @outside_inference
    def class_variances(self, pairs: Tensor) -> Tensor:
        """Return the variance of x_i - x_j for every class of the prior at coefficient one, (classes, e).

        The prior variance of x_i - x_j is their sum weighted by ``prior.coefficients()``. They are fixed numbers, from
        which a hyperprior on differences of pixels follows for all hyperparameters.

        Cost: one backward pass for each pair if no class matrices of the image are stored.

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
        return self.belief.class_variances(i, j)

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


def refuse_other_tuners(tuner: Tuner | None) -> None:
    """Raise for a tuner of the library that needs more than an evidence: data, or effective parameters."""
    if type(tuner).__module__.startswith("lapwing.tuners.") and not isinstance(tuner, MaximiseEvidence | Ascend):
        raise UnsupportedError(
            f"tuner is {type(tuner).__name__}; expected MaximiseEvidence or Ascend, as an inverse problem has no data "
            "of inputs and targets."
        )
