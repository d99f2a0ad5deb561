"""The posterior of an image given linear measurements, under the tangent model of a network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lapwing.data.inputs import Inputs, refuse_meta
from lapwing.errors import DataError, DivergedError, UnsupportedError
from lapwing.inverse.belief import ClassMatrices, InverseBelief
from lapwing.inverse.priors import BoundFilterGP, ClassCovariance
from lapwing.inverse.problem import ImageTangent, InverseProblem, LinearOperator, Observation, bound_prior
from lapwing.linalg.krylov import RandomisedEigenpairs, random_signs
from lapwing.linalg.operators import Solution
from lapwing.linalg.ridge import WIDE
from lapwing.networks.forward import outside_autocast, outside_inference
from lapwing.networks.selection import Weights
from lapwing.posteriors.base import Trace, Tunable
from lapwing.priors import FilterGP, Prior
from lapwing.runtime.memory import budget, concat_chunks, refuse_large_result
from lapwing.runtime.settings import GENERATOR, NUMBER, Rule, describe, integer, one_of
from lapwing.runtime.threads import independent_generator, with_inner_progress
from lapwing.tuners.base import Ascend, MaximiseEvidence, Tuner, check_tuner, run_tuner

RANGE = (1e-14, 1e3)  # of variances in a search, in units of the variance that explains y - A h(mean) by itself
NOISE_RANGE = (1e-8, 1e2)  # of noise variances, in the same units
NOISE_START = 1e-4  # the smallest that a search starts from, in the same units
VANISHED = 1e-2  # noise in the variance of the measurements, as σ² tr K_yy⁻¹ / dy, below which it has no effect
UNUSED = 1e-2  # nats that a block can have learned at most, below which it adds next to nothing to the error bars
UNFITTED = 2.0  # residuals of the network in units of the noise, above which it is not near the measurements
PAIRS = Rule(
    "a tensor (e, 2) of integers, the flat positions of two entries of the output",
    lambda v: isinstance(v, Tensor) and v.ndim == 2 and v.shape[1] == 2 and v.dtype in (torch.int32, torch.int64),
    DataError,
)


@dataclass(frozen=True, eq=False, repr=False)
class InversePosterior(Tunable):
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
    pairs: RandomisedEigenpairs | None = None  # of a nearby posterior, for the preconditioner
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
        tuned = run_tuner(default if tuner is None else tuner, self._with_noise_to_start_from())
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
        """The blocks of the prior that the measurements hardly determine, and that hardly widen the error bars."""
        prior = self.problem.prior
        each = prior.coefficients().detach() * self.belief.class_traces()
        total = each.new_zeros(max(prior.class_blocks) + 1)
        total.index_add_(0, torch.tensor(prior.class_blocks, device=each.device), each)
        nats = 0.5 * total / self.noise_variance.detach()
        names = prior.groups or ("all weights",)
        return tuple(name for name, size in zip(names, nats.tolist(), strict=True) if size < UNUSED)

    @cached_property
    def _nearby(self) -> RandomisedEigenpairs | None:
        """The eigenpairs of the preconditioner, which serve other hyperparameters too."""
        return None if self.classes is not None else self.belief.matrix_free.pairs

    # What users ask.

    @cached_property
    def belief(self) -> InverseBelief:
        """The covariances behind the answers."""
        return InverseBelief(self.problem, self.noise_variance, self.classes, self.seed, self.pairs)

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
            raise DataError(f"rows is {describe(rows)}; expected (K, {width}).")
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
        return 0.0 if self.classes is not None else 0.5 * self.belief.matrix_free.solves.error

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
        return self._draw_images(self.belief.deviations, n, generator)

    @outside_autocast
    @outside_inference
    def prior_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n images drawn from the prior around the reconstruction, N(x̂, J Σ Jᵀ), (n, *shape).

        Args:
            n: The number of draws.
            generator: The source of randomness; the global generator if None.
        """
        return self._draw_images(self.belief.prior_deviations, n, generator)

    def _draw_images(self, draw: Callable[..., Tensor], n: int, generator: torch.Generator | None) -> Tensor:
        integer().check("n", n)
        GENERATOR.check("generator", generator)
        network = self.problem.network
        size = n * network.size * network.output.element_size()
        refuse_large_result(size, network.device, f"{n} images", "Draw fewer at once")
        parts = (network.f + draw(chunk.stop - chunk.start, generator) for chunk in self.belief.chunks(n))
        return concat_chunks(parts, n).reshape(n, *self.shape)

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
            DataError: If they are not integers of this shape, or out of range.
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
            f"Image of {self.shape} from {problem.observation.rows:,} measurements, with error bars from "
            f"{problem.network.selection.size:,} weights of the network (solver {self.solver})",
            f"Noise of the measurements: standard deviation {float(self.noise_std):.3g}"
            + (" (learned)" if self.learns_noise else " (given)"),
            f"Prior: {type(problem.prior).__name__.removeprefix('Bound')}, "
            f"{problem.prior.values.numel()} hyperparameters; log evidence {float(self.log_evidence()):.5g}{error}",
            *(() if self.trace is None else (f"Note: {finding}" for finding in self.trace.findings)),
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        network = self.problem.network
        return (
            f"<InversePosterior: image {self.shape}, {self.problem.observation.rows:,} measurements, "
            f"{network.selection.size:,} weights, solver {self.solver}>"
        )


