"""A Gaussian belief about the weights, and the belief about outputs that follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.curvature.base import Curvature, Estimate, Precision
from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs
from lapwing.errors import FileError, UnsupportedError
from lapwing.networks.jacobians import temporary_bytes
from lapwing.networks.network import Network
from lapwing.networks.passes import Functional, outputs_along, weight_slope
from lapwing.networks.tangent import LayerJacobians, Tangent
from lapwing.posteriors.base import ALL, TRACE, Posterior, Trace, numbered_normals
from lapwing.priors import BoundPrior
from lapwing.problem import STATISTICS, Problem, Statistics, mean_squared_residual
from lapwing.runtime.memory import PIECE_SHARE, budget, concat_chunks, even_chunks
from lapwing.runtime.settings import HasSettings, integer, refuse_undeclared
from lapwing.runtime.states import Array, Maybe, PartOf, Real, State, Text, plain, saved, state_of, stored_fields
from lapwing.runtime.threads import normal_rows
from lapwing.values.gaussian import ChosenOutputs, Deferred, FunctionGaussian, Query

Sums = tuple[Curvature, Statistics, Estimate | None]


_METHODS: dict[str, type[SumsData]] = {}


class SumsData(HasSettings):
    """The part of a method whose posterior is a sum over the data: the sums of two data sets add up.

    Classes define ``sum_data``. Files say by which method, with which settings, a sum was made.

    Raises:
        UnsupportedError: If files know another class of this name; if a setting is not declared with ``setting``.
    """

    def __init_subclass__(cls) -> None:
        known = _METHODS.setdefault(cls.__name__, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UnsupportedError(
                f"files already know a method {cls.__name__!r}, from {known.__module__}; give this one another name."
            )
        _METHODS[cls.__name__] = cls

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_undeclared(type(self), has_owner=False)

    def sum_data(self, problem: Problem, data: Data, generator: torch.Generator | None) -> Sums:
        """Return the curvature, the statistics, and how the curvature was estimated if it was."""
        raise NotImplementedError

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        """Return the posterior after the pass over the data."""
        return WeightPosterior.fitted(problem, *self.sum_data(problem, data, generator), self)


@saved
class SummedBy:
    """The method of a posterior in a file: its name and its settings."""

    @staticmethod
    def state(method: SumsData) -> State:
        """Return the method as plain data."""
        return replace(state_of(method, name=type(method).__name__), name="SummedBy")

    @classmethod
    def from_state(cls, state: State) -> SumsData:
        """Build the method again."""
        name = state.settings.get("name")
        known = stored_fields(_METHODS[name]) if name in _METHODS else {}
        fields = state.read(name=Text(tuple(_METHODS)), **known)
        return _METHODS[fields.pop("name")](**fields)


def add_data(posterior: WeightPosterior, data: Data, generator: torch.Generator | None) -> WeightPosterior:
    """Return the posterior with the sums over these data added to its own."""
    method = posterior.method
    if method is None:
        raise UnsupportedError(
            "this posterior is not a sum over the data, or its file does not say how the sum was made; expected one of "
            "Full, Diagonal, Kron or KernelSpace. Fit all the data again."
        )
    if posterior.mode is not None or posterior.problem.network.shift is not None:
        raise UnsupportedError(
            "this posterior has an optimum of the tangent model (LinearMode), which belongs to the old data; expected "
            "one without. Update the posterior that it came from, and tune that with all the data."
        )
    problem, losses = posterior.problem, ()
    if posterior.curvature.start is not None:  # its parts are in units of the first noise
        problem = problem.with_likelihood(problem.likelihood.with_noise(posterior.curvature.start))
    curvature, statistics, estimate = method.sum_data(problem, data, generator)
    if posterior.statistics.losses:
        residuals = mean_squared_residual(problem.network, problem.likelihood, data)
        losses = tuple((0.5 * statistics.data * residuals).tolist())
    return replace(
        posterior,
        curvature=posterior.curvature + curvature,
        statistics=posterior.statistics + replace(statistics, losses=losses),
        estimate=_pool_estimates(posterior, estimate, statistics.data),
        trace=with_update_remark(posterior.trace, statistics.data),
    )


def with_update_remark(trace: Trace | None, count: float) -> Trace:
    """Return the trace with a remark that so many data came after its tuner."""
    trace = Trace("") if trace is None else trace
    remark = f"{count:,.10g} data were added later: prior, noise and weights of a mixture are those of the data before."
    return replace(trace, findings=(*trace.findings, remark))


def _pool_estimates(posterior: WeightPosterior, estimate: Estimate | None, count: float) -> Estimate | None:
    """Return how the sum of both curvatures was estimated; errors of independent sums add up by their squares."""
    both = [(each, n) for each, n in ((posterior.estimate, posterior.statistics.data), (estimate, count)) if each]
    if not both:
        return None
    total = posterior.statistics.data + count
    error = sum((each.error * n / total) ** 2 for each, n in both) ** 0.5
    return Estimate(max(each.draws for each, _ in both), error)


Cross = Callable[[LayerJacobians, LayerJacobians | None], Tensor]  # covariance between the outputs of two Jacobians
Piece = tuple[slice, slice]  # samples, and outputs of each of them


def output_variances(precision: Precision, tangent: Tangent, centred: bool = False) -> Tensor:
    """Return the variances of the outputs, in their shape; ``centred`` takes the mean over outputs off first.

    Cost: one backward pass for each output, however many runs they take.
    """
    parts = (precision.quadratic(jacobian, False).flatten(1) for jacobian in tangent.output_runs(centred))
    return concat_chunks(parts, torch.Size(tangent.shape).numel(), 1).unflatten(1, tangent.shape)


def token_covariances(precision: Precision, tangent: Tangent) -> Tensor:
    """Return the covariance of the outputs of each datum, (B, [T,] C, C).

    Cost: one backward pass for each output; where the outputs of one datum take R runs, R / 2 times as many.
    """
    network, batch, outputs = tangent.network, len(tangent.raw), tangent.shape[-1]
    pieces = list(network.footprint.seed_runs(outputs, batch, network.dtype, network.device))
    if len(pieces) == 1:
        runs = tangent.output_runs(whole_tokens=True)
        cov = concat_chunks((precision.quadratic(jacobian, True) for jacobian in runs), tangent.tokens, 1)
    else:  # two runs are in memory at once
        tangent = replace(tangent, network=network.keeping_gradients)
        pieces = list(network.footprint.seed_runs(outputs, 2 * batch, network.dtype, network.device))
        each = (_token_covariance(precision, tangent, token * outputs, pieces) for token in range(tangent.tokens))
        cov = concat_chunks(each, tangent.tokens, 1)
    return cov.reshape(batch, *tangent.shape, outputs)


def _token_covariance(precision: Precision, tangent: Tangent, start: int, pieces: list[slice]) -> Tensor:
    """Return the covariance (B, 1, C, C) of the outputs of one datum, whose first has this number, from its runs."""
    batch, outputs = len(tangent.raw), pieces[-1].stop
    total = torch.empty(batch, outputs, outputs, dtype=tangent.network.dtype, device=tangent.raw.device)
    seeds = lambda run: tangent.seeds(slice(start + run.start, start + run.stop))
    for number, here in enumerate(pieces):
        rows = tangent.jacobians(seeds(here))
        total[:, here, here] = precision.quadratic(rows, True)[:, 0]
        for there in pieces[number + 1 :]:
            columns = tangent.jacobians(seeds(there))
            block = _as_pairs(precision.cross(rows, columns), rows, columns).diagonal(dim1=0, dim2=2).movedim(-1, 0)
            total[:, here, there] = block
            total[:, there, here] = block.mT
    return total.unsqueeze(1)


def joint_covariance(
    cross: Cross, network: Network, x: Inputs, chosen: ChosenOutputs | None = None
) -> tuple[Tensor, Tensor]:
    """Return all or some outputs (B, [T,] C), and the covariance between them at all inputs, (B [T] C, B [T] C).

    Cost: one backward pass for each output; where inputs and outputs take R pieces, R / 2 times as many.
    """
    f, pieces = outputs_in_pieces(network, x, chosen)
    if len(pieces) == 1:
        return f, cross(replace(network.linearise(x), chosen=chosen).jacobians(), None)
    count, size = len(f), f[0].numel()
    total = f.new_empty(count, size, count, size)
    for number in range(len(pieces)):
        others = jacobian_pieces(network, x, pieces[number:], chosen)
        here, rows = next(others)
        total[here[0], here[1], here[0], here[1]] = _as_pairs(cross(rows, None), rows, rows)
        for there, columns in others:
            block = _as_pairs(cross(rows, columns), rows, columns)
            total[here[0], here[1], there[0], there[1]] = block
            total[there[0], there[1], here[0], here[1]] = block.permute(2, 3, 0, 1)
    return f, total.flatten(2).flatten(0, 1)


def outputs_in_pieces(network: Network, x: Inputs, chosen: ChosenOutputs | None) -> tuple[Tensor, list[Piece]]:
    """Return all or some outputs at x, and pieces of them; the Jacobians of two pieces fit the byte budget together."""
    network = network.for_inputs(x)
    f = network(x).to(network.dtype)
    f = f if chosen is None else chosen.of(f)
    size, options = f[0].numel(), (network.dtype, network.device)
    rows = math.isqrt(temporary_bytes(network.device) // (3 * f.element_size()))  # their covariance is a piece as well
    chunks = list(network.footprint.largest_chunks(len(f), 2 * size, *options, max(1, rows // size)))
    longest = chunks[0].stop - chunks[0].start
    most = network.footprint.seeds_at_once(2 * longest, *options)
    runs = list(even_chunks(size, min(most, max(1, rows // longest))))
    return f, [(chunk, run) for chunk in chunks for run in runs]


def jacobian_pieces(
    network: Network, x: Inputs, pieces: list[Piece], chosen: ChosenOutputs | None
) -> Iterator[tuple[Piece, LayerJacobians]]:
    """Yield the Jacobian of each piece; a chunk of samples runs once for all pieces of it in a row."""
    chunk: slice | None = None
    for piece in pieces:
        if piece[0] != chunk:
            chunk = piece[0]
            some = None if chosen is None else chosen.samples(chunk)
            tangent = replace(network.linearise(network.take(x, chunk)), chosen=some)
        yield piece, tangent.jacobians(tangent.seeds(piece[1]))


def _as_pairs(block: Tensor, rows: LayerJacobians, columns: LayerJacobians) -> Tensor:
    """Return (B K, B' K') as (B, K, B', K')."""
    return block.reshape(rows.batch, rows.outputs, columns.batch, columns.outputs)


def moments_at(
    network: Network, x: Inputs, query: Query, second: Callable[[Tangent], Tensor], dim: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the wanted outputs at x, and what ``second`` computes of each chunk of inputs, joined along ``dim``."""
    means: list[Tensor] = []

    def parts() -> Iterator[Tensor]:
        for _, tangent in network.tangents(x, chosen=query.outputs, graph=False):
            means.append(tangent.f.to(network.dtype))
            yield second(tangent)

    count = network.count(x)
    moments = concat_chunks(parts(), count, dim)
    return concat_chunks(means, count), moments


