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
from lapwing.errors import DataError, DivergedError, UnsupportedError
from lapwing.inverse.belief import Belief
from lapwing.inverse.classes import ClassMatrices
from lapwing.inverse.problem import InverseProblem
from lapwing.linalg.logdet import random_signs
from lapwing.linalg.operators import Solution
from lapwing.linalg.randomised import Eigenpairs
from lapwing.networks.forward import outside_autocast, outside_inference
from lapwing.priors.bound import Prior
from lapwing.priors.structured import ClassCovariance
from lapwing.tuners.evidence import Ascend, MaximiseEvidence
from lapwing.tuners.protocol import Tuner, applied

RANGE = (1e-14, 1e3)  # of variances in a search, in units of the variance that explains y - A h(mean) by itself
NOISE_RANGE = (1e-8, 1e2)  # of noise variances, in the same units
NOISE_START = 1e-4  # the smallest that a search starts from, in the same units
VANISHED = (
    1e-2  # share of noise in the variance of the measurements, as σ² tr K_yy⁻¹ / dy, below which it has no effect
)
UNUSED = 1e-2  # nats that a block can have learned at most, below which it adds next to nothing to the error bars
UNFITTED = 2.0  # residuals of the network in units of the noise, above which it is not near the measurements
PAIRS = Rule(
    "a tensor (e, 2) of integers, the flat positions of two entries of the output",
    lambda v: isinstance(v, Tensor) and v.ndim == 2 and v.shape[1] == 2 and v.dtype in (torch.int32, torch.int64),
    DataError,
)


@dataclass(frozen=True, eq=False, repr=False)
class InversePosterior:
    """The belief about an image x̂ + J (θ - w̃) given y = A x + noise. ``lw.inverse.fit`` makes one.

    The mean is kept at the output of the network; the covariance is that of the linear Gaussian model,
    K_xx - K_xy K_yy⁻¹ K_yx with K_xx = J Σ Jᵀ and K_yy = A K_xx Aᵀ + σ² I. It belongs to ``tangent_mean``, which is
    another image unless the network was trained to the optimum of that model. Another prior or noise gives a new value
    and costs no Jacobian if the class matrices are stored.

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

    @property
    def tangent_mean(self) -> Tensor:
        """The mean of the image under the tangent model, f + J (θ* - w̃) = h(mean) + K_xy K_yy⁻¹ (y - A h(mean)).

        The covariance belongs to it. It equals the reconstruction if the trained weights are the optimum of the tangent
        model under this prior and noise. Cost: one solve.
        """
        return self._tangent_mean.clone()

    @cached_property
    @outside_autocast
    @outside_inference
    def _tangent_mean(self) -> Tensor:
        problem, network = self.problem, self.problem.network
        start = network.f + network.forward((problem.prior.mean - problem.theta)[None])[0]
        solved = self.belief.solve(problem.prior_residual[None]).x
        return (start + problem.image_kernel(problem.observation.back(solved))[0]).reshape(self.shape)

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
        tuned = applied(default if tuner is None else tuner, self._with_noise_to_start_from())
        return replace(tuned, pairs=None)._with_remarks()

    def _with_noise_to_start_from(self) -> InversePosterior:
        """Return the posterior, with more noise if a network that interpolates leaves hardly any residual.

        At the edge of the search the evidence has no slope in the noise.
        """
        least = NOISE_START * self.problem.prior_residual.square().mean()
        if not self.learns_noise or bool(self.noise_variance >= least):
            return self
        return self.with_noise(least)

    @cached_property
    def limits(self) -> tuple[Tensor, Tensor]:
        """The smallest and largest log hyperparameters of a search, noise last; beyond, the evidence hardly changes.

        The evidence has no optimum in the variance of a block that the tangent model does better without.
        """
        problem, prior = self.problem, self.problem.prior
        size = problem.prior_residual.square().mean()
        size = size if float(size) > 0 else self.noise_variance.detach()
        first = [prior.class_blocks.index(block) for block in sorted(set(prior.class_blocks))]
        traces = self.belief.class_traces()[first]
        scales = torch.where(traces > 0, size * problem.observation.rows / traces, prior.coefficients().detach()[first])
        values = prior.limits(*(end * scales for end in RANGE))
        noises = ((end * size).log()[None] for end in NOISE_RANGE)
        smallest, largest = (torch.cat(pair) for pair in zip(values, noises, strict=True))
        return smallest, largest

    def _with_remarks(self) -> InversePosterior:
        """Return the posterior with remarks on what makes its error bars doubtful; raise if there are none."""
        unused, names, findings = self.unused_blocks, self.problem.prior.groups or ("all weights",), []
        trace = self.trace or Trace("")
        if len(unused) == len(names):
            message = (
                f"the evidence is highest without any uncertainty of the weights: noise of {float(self.noise_std):.3g} "
                "explains the measurements, so nothing can be learned about error bars. Give the prior and noise_std."
            )
            raise DivergedError(message, trace, self)
        if unused:
            which = ", ".join(unused[:4]) + (", ..." if len(unused) > 4 else "")
            findings.append(
                f"{len(unused)} of {len(names)} variances have no effect ({which}): the tangent model does better "
                "without these weights, and they add next to nothing to the error bars, which may be too narrow. A "
                "prior with fewer blocks is safer."
            )
        if self.learns_noise and self._noise_share < VANISHED:
            findings.append(
                f"the learned noise fell to {float(self.noise_std):.3g}, where it has no effect: the tangent model "
                "explains the measurements without noise, so the error bars leave it out. Give noise_std."
            )
        ratio = float(self.problem.residual.square().mean() / self.noise_variance.detach()) ** 0.5
        if ratio > UNFITTED:
            findings.append(
                f"the network misses the measurements by {ratio:.3g} times the noise: its output is not the mean that "
                "the error bars belong to, and they are too narrow around it. Train it longer, or use tangent_mean."
            )
        return self.with_trace(replace(trace, findings=(*trace.findings, *findings))) if findings else self

    @property
    def _noise_share(self) -> float:
        """An estimate of σ² tr K_yy⁻¹ / dy, between zero and one."""
        rows, generator = self.problem.observation.rows, torch.Generator().manual_seed(self.seed + 3)
        signs = random_signs(8, rows, generator, self.noise_variance.device)
        return float(self.noise_variance.detach() * (signs * self.belief.solve(signs).x).mean())

    @property
    def unused_blocks(self) -> tuple[str, ...]:
        """The blocks of the prior of which the measurements say, and that add, next to nothing."""
        prior = self.problem.prior
        each = prior.coefficients().detach() * self.belief.class_traces()
        total = each.new_zeros(max(prior.class_blocks) + 1)
        total.index_add_(0, torch.tensor(prior.class_blocks, device=each.device), each)
        nats = 0.5 * total / self.noise_variance.detach()
        names = prior.groups or ("all weights",)
        return tuple(name for name, size in zip(names, nats.tolist(), strict=True) if size < UNUSED)

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
        """Return the log marginal likelihood of the tangent model, log N(y; A h(mean), K_yy), a scalar tensor.

        h(mean) = f + J (mean - w̃) is the image at the mean of the prior. The weights are integrated out, so the value
        does not depend on how well the network was trained, other than through f, J and w̃. Differentiable in the
        prior's values and the noise. Without class matrices the log-determinant is an estimate, and
        ``evidence_error`` its standard error.
        """
        constant = self.problem.observation.rows * math.log(2 * math.pi)
        return -0.5 * (self.belief.deviance() + constant)

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
            *(() if self.trace is None else self.trace.findings),
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