def refuse_other_tuners(tuner: Tuner | None) -> None:
    """Raise for a tuner of the library that needs more than an evidence: data, or effective parameters."""
    if type(tuner).__module__.startswith("lapwing.tuners.") and not isinstance(tuner, MaximiseEvidence | Ascend):
        raise UnsupportedError(
            f"tuner is {type(tuner).__name__}; expected MaximiseEvidence or Ascend, as an inverse problem has no data "
            "of inputs and targets."
        )


SOLVERS = ("auto", "exact", "cg")
DOUBLE = 2**28  # rows times weights up to which a float32 network is computed in float64
PIXELS = 4  # pixels for each measurement, up to which the class matrices of the image are computed
ONE = {".*": "weights"}  # the blocks of the default prior; one for each layer has error bars that are too narrow
NOISE = Rule(
    "a positive number whose square is one too", lambda v: NUMBER.holds(v) and 1e-150 < float(v) < 1e150, DataError
)


@outside_autocast
@torch.inference_mode(False)
@with_inner_progress
def fit(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    operator: Tensor | LinearOperator | None = None,
    *,
    prior: Prior | float | None = None,
    noise_std: float | None = None,
    weights: Weights | None = None,
    tuner: Tuner | None = None,
    solver: str = "auto",
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> InversePosterior:
    """Fit a posterior of the image f(x) from linear measurements y = A f(x) + noise. The model is not changed.

    The network, trained such that A f(x) is near y, is linearised in its weights: h(θ) = f(x) + J (θ - w̃). A Gaussian
    prior over θ and Gaussian noise then give a Gaussian belief about the image.

    Args:
        model: The trained network, in evaluation mode. Its output may have any shape (B, ...).
        x: Its input with a batch dimension, as the model takes it. The outputs of several inputs are flattened
            together.
        y: The measurements (dy,).
        operator: A, which acts on the flat output: a dense or sparse matrix (dy, dx), an object with ``rows``,
            ``size``, ``like``, ``forward`` and ``back`` such as ``lw.linear.OperatorDesign``, or None for the identity.
        prior: The prior over the weights: ``lw.priors.filter_gp()``, ``lw.isotropic()``, ``lw.per_layer()``,
            ``lw.grouped(...)``, or a number for an isotropic precision. Used as given, unless a tuner is given. None
            learns a ``filter_gp()`` with one variance and one length-scale for all weights.
        noise_std: The standard deviation σ of the noise, kept as given. None starts at the root mean square of
            y - A f(x); the tuner learns it.
        weights: Which weights are uncertain: ``lw.all_weights`` or ``lw.named(pattern)``. None takes the weights of
            convolution layers, without biases and norms, or all weights if there are no such layers.
        tuner: How hyperparameters are learned; see ``InversePosterior.tuned``. None learns those that were not given
            if the prior was not given.
        solver: "exact" stores the class matrices, classes times dy² numbers; "cg" uses products alone. "auto" takes
            "exact" if the class matrices fit the byte budget (``lw.memory``).
        generator: The source of randomness for "cg"; a fixed seed if None.
        progress: Whether to show progress bars (needs tqdm); None shows them on a terminal.

    Returns:
        The posterior: ``reconstruction``, ``std``, ``covariance()``, ``samples(n)``, ``log_evidence()``.

    Raises:
        DataError: If y, the operator or the noise is unusable, or their sizes do not match the output.
        ModelError: If the model is in training mode or has no weights of this kind.
        NumericalError: If ``back`` of the operator is not the transpose of ``forward``.
        UnsupportedError: If the prior's covariance is not a sum of a few fixed matrices.
        DivergedError: If a hyperparameter has no optimum.

    >>> net = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 1, 3, padding=1))
    >>> z, blur = torch.linspace(-1, 1, 16).reshape(1, 1, 16), torch.ones(8, 16) / 16
    >>> posterior = fit(net, z, torch.zeros(8), blur, prior=FilterGP(), noise_std=0.1)
    >>> posterior.std.shape
    torch.Size([1, 16])
    """
    GENERATOR.check("generator", generator)
    one_of(SOLVERS).check("solver", solver)
    if noise_std is not None:
        NOISE.check("noise_std", noise_std)
    if tuner is not None:
        check_tuner(tuner)
    tangent = ImageTangent.build(model, x, weights)
    if tangent.dtype not in WIDE:  # half precision has too few digits for covariances
        tangent = tangent.to(torch.float32)
    bound = bound_prior(FilterGP(blocks=ONE) if prior is None else prior, tangent)
    observation = Observation.of(operator, tangent.size, tangent.f)
    measurements = _measurements(y, observation.rows, tangent.device)
    exact, image = _plan(solver, bound, observation, tangent)
    rows = tangent.size if image else observation.rows
    if tangent.dtype != torch.float64 and rows * tangent.selection.size <= DOUBLE:
        tangent = tangent.to(torch.float64)
        observation = Observation.of(operator, tangent.size, tangent.f)
    problem = InverseProblem.of(tangent, observation, bound, measurements)
    noise = _noise(noise_std, problem)
    if prior is None and isinstance(bound, BoundFilterGP):
        problem = replace(problem, prior=bound.with_trained_scale(problem.theta, observation.rows))
    classes = ClassMatrices.of(problem, image) if exact else None
    seed = independent_generator(generator).initial_seed() % 2**31
    posterior = InversePosterior(problem, noise, classes, noise_std is None, seed)
    return posterior.tuned(tuner) if tuner is not None or prior is None else posterior


def _measurements(y: object, rows: int, device: torch.device) -> Tensor:
    """Return y (dy,) in float64; raise unless it is a finite real vector of this length."""
    if not isinstance(y, Tensor):
        raise DataError(f"y is a {type(y).__name__}; expected a tensor ({rows},).")
    refuse_meta(y)
    if y.shape != (rows,):
        raise DataError(
            f"y has the shape {tuple(y.shape)}; expected ({rows},), one number for each row of the operator."
        )
    if y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"y is {y.dtype}; expected real numbers.")
    if not bool(torch.isfinite(y).all()):
        raise DataError("y holds NaN or infinity; expected finite numbers.")
    return y.detach().to(device, torch.float64)


def _plan(solver: str, prior: ClassCovariance, observation: Observation, tangent: ImageTangent) -> tuple[bool, bool]:
    """Return whether to store class matrices, and whether those of the image too."""
    count, rows, size, device = len(prior.class_blocks), observation.rows, tangent.size, tangent.device
    allowed, needed = budget(device), 8 * count * rows**2
    exact = solver == "exact" or (solver == "auto" and needed <= allowed)
    if exact:
        refuse_large_result(needed, device, f"{count} class matrices of {rows} measurements", 'Use solver="cg"')
    return exact, exact and 8 * count * size**2 <= allowed and size <= PIXELS * rows


def _noise(std: float | None, problem: InverseProblem) -> Tensor:
    """Return the noise variance: the given one, or the mean square of y - A f(x)."""
    if std is not None:
        return torch.tensor(float(std), dtype=torch.float64, device=problem.network.device).square()
    variance = problem.residual.square().mean()
    if not float(variance) > 1e-30:
        raise DataError(
            f"the network fits its {len(problem.residual)} measurements exactly, so residuals say nothing about the "
            "noise; expected residuals that are not zero. Give noise_std."
        )
    return variance