class Linearised(Posterior):
    """A belief about the weights that the Jacobian maps to outputs; another prior or noise needs no data."""

    linearised: ClassVar[bool] = True
    differentiable: ClassVar[bool] = True

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        """Return the covariance between all inputs and outputs of two Jacobians, (B K, B' K'), or of one itself."""
        raise NotImplementedError

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        """Return the belief at x, by backward passes for the wanted outputs alone, with its covariance computed."""
        if query.joint:
            return FunctionGaussian.across(*joint_covariance(self.cross, self.problem.network, x, query.outputs))

        def covariances(tangent: Tangent) -> Tensor:
            runs = (self.covariance(jacobian) for jacobian in tangent.output_runs(whole_tokens=True))
            return concat_chunks(runs, tangent.tokens, 1).reshape(*tangent.f.shape, -1)

        return FunctionGaussian(*moments_at(self.passing, x, query, covariances))


MAX_ROUNDING = 1e-2  # condition number times the squared rounding unit, above which a variance may be 1 % off
COVARIANCE_OUTPUTS = 32  # outputs above which a (B, C, C) covariance is built only when asked for


@dataclass(frozen=True, eq=False)
class Mode:
    """The optimum of the tangent model's own regularised loss, where the evidence is evaluated instead of at w̃."""

    theta: Tensor  # θ*, (P,), float64
    loss: float  # there, at unit dispersion

    @classmethod
    def from_numbers(cls, theta: Tensor | None, loss: float | None) -> Mode | None:
        """Return the mode from a file, or None if it has none."""
        if theta is None or loss is None:
            if theta is not None or loss is not None:
                raise FileError("a mode without its loss, or a loss without its mode; expected both")
            return None
        return cls(theta, float(loss))


A = TypeVar("A", bound="AtCentre")


class AtCentre(Linearised):
    """A belief whose evidence is evaluated at w̃, or at the tangent model's own optimum if there is a ``mode``."""

    mode: Mode | None

    def with_trace(self: A, trace: Trace) -> A:
        return replace(self, trace=trace)  # type: ignore[type-var]

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the weights, (n, P); stored samples are the first n, whatever the generator."""
        return self.theta + self.deviations(n, generator)

    def state_at_centre(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Return what a file holds of the weights and of the data: settings and tensors."""
        mode = self.mode
        settings = {
            "statistics": asdict(self.statistics), "mode_loss": None if mode is None else mode.loss,
            "trace": plain(self.trace),
        }  # fmt: skip
        return settings, {"theta": self.theta} if mode is None else {"theta": self.theta, "mode": mode.theta}

    @property
    def _phi(self) -> Tensor:
        return self.problem.likelihood.dispersion.to(self.theta.device)

    @property
    def centre(self) -> Tensor:
        """The weights at which the evidence is evaluated, (P,) in float64: w̃, or the tangent model's own optimum."""
        return self.theta.double() if self.mode is None else self.mode.theta

    @property
    def loss(self) -> Tensor | float:
        """The loss at the centre, summed over the data, at unit dispersion."""
        if self.mode is not None:
            return self.mode.loss
        ratios = self.problem.likelihood.ratios
        if self.statistics.losses and ratios is not None:
            return (torch.tensor(self.statistics.losses, dtype=torch.float64, device=ratios.device) / ratios).sum()
        return self.statistics.loss

    def log_likelihood(self) -> Tensor:
        """Return log p(D | theta) at the centre."""
        phi = self._phi
        normaliser = self.problem.likelihood.log_normaliser(phi, self.statistics.outputs)
        return -self.loss / phi - self.statistics.data * normaliser


@saved
@dataclass(frozen=True, eq=False)
class WeightPosterior(AtCentre):
    """theta ~ N(w̃, Λ⁻¹) with Λ = H/φ + A.

    ``curvature`` holds H at unit dispersion; prior and dispersion come from the problem, so that changing them
    costs a factorisation and no data. If the network is shifted, ``theta`` is the point it is shifted to.
    """

    problem: Problem
    curvature: Curvature
    statistics: Statistics
    theta: Tensor  # w̃, (P,)
    mode: Mode | None = None
    trace: Trace | None = None
    estimate: Estimate | None = None  # how the curvature was estimated; None if it is exact
    method: SumsData | None = None  # how more data are summed; None if they cannot be added

    @classmethod
    def fitted(
        cls,
        problem: Problem,
        curvature: Curvature,
        statistics: Statistics,
        estimate: Estimate | None = None,
        method: SumsData | None = None,
    ) -> WeightPosterior:
        """Return the posterior after the pass over the data, with noise and prior that depend on it filled in.

        A noise that is left open is the mean squared residual at w̃; a g-prior takes its scale from the curvature.
        ``estimate`` says how the curvature was estimated, if it was; ``method`` how more data are summed, if they can.
        """
        problem = problem.with_residual_noise(statistics)
        posterior = cls(problem, curvature, statistics, problem.network.theta(), estimate=estimate, method=method)
        return posterior.with_prior(problem.prior) if problem.prior.needs_curvature else posterior._with_usable_prior()

    def _with_usable_prior(self) -> WeightPosterior:
        """Return the posterior; raise now, not at the first prediction, if the curvature cannot take its prior."""
        self.current.refuse_prior(self._phi.detach(), self.problem.prior)
        return self

    @cached_property
    def current(self) -> Curvature:
        """The curvature under the present noise ratios; the same as ``curvature`` if all outputs share one noise."""
        return self.curvature.at(self.problem.likelihood.ratios)

    def with_problem(self, problem: Problem) -> WeightPosterior:
        """Return the same curvature under another prior or noise. The mode stays as it is."""
        return replace(self, problem=problem)

    def with_prior(self, prior: BoundPrior) -> WeightPosterior:
        """Return the same curvature under another prior, without the mode, which belongs to the old one.

        A g-prior takes its scale from the curvature.
        """
        prior = prior.with_scale(self.current.diagonal()) if prior.needs_curvature else prior
        return replace(self, problem=self.problem.with_prior(prior), mode=None)._with_usable_prior()

    def updated(self, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        return add_data(self, data, generator)

    @property
    def noise(self) -> Tensor | None:
        """The noise variances that may change without the data: (), (C,), or None if there are none to learn.

        At a mode only their common scale may change: its loss is known for the present ratios alone.
        """
        likelihood = self.problem.likelihood
        if not likelihood.learns_dispersion:
            return None
        return likelihood.noise_variance if self.statistics.losses and self.mode is None else likelihood.dispersion

    def with_noise(self, noise: Tensor) -> WeightPosterior:
        """Return the posterior under other noise variances, of the shape of ``noise``."""
        return replace(self, problem=self.problem.with_likelihood(self.problem.likelihood.with_noise(noise)))

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        """Return the belief at x. With many outputs, covariances and variances are computed when they are needed."""
        if query.joint:
            return super().belief(x, query)
        network = self.problem.network
        axes = self._axes if query.outputs is None else None
        if axes is not None and (both := network.features_at_once(x)) is not None:
            mean, a = both
            if mean.shape[-1] <= COVARIANCE_OUTPUTS:
                return FunctionGaussian(mean, axes(a)[0])
            covariances = lambda: self._moments(x, query, token_covariances)[1]  # in chunks of inputs
            variances = partial(axes.variances, a)
            return FunctionGaussian(mean, Deferred(variances, covariances, partial(variances, centred=True)))
        if query.shape(network.output_shape)[-1] <= COVARIANCE_OUTPUTS:
            return FunctionGaussian(*self._moments(x, query, token_covariances))
        centred = partial(output_variances, centred=True)
        deferred = Deferred(
            lambda: self._moments(x, query, output_variances)[1],
            lambda: self._moments(x, query, token_covariances)[1],
            None if query.outputs is not None else lambda: self._moments(x, query, centred)[1],
        )
        return FunctionGaussian(query.of(network(x).to(network.dtype)), deferred)

    def _moments(
        self, x: Inputs, query: Query, second: Callable[[Precision, Tangent], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the wanted outputs, and what ``second`` computes for them: covariances or variances."""
        return moments_at(self.passing, x, query, partial(second, self.precision))

    def covariance(self, jacobian: LayerJacobians) -> Tensor:
        """Return J Λ⁻¹ Jᵀ of each datum, (B, S, C, C)."""
        return self.precision.quadratic(jacobian, True)

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        return self.precision.cross(jacobian, other)

    @property
    def passing(self) -> Network:
        network = self.problem.network
        return network.blockwise if self.precision.shares_rotation else network

    @property
    def shared(self) -> object:
        return self.curvature

    def covariances(self, jacobian: LayerJacobians, members: Sequence[WeightPosterior]) -> list[Tensor]:
        """Return J Λ⁻¹ Jᵀ of every member: the same curvature under other priors and noises."""
        precisions = [each.precision for each in members]
        return precisions[0].quadratics(precisions, jacobian)

    @cached_property
    def precision(self) -> Precision:
        """The precision for predictions, through which no gradient flows to the hyperparameters."""
        with torch.no_grad():
            prior = self.problem.prior
            return self.current.precision(self._phi.detach(), replace(prior, values=prior.values.detach()))

    @cached_property
    def _axes(self) -> SharedAxes | None:
        """The form of the covariances in the features of the last layer; None if there is none."""
        return last_layer_axes([self])

    @property
    def condition(self) -> float:
        """A bound on the condition number of Λ in units of the prior: the trace of A^-½ H A^-½ / φ, plus one.

        Weights that are coupled with no other do not count: no digits cancel in their variances.
        """
        with torch.no_grad():
            ratios = self.current.diagonal().double() / self.problem.prior.vector.double()
            ratios = ratios * self.current.coupling_mask().to(ratios)
            return 1 + float(ratios.sum() / self._phi.double())

    @property
    def findings(self) -> tuple[str, ...]:
        """Remarks on what the curvature approximates or estimates, and on the digits of the Jacobian."""
        estimated = () if self.estimate is None else (str(self.estimate),)
        with torch.no_grad():
            rows = self.statistics.data * self.statistics.outputs
            missing = self.current.missing_findings(self._phi, self.problem.prior, rows)
        return (*self.current.findings, *missing, *estimated, *self._digits)

    @property
    def _digits(self) -> tuple[str, ...]:
        """A remark if the Jacobian, which the network computes in its dtype, has too few digits for the variances.

        Rounding of the Jacobian enters variances with the prior variance, where the data leave φ/H: by the rounding
        unit times the square root of the condition number, relatively, and by its square beyond that.
        """
        dtype, condition = self.problem.network.arithmetic, self.condition
        most = MAX_ROUNDING / torch.finfo(dtype).eps ** 2
        if condition <= most:
            return ()
        wider = "model.float()" if torch.finfo(dtype).bits == 16 else "model.double() with data in float64"
        return (
            f"the data outweigh the prior by up to {condition:.1g}; a network in {str(dtype).removeprefix('torch.')} "
            f"carries {most:.0g}. Error bars near the data may be wrong by more than 1 %. Use {wider}, scale the "
            "inputs to unit size, or raise the prior precision or the noise.",
        )

    def log_occam(self) -> Tensor:
        r"""Return the Occam factor, the cost of flexibility in the evidence. Never positive for a GGN.

        $$ -\tfrac12 \|\tilde w - \mu\|_A^2 - \tfrac12 \log\det (A^{-1} \Lambda) $$
        """
        prior, theta = self.problem.prior, self.centre
        logdet = self.current.logdet(self._phi, prior)
        return 0.5 * (prior.logdet().double() - prior.penalty(theta).double() - logdet)

    def log_evidence(self) -> Tensor:
        r"""Return the Laplace evidence with every constant, differentiable in the prior and the dispersion.

        $$ \log p(D \mid \tilde w) + \tfrac12 \log\det A - \tfrac12 \|\tilde w - \mu\|_A^2 - \tfrac12 \log\det\Lambda $$
        """
        return self.log_likelihood() + self.log_occam()

    def gammas(self) -> Tensor:
        """Return γ of every weight, (P,): one less prior precision times posterior variance.

        A posterior that holds some directions fixed counts those as not determined by the data.
        """
        return self.precision.gammas(self.problem.prior.vector.detach()).detach()

    def unseen_gamma(self) -> Tensor | None:
        """Return γ (P,) of the curvature that a bound on the evidence leaves out, or None if there is no such term."""
        return self.current.missing_trace(self._phi, self.problem.prior)

    def deviations(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the weights as steps from their mean, (n, P)."""

        def draw(run: slice) -> Tensor:
            return self._steps(normal_rows(run.stop - run.start, len(self.theta), generator, self.theta))

        return concat_chunks(map(draw, self._draw_runs(n)), n)

    def _draw_runs(self, n: int) -> Iterator[slice]:
        """Yield runs of draws of the weights that fit the byte budget: of one there are four copies for a while."""
        most = int(PIECE_SHARE * budget(self.theta.device)) // (4 * self.theta.nbytes)
        return even_chunks(n, most)

    def numbered_steps(self, numbers: range) -> Tensor:
        return self._steps(numbered_normals(numbers, self.theta))

    def _steps(self, eps: Tensor) -> Tensor:
        """Return the steps Λ^-½ eps for standard normal numbers (n, P)."""
        with torch.no_grad():
            return self.precision.sample(eps).to(self.theta)

    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Return the variance of a scalar function of the weights, or of the outputs at x: ∇gᵀ Λ⁻¹ ∇g."""
        slope = weight_slope(self.problem.network, function, x)
        return (self.precision.solve(slope.unsqueeze(0))[0] * slope).sum()

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n functions of the tangent model, (n, B, [T,] C): one draw of the weights for all inputs."""
        integer().check("n", n)

        def draw(run: slice) -> Tensor:
            f, products = outputs_along(self.problem.network, x, self.deviations(run.stop - run.start, generator))
            return products.add_(f)

        return concat_chunks(map(draw, self._draw_runs(n)), n)

    def state(self) -> State:
        settings, tensors = self.state_at_centre()
        tensors |= {} if self.estimate is None else {"estimate": self.estimate.tensor()}
        method = {} if self.method is None else {"method": SummedBy.state(self.method)}
        return State("WeightPosterior", settings, tensors, {"curvature": self.curvature.state(), **method})

    @classmethod
    def from_state(cls, state: State, problem: Problem) -> WeightPosterior:
        fields = state.read(
            curvature=PartOf(Curvature, problem.network), statistics=STATISTICS, trace=TRACE,
            theta=Array(("P",), dtype=problem.network.dtype), mode=Maybe(Array(("P",))), mode_loss=Maybe(Real()),
            estimate=Maybe(Array((2,), 0)), method=Maybe(PartOf(SummedBy)),
        )  # fmt: skip
        estimate = Estimate.from_numbers(fields.pop("estimate"))
        mode = Mode.from_numbers(fields.pop("mode"), fields.pop("mode_loss"))
        each = fields["curvature"].start is not None
        if len(fields["statistics"].losses) != each * problem.network.output_shape[-1]:
            raise FileError("a curvature without the loss of each output, or a loss too many; expected both")
        if each and problem.likelihood.ratios is None:
            raise FileError("one curvature for each output and one noise for all; expected a noise for each")
        return cls(problem, **fields, mode=mode, estimate=estimate)


MAX_AXES = 2**22  # numbers of the axes of a last layer that are held once more for predictions


class SharedAxes(nn.Module):
    """U diag(W (Vᵀa)²) Uᵀ for features a (..., D) of the last layer: the form of Kron, EKron and Diagonal.

    The covariances of the outputs (L, ..., C, C), under L beliefs with the same axes.

    Args:
        outputs: U (C, w).
        inputs: V (D, v); with a row more if there is a bias, whose features are given without a one.
        weights: W of each belief, (L, w, v).
        with_bias: Whether there is a bias.
    """

    outputs: Tensor
    inputs: Tensor
    bias: Tensor | None
    weights: Tensor

    def __init__(self, outputs: Tensor, inputs: Tensor, weights: Tensor, with_bias: bool = False) -> None:
        super().__init__()
        self.sizes = weights.shape[:2]
        self.register_buffer("outputs", outputs.contiguous())
        self.register_buffer("inputs", (inputs[:-1] if with_bias else inputs).mT.contiguous())
        self.register_buffer("bias", inputs[-1].contiguous() if with_bias else None)
        self.register_buffer("weights", weights.flatten(0, 1).contiguous())

    @classmethod
    def of(cls, members: Sequence[Posterior]) -> SharedAxes | None:
        """Return the form that posteriors over the last layer of one network share; None if they have none."""
        network = members[0].problem.network
        block = network.layout[0]
        if len(network.layout) > 1 or network.selection.index is not None or not block.linear or block.groups > 1:
            return None
        if any(not isinstance(each, WeightPosterior) or each.problem.network is not network for each in members):
            return None
        axes = [each.precision.axes() for each in members if isinstance(each, WeightPosterior)]
        first = axes[0]
        if first is None:
            return None
        weights = [each[2] for each in axes if each and all(map(torch.equal, each[:2], first[:2]))]
        if len(weights) < len(axes):
            return None
        return cls(first[0], first[1], torch.stack(weights), block.bias is not None).to(network.dtype)

    def squares(self, a: Tensor) -> Tensor:
        """Return (Vᵀa)², (..., v)."""
        return F.linear(a, self.inputs, self.bias).square()

    def differences(self, belief: Tensor, spread: Tensor) -> Tensor | None:
        """Return the matrix (K C C, v) from these squares to the variances of the differences of every two outputs.

        For K cells: each takes one of the L beliefs (K,) and multiplies its variances by ``spread`` (K,). Nothing
        cancels, and no covariance is formed. None if the matrix would be large.
        """
        if len(belief) * len(self.outputs) ** 2 * len(self.inputs) > MAX_AXES:
            return None
        weights = self.weights.unflatten(0, self.sizes)[belief] * spread[:, None, None]
        gaps = (self.outputs.unsqueeze(1) - self.outputs).square().flatten(0, 1)  # (C C, w)
        return (gaps @ weights).flatten(0, 1)

    def variances(self, a: Tensor, centred: bool = False) -> Tensor:
        """Return the variances of the outputs (..., C) under the first belief; ``centred`` takes their mean off first.

        Cost: C w multiplications for each input, where the covariance, or the product of all unit vectors with the
        axes, takes C² w.
        """
        outputs = self.outputs - self.outputs.mean(0) if centred else self.outputs
        scales = F.linear(self.squares(a), self.weights[: self.sizes[1]])
        return F.linear(scales, outputs.square())

    def forward(self, a: Tensor) -> Tensor:
        outputs = self.outputs
        scales = F.linear(self.squares(a), self.weights).unflatten(-1, self.sizes)  # along the axes, (..., L, w)
        return ((outputs * scales.unsqueeze(-2)) @ outputs.mT).movedim(-3, 0)


def last_layer_axes(members: Sequence[Posterior]) -> SharedAxes | None:
    """Return the form for predictions from the features of the network (``Network.features``); None if there is none.

    It is held beside the posterior, so that layers with many inputs or outputs go without.
    """
    network = members[0].problem.network
    if network.last_linear is None or max(network.layout[0].d_in, network.output_shape[-1]) ** 2 > MAX_AXES:
        return None
    with torch.no_grad():
        return SharedAxes.of(members)


def beliefs_at(
    members: Sequence[Posterior], x: Inputs, query: Query = ALL, most: int = COVARIANCE_OUTPUTS
) -> list[FunctionGaussian]:
    """Return the belief of every posterior about all or some outputs at x, by one pass of each network.

    With more than ``most`` outputs each posterior passes by itself, so that no (B, C, C) covariance need be built.
    """
    by_model: dict[int, list[int]] = {}
    for number, each in enumerate(members):
        by_model.setdefault(id(each.problem.network.model), []).append(number)
    beliefs: dict[int, FunctionGaussian] = {}
    for numbers in by_model.values():
        beliefs.update(zip(numbers, _of_one_network([members[i] for i in numbers], x, query, most), strict=True))
    return [beliefs[number] for number in range(len(members))]


def _of_one_network(members: Sequence[Posterior], x: Inputs, query: Query, most: int) -> list[FunctionGaussian]:
    """Return the belief of every posterior, all of the same network."""
    network = members[0].problem.network
    if query.shape(network.output_shape)[-1] > most:
        return [each.belief(x, query) for each in members]
    linearised = [each for each in members if each.linearised]
    if not linearised:
        return [each.belief(x, query) for each in members]
    if len({id(each.shared) for each in linearised}) == 1:  # one use of the Jacobian
        network = linearised[0].passing
    mean, stacked = moments_at(network, x, query, partial(member_covariances, linearised), 1)
    covs = iter(stacked)
    return [FunctionGaussian(mean, next(covs)) if each.linearised else each.belief(x, query) for each in members]


def member_covariances(members: Sequence[Posterior], tangent: Tangent) -> Tensor:
    """Return the covariance of the wanted outputs under every posterior, (K, B, [T,] C, C), from one Jacobian of them.

    Where the outputs of all tokens do not fit the byte budget, tokens are taken in runs.
    """
    groups: dict[int, list[int]] = {}
    for i, each in enumerate(members):
        groups.setdefault(id(each.shared), []).append(i)

    def of_run(jacobian: LayerJacobians) -> Tensor:
        out: list[Tensor] = [torch.empty(0)] * len(members)
        for numbers in groups.values():
            together = [members[i] for i in numbers]
            for i, cov in zip(numbers, together[0].covariances(jacobian, together), strict=True):
                out[i] = cov
        return torch.stack(out)  # (K, B, tokens, C, C)

    cov = concat_chunks(map(of_run, tangent.output_runs(whole_tokens=True)), tangent.tokens, 2)
    return cov.reshape(len(members), -1, *tangent.shape, tangent.shape[-1])
