"""FMGP: a Gaussian process around the outputs, with a kernel learned from the data (Ortega et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs, is_real_tensor
from lapwing.data.streams import class_labels
from lapwing.errors import DataError, FileError, ModelError, NumericalError, UnsupportedError
from lapwing.likelihoods.base import Likelihood, energy, refuse_energy, refuse_ignored
from lapwing.linalg.dense import centres_by_class, eigh, eigvalsh, smooth_whitening
from lapwing.linalg.stochastic import Inducing
from lapwing.methods.base import NUMBER, Conformance, Cost, Method, Work, Workload, with_validation
from lapwing.networks.network import Network
from lapwing.networks.passes import is_single_map, last_features
from lapwing.networks.selection import last_layer
from lapwing.posteriors.base import ALL, TRACE, Posterior, Step, Trace
from lapwing.problem import STATISTICS, FeatureTable, Problem, Statistics
from lapwing.runtime.memory import chunks, concat_chunks
from lapwing.runtime.settings import NONE, POSITIVE, integer, one_of, setting
from lapwing.runtime.states import ROUNDING, Array, Either, Maybe, PartOf, State, Text, plain, saved
from lapwing.runtime.threads import EarlyStopping, ProgressBar, independent_generator, normal, uniform
from lapwing.values.gaussian import ChosenOutputs, Deferred, FunctionGaussian, Query


@dataclass(frozen=True, eq=False)
class Sight:
    """The features on which a kernel works: the flattened input, or the input of the network's last layer."""

    network: Network
    last: Network | None = None  # the network with only its last layer selected, for features

    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return features (B, D) and outputs (B, C), in float64."""
        if self.last is not None:
            classes = self.last.output_shape[-1]
            last = self.last  # the graph of ``last`` ends at the last layer: the whole network says how many inputs fit
            both = self.network.in_chunks(x, lambda part: torch.cat([t.double() for t in features(last, part)], 1))
            return both[:, :-classes], both[:, -classes:]
        if not is_real_tensor(x):
            raise UnsupportedError(
                "the rbf kernel needs inputs that are one tensor of real numbers; use kernel='features'."
            )
        return x.reshape(len(x), -1).double(), self.network(x).double()


def last_layer_network(network: Network, inputs: Inputs) -> Network:
    """Return the network with only its last layer selected; raise if that is not a single linear map."""
    last = Network.build(network.model, inputs, last_layer, network.output)
    if not is_single_map(last):
        raise ModelError("the last layer is no single linear map, so it has no features; use kernel='rbf'.")
    return last


def features(network: Network, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the last layer's input (B, D) and the outputs f (B, C), by one forward pass."""
    both = last_features(network, inputs)
    if both is None:
        raise ModelError("the last layer is used several times for one input; use kernel='rbf'.")
    a, f = both
    return (a[:, :-1] if network.layout[0].bias is not None else a), f


@dataclass(frozen=True, eq=False)
class Units:
    """Centre and spread of each column of the features; learning moves inducing points in these units.

    With a length-scale for each column, a constant column takes the spread of the others, and points do not move in it.
    With one length-scale for all, all columns share one unit: their spread, or their size if they have no spread.
    """

    centre: Tensor
    size: Tensor
    varies: Tensor  # whether a column varies by more than rounding

    @classmethod
    def of(cls, u: Tensor, per_column: bool) -> Units:
        """Return the units of features u (n, D)."""
        if not per_column:
            spread, level = u.std(correction=0), u.square().mean().sqrt()
            size = spread if bool(spread > 1e-9 * level) else torch.where(level > 0, level, 1)
            return cls(torch.zeros_like(u[0]), size.expand_as(u[0]), torch.ones_like(u[0], dtype=torch.bool))
        centre, spread = u.mean(0), u.std(0, correction=0)
        varies = spread > 1e-9 * centre.abs()
        usual = spread[varies].square().mean().sqrt() if bool(varies.any()) else torch.ones_like(spread[0])
        return cls(centre, torch.where(varies, spread, usual), varies)

    def standardise(self, table: FeatureTable) -> FeatureTable:
        """Return the table with its features in these units."""
        return replace(table, u=(table.u - self.centre) / self.size)


LOGARITHM = 69.0  # largest log of a length-scale in a file: 1e30
WIDE = 32  # number of outputs above which covariances are built only when needed


class RBF:
    r"""$k = \exp(-\tfrac12 \sum_i (u_i - v_i)^2 / \ell_i^2)$ on the inputs, with a length-scale for each column."""

    uses_features = False

    def between(self, u: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """Return k(u, v) for u (B, D), v (M, D): (B, M)."""
        # Only differences matter; without the common part their squares are not lost to rounding.
        common = v.detach().mean(0)
        u, v = (u - common) / lengths, (v - common) / lengths
        distance = u.square().sum(-1)[:, None] + v.square().sum(-1) - 2 * (u @ v.mT)
        return torch.exp(-0.5 * distance.clamp_min(0))

    def variance(self, u: Tensor, lengths: Tensor) -> Tensor:
        """Return k(u, u), (1,): it is the same everywhere."""
        return torch.ones_like(u[:1, 0])


class Linear:
    r"""$k = 1 + u \cdot v / (D \ell^2)$: the tangent kernel of a linear last layer with input u. One length-scale."""

    uses_features = True

    def between(self, u: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """Return k(u, v) for u (B, D), v (M, D): (B, M)."""
        return 1 + (u / lengths) @ (v / lengths).mT / u.shape[-1]

    def variance(self, u: Tensor, lengths: Tensor) -> Tensor:
        """Return k(u, u), (B,)."""
        return 1 + (u / lengths).square().mean(-1)


KERNELS: dict[str, RBF | Linear] = {"rbf": RBF(), "features": Linear()}  # kernels of one output of unit variance


@dataclass(frozen=True, eq=False)
class FreeKernel:
    """Cov(f_c(u), f_d(v)) = k(u, v) (L Lᵀ)_cd between features u, v and outputs c, d.

    All parameters are logarithms or unconstrained, so that gradient steps can learn them.
    """

    kind: str  # a name in KERNELS
    log_lengths: Tensor  # (D,), or (1,) for all dimensions
    mixing: Tensor  # (C, C); its lower triangle is L

    @property
    def outputs(self) -> Tensor:
        """L Lᵀ, (C, C)."""
        root = self.mixing.tril()
        return root @ root.mT

    def _base(self, u: Tensor, v: Tensor) -> Tensor:
        return KERNELS[self.kind].between(u, v, self.log_lengths.exp())

    def points(self, u: Tensor, number: Tensor) -> Tensor:
        """Return the covariance of inducing points u (M, D), each for the output with this number (M,): (M, M)."""
        return self._base(u, u) * self.outputs[number][:, number]

    def between(self, u: Tensor, points: Tensor, number: Tensor) -> Tensor:
        """Return the covariance of all outputs at u (B, D) with the inducing points: (B, C, M)."""
        if u.shape[1] != points.shape[1]:
            raise DataError(
                f"inputs of {u.shape[1]} numbers; the kernel was learned on {points.shape[1]}. Give as many."
            )
        return self._base(u, points)[:, None] * self.outputs[:, number]

    def marginal(self, u: Tensor) -> Tensor:
        """Return the covariance of the outputs at each input, (B, C, C)."""
        variances = KERNELS[self.kind].variance(u, self.log_lengths.exp())
        return (variances[:, None, None] * self.outputs).expand(len(u), *self.mixing.shape)

    def variances(self, u: Tensor) -> Tensor:
        """Return the variance of each output at each input, (B, C)."""
        variances = KERNELS[self.kind].variance(u, self.log_lengths.exp())
        return (variances[:, None] * self.outputs.diagonal()).expand(len(u), -1)

    def joint(self, u: Tensor, v: Tensor | None = None) -> Tensor:
        """Return the covariance of all outputs at inputs u with those at inputs v, or at u itself, (B, C, B', C)."""
        return torch.einsum("ij,cd->icjd", self._base(u, u if v is None else v), self.outputs)


@saved
@dataclass(frozen=True, eq=False)
class FunctionPosterior(Posterior):
    """f(x) ~ N(network output, K - K_xZ mix mixᵀ K_Zx) with a kernel K and M inducing points Z.

    A prediction costs one forward pass, the kernel with M points and B C M².
    """

    problem: Problem
    sight: Sight
    kernel: FreeKernel
    points: Tensor  # Z, (M, D)
    numbers: Tensor  # (M,), the output that each point belongs to
    mix: Tensor  # (M, r)
    statistics: Statistics
    theta: Tensor
    trace: Trace | None = None

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        if not query.joint:
            return self._marginal(x, query.outputs)
        with torch.no_grad():
            u, f = self.sight(x)
            mean = f.to(self.problem.network.dtype)
            return query.of_belief(FunctionGaussian.across(mean, self._joint(u, mean)))

    def _rows(self, u: Tensor) -> Tensor:
        """Return K_xZ mix for features u (B, D): (B, C, r)."""
        return self.kernel.between(u, self.points, self.numbers) @ self.mix

    def _joint(self, u: Tensor, mean: Tensor) -> Tensor:
        """Return the covariance between all outputs at all inputs, (B C, B C), a few inputs at a time."""
        rows, size = self._rows(u), mean.numel()
        flat = rows.flatten(0, 1)

        def part(inputs: slice) -> Tensor:
            prior = self.kernel.joint(u[inputs], u).reshape(-1, size)
            return prior.addmm_(rows[inputs].flatten(0, 1), flat.mT, alpha=-1).to(mean)

        return concat_chunks((part(each) for each in chunks(len(u), 2 * 8 * mean.shape[-1] * size, u.device)), size)

    def _marginal(self, x: Inputs, outputs: ChosenOutputs | None = None) -> FunctionGaussian:
        """Return the belief about all or some outputs at each input; covariances of many are computed when needed."""
        network, classes = self.problem.network, len(self.kernel.mixing)
        count, means = network.count(x), []
        each = 8 * (classes * (3 * len(self.points) + 3 * classes) + 3 * self.points.shape[1])

        def in_parts(compute: Callable[[Tensor, Tensor, ChosenOutputs | None], Tensor]) -> Iterator[Tensor]:
            for part in chunks(count, each, network.device):
                some = None if outputs is None else outputs.samples(part)
                with torch.no_grad():
                    u, f = self.sight(x if part == slice(0, count) else network.take(x, part))
                    f = f.to(network.dtype)
                    means.append(f if some is None else some.of(f))
                    rows = self._rows(u)
                    rows = rows if some is None else some.of(rows.movedim(-1, 0)).movedim(0, -1)
                    yield compute(u, rows, some).to(network.dtype)

        def covariance(u: Tensor, rows: Tensor, some: ChosenOutputs | None) -> Tensor:
            prior = self.kernel.marginal(u)
            return (prior if some is None else some.blocks(prior)) - rows @ rows.mT

        def variance(u: Tensor, rows: Tensor, some: ChosenOutputs | None) -> Tensor:
            prior = self.kernel.variances(u)
            return (prior if some is None else some.of(prior)) - rows.square().sum(-1)

        wide = (classes if outputs is None else outputs.shape((classes,))[-1]) > WIDE
        whole = lambda compute: concat_chunks(in_parts(compute), count)
        first = whole(variance if wide else covariance)
        mean = concat_chunks(means[:], count)
        covariances = Deferred(lambda: first, lambda: whole(covariance)) if wide else first
        return FunctionGaussian(mean, covariances)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n functions at x, (n, B, C), consistent between the inputs of one call."""
        return self(x, joint=True).sample(n, generator)

    def state(self) -> State:
        tensors = {
            "theta": self.theta, "points": self.points, "numbers": self.numbers, "mix": self.mix,
            "log_lengths": self.kernel.log_lengths, "mixing": self.kernel.mixing,
        }  # fmt: skip
        parts = {} if self.sight.last is None else {"last": self.sight.last.state()}
        settings = {
            "statistics": asdict(self.statistics),
            "kernel": self.kernel.kind,
            "trace": plain(self.trace),
        }
        return State("FunctionPosterior", settings, tensors, parts)

    @classmethod
    def from_state(cls, state: State, problem: Problem) -> FunctionPosterior:
        network, lengths = problem.network, (-LOGARITHM, LOGARITHM)
        fields = state.read(
            kernel=Text(tuple(KERNELS)), last=Maybe(PartOf(Network, network.model)), points=Array(("M", "D")),
            numbers=Array(("M",), 0, network.output_shape[-1] - 1, whole=True), mix=Array(("M", "r")),
            log_lengths=Either(Array(("D",), *lengths), Array((1,), *lengths)), mixing=Array(("C", "C")),
            theta=Array(("P",), dtype=network.dtype), statistics=STATISTICS, trace=TRACE,
        )  # fmt: skip
        kernel = FreeKernel(fields.pop("kernel"), fields.pop("log_lengths"), fields.pop("mixing"))
        _refuse_impossible(kernel, fields, last := fields.pop("last"))
        return cls(problem, Sight(network, last), kernel, **fields)


def _refuse_impossible(kernel: FreeKernel, fields: dict[str, Any], last: Network | None) -> None:
    """Raise ``FileError`` if points do not fit the features, or if a variance would be negative."""
    points, mix = fields["points"], fields["mix"]
    if (last is not None) != KERNELS[kernel.kind].uses_features:
        raise FileError(f"the kernel {kernel.kind!r} needs a last layer if it works on features, and only then")
    if last is not None and (
        len(last.layout) != 1 or last.layout[0].d_in - len(last.layout[0].names) + 1 != points.shape[1]
    ):
        raise FileError(f"the points have {points.shape[1]} features; expected those of a last layer of one block")
    explained = mix.mT @ kernel.points(points, fields["numbers"]) @ mix
    if not bool(eigvalsh(explained).max() <= 1 + ROUNDING):
        raise FileError("the points explain more variance than the prior has; expected at most all of it")


STEP = 24  # float64 copies of the covariance of the outputs that a step holds for each datum


@dataclass(frozen=True, eq=False)
class KernelState:
    """All learned quantities."""

    kernel: FreeKernel
    points: Tensor  # (M, D)
    numbers: Tensor  # (M,), the output that each point belongs to
    mean: Tensor  # of the second process at the points, whitened, (M,)
    log_noise: Tensor | None  # None if the noise is given
    inducing: Inducing

    @classmethod
    def initial(
        cls, kind: str, likelihood: Likelihood, table: FeatureTable, varies: Tensor, num_inducing: int,
        generator: torch.Generator,
    ) -> KernelState:  # fmt: skip
        """Return the state before any step: points at k-means centres of the features, of each class if there are.

        ``table`` is measured in units; ``varies`` tells which columns of its features are not constant.
        """
        outputs, count = table.f.shape[-1], min(num_inducing, len(table))
        numbers = (torch.arange(count, device=table.f.device) % outputs).sort().values
        order = uniform((len(table),), generator, torch.empty(0, dtype=torch.float64)).argsort()
        some = table.rows(order[: max(2000, count)].to(table.f.device))
        points = centres_by_class(some.u, class_labels(some.y, outputs), numbers, generator)
        noise = normal(tuple(points.shape), generator, points)
        points = points + 1e-3 * noise * varies  # equal centres would make the kernel singular
        lengths = _initial_lengths(some.u, varies, not KERNELS[kind].uses_features)
        mixing = torch.diag(0.3 * output_scale(likelihood, table))
        kernel = FreeKernel(kind, lengths.log().requires_grad_(), mixing.requires_grad_())
        log_noise = None
        if likelihood.learns_dispersion:
            log_noise = likelihood.dispersion.detach().to(points).log().requires_grad_()
        mean = torch.zeros(count).to(points)
        inducing = Inducing.before_data(count, points)
        return cls(kernel, points.requires_grad_(), numbers, mean.requires_grad_(), log_noise, inducing)

    @property
    def free(self) -> list[Tensor]:
        """The tensors that Adam changes."""
        tensors = [self.kernel.log_lengths, self.kernel.mixing, self.points, self.mean]
        return tensors if self.log_noise is None else [*tensors, self.log_noise]

    def copy(self) -> KernelState:
        """Return a copy that later steps do not change."""
        copy = lambda t: t.detach().clone()
        kernel = FreeKernel(self.kernel.kind, copy(self.kernel.log_lengths), copy(self.kernel.mixing))
        noise = None if self.log_noise is None else copy(self.log_noise)
        return KernelState(kernel, copy(self.points), self.numbers, copy(self.mean), noise, self.inducing)

    def whitening(self) -> Tensor:
        """Return W (M, M) with W Wᵀ = K_Z⁻¹; ``inducing`` is in these coordinates, so the jitter must not change."""
        return smooth_whitening(self.kernel.points(self.points, self.numbers), jitter=1e-6)

    def whiten(self, table: FeatureTable, white: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the prior covariance (B, C, C) and the whitened rows (B, C, M) of some data."""
        rows = self.kernel.between(table.u, self.points, self.numbers) @ (self.whitening() if white is None else white)
        return self.kernel.marginal(table.u), rows

    def likelihood(self, given: Likelihood) -> Likelihood:
        """Return the likelihood with the learned noise."""
        return given if self.log_noise is None else given.with_dispersion(self.log_noise.exp())

    def in_features(self, units: Units) -> KernelState:
        """Return the state in the units of the features themselves."""
        lengths = self.kernel.log_lengths + units.size.log()[: len(self.kernel.log_lengths)]
        kernel = replace(self.kernel, log_lengths=lengths)
        return replace(self, kernel=kernel, points=self.points * units.size + units.centre)

    def posterior(
        self, problem: Problem, sight: Sight, statistics: Statistics, steps: tuple[Step, ...]
    ) -> FunctionPosterior:
        """Return the posterior of this state; the second process is dropped."""
        problem = problem.with_likelihood(self.likelihood(problem.likelihood))
        values, vectors = eigh(self.inducing.reduction)
        mix = self.whitening() @ (vectors * values.clamp_min(0).sqrt())
        theta, trace = problem.network.theta(), Trace("FMGP", "objective", steps)
        return FunctionPosterior(problem, sight, self.kernel, self.points, self.numbers, mix, statistics, theta, trace)


def _initial_lengths(u: Tensor, varies: Tensor, per_column: bool) -> Tensor:
    """Return length-scales (D,) or (1,) from the spread of features u (n, D); one for features without spread."""
    spread = u.std(0, correction=0)
    usual = varies & (spread > 1e-3)  # of these rows; over all data the spread is one
    if per_column:
        return torch.where(usual, spread, 1) * math.sqrt(u.shape[1])
    return spread.clamp_min(1e-3).mean().reshape(1) if bool(usual.any()) else torch.ones_like(spread[:1])


def output_scale(likelihood: Likelihood, table: FeatureTable) -> Tensor:
    """Return the scale of each output, (C,): one for logits, else its spread over the data.

    If the targets have the units of the outputs, a constant output takes the spread of its targets, or one if these
    are constant too. Other outputs, such as log-rates, do not have the scale of their targets.
    """
    if likelihood.has_logits:
        return torch.ones_like(table.f[0])
    if likelihood.noise_variance is None:
        return table.f.std(0, correction=0).clamp_min(1e-3)
    moments = [(t.mean(0).abs(), t.std(0, correction=0)) for t in (table.f, table.y.to(table.f))]
    rounding = 1e-9 * torch.maximum(moments[0][0], moments[1][0])
    outputs, targets = (torch.where(spread > rounding, spread, 0) for _, spread in moments)
    return torch.where(outputs > 1e-3 * targets, outputs, torch.where(targets > 0, targets, 1))


@dataclass(eq=False)
class Learning:
    """Maximisation of the predictive log-likelihood of two processes with one covariance, minus their divergences.

    One process has the network's mean, the other a mean in the span of the points; see docs/methods/fmgp.md.
    """

    settings: FMGP
    given: Likelihood
    table: FeatureTable
    held_out: FeatureTable | None
    generator: torch.Generator
    state: KernelState

    @cached_property
    def shift(self) -> Tensor:
        """The mean of the second process before any data, (C,): zero for logits, else the mean of the outputs."""
        f = self.table.f
        return torch.zeros_like(f[0]) if self.given.has_logits else f.mean(0)

    def run(self, progress: bool) -> tuple[KernelState, tuple[Step, ...]]:
        """Return the last state, or the best one on held-out data, and the objective at every step."""
        optimiser = self._optimiser()
        total, patience = self.settings.steps, self.settings.patience
        stopping = None
        if self.held_out is not None:
            look = lambda: (self.held_out_score(), self.state.copy())
            stopping = EarlyStopping(look, max(1, total // 20), patience)
        bar, steps = ProgressBar(range(total), "fixed-mean process", progress), []
        with torch.inference_mode(False), torch.enable_grad():
            for step in bar:
                value = self.step(optimiser, 1.0 if step == 0 else max(0.05, 1 / (step + 1)))
                if not math.isfinite(value):
                    raise NumericalError(
                        f"FMGP: the objective is {value} at step {step}; expected a number. Lower learning_rate."
                    )
                noise = () if self.state.log_noise is None else (float(self.state.log_noise.detach().exp()),)
                steps.append(Step(-value, (), noise))
                bar.show(objective=value, KL=float(self.state.inducing.divergence()))
                if stopping is not None and stopping.should_stop(step):
                    break
        return self.state.copy() if stopping is None else stopping.best_state, tuple(steps)

    def _optimiser(self) -> torch.optim.Optimizer:
        """Return Adam, with a step for the mixing matrix that is proportional to its size."""
        rate, mixing = self.settings.learning_rate, self.state.kernel.mixing
        size = float(mixing.detach().diagonal().abs().mean())
        others = [t for t in self.state.free if t is not mixing]
        return torch.optim.Adam([{"params": others, "lr": rate}, {"params": [mixing], "lr": 3 * rate * size}])

    def step(self, optimiser: torch.optim.Optimizer, length: float) -> float:
        """Take one step of both kinds on a mini-batch and return the objective before it.

        ``length`` is the length of the natural-gradient step, at most one.
        """
        table, state = self.table, self.state
        draw = uniform((self.settings.batch_size,), self.generator, torch.empty(0, dtype=torch.float64))
        batch = table.rows((draw * len(table)).long().to(table.f.device))
        share = len(table) / len(batch)
        likelihood = state.likelihood(self.given)
        white = state.whitening()
        optimiser.zero_grad()
        value, information = 0.0, torch.zeros(()).to(state.mean)
        for some in self._parts(len(batch)):
            part = batch.rows(some)
            prior, rows = state.whiten(part, white)
            cov = state.inducing.posterior_cov(prior, rows)
            second = rows @ state.mean + self.shift  # the mean of the second process
            fixed = cov.detach().requires_grad_()
            energies = lambda mean, cov, y=part.y: energy(likelihood, 1.0, mean, cov, y).sum()
            (weights,) = torch.autograd.grad(energies(part.f, fixed) + energies(second.detach(), fixed), fixed)
            term = -share * (energies(part.f, cov) + energies(second, cov))
            term.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            value += float(term.detach())
            with torch.no_grad():  # both processes share the covariance, so its update is the average of the two
                omega = -0.5 * (weights + weights.mT)
                information = information + share * torch.einsum("bcr,bcd,bds->rs", rows, omega, rows)
        divergence = 2 * state.inducing.divergence() + 0.5 * state.mean.square().sum()
        divergence.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        self.state = replace(state, inducing=state.inducing.update(information, length))
        return value + float(divergence.detach())

    def _parts(self, count: int) -> Iterator[slice]:
        """Yield parts of a mini-batch whose covariances, and their graph, fit the byte budget."""
        outputs, points = self.table.f.shape[-1], len(self.state.points)
        each = 8 * outputs * (6 * points + STEP * outputs)
        return chunks(count, each, self.table.f.device)

    def held_out_score(self) -> float:
        """Return the mean predictive log-likelihood of the held-out data."""
        assert self.held_out is not None
        with torch.no_grad():
            total, white = 0.0, self.state.whitening()
            for some in self._parts(len(self.held_out)):
                part = self.held_out.rows(some)
                cov = self.state.inducing.posterior_cov(*self.state.whiten(part, white))
                belief = FunctionGaussian(part.f, cov)
                total += float(self.state.likelihood(self.given).predict(belief).log_prob(part.y).sum())
            return total / len(self.held_out)


TRIAL = 20  # steps that are timed


@dataclass(frozen=True)
class FMGP(Method):
    """A sparse Gaussian process whose mean is the network: cheap error bars without Jacobians.

    Kernel, inducing points and noise are learned on the predictive log-likelihood of the training data, together with a
    second process that has the same kernel and covariance but a learned mean: without it nothing would tie the kernel
    to the data. The prior over weights is not used. This is no Laplace posterior: error bars come from distances
    between inputs, not from curvature.

    Args:
        num_inducing: Number of inducing points, shared among the outputs; at most as many as there are data.
        kernel: "rbf" on the inputs, with a length-scale for every dimension, or "features", linear in the input of the
            last layer. None takes "rbf" for a single real output and "features" for several outputs or for classes.
        steps: Steps of Adam.
        learning_rate: Learning rate of Adam, for points in units of their spread.
        batch_size: Rows in a mini-batch.
        patience: Validation data, ``fit(..., validation=data)``, are evaluated about twenty times and the best state
            is kept. Learning stops after so many evaluations without a better one.

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, for outputs with tokens, likelihoods without
            a differentiable predictive, or "rbf" on inputs that are not one tensor of real numbers.
        ModelError: In ``fit``, for "features" of a network whose last layer is not a single linear map.
        NumericalError: In ``fit``, if the objective becomes infinite or NaN.

    Cost: one forward pass over the data, whose features and outputs are kept (n (D + C) numbers), then ``steps`` steps
    of B C M² + M³ without the network. A prediction costs one forward pass.

    >>> from lapwing.api import fit
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net = torch.nn.Linear(1, 1)
    >>> process = fit(net, [(x, x.sin())], "regression", method=FMGP(num_inducing=5, steps=20))
    >>> inside, outside = process.functions(torch.tensor([[0.0], [9.0]])).std
    >>> bool(inside < outside), torch.equal(process.functions(x).mean, net(x))
    (True, True)
    """

    num_inducing: int = setting(100, integer())
    kernel: str | None = setting(None, one_of(KERNELS) | NONE)
    steps: int = setting(1000, integer())
    learning_rate: float = setting(0.01, POSITIVE)
    batch_size: int = setting(100, integer())
    patience: int = setting(5, integer())
    validation: Data | None = field(default=None, init=False, repr=False, compare=False)  # set by ``fit``
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="its kernel is learned and not that of the network",
        small=lambda model: {"": FMGP(num_inducing=3, steps=2)},
    )

    def with_early_stopping(self, validation: Data) -> FMGP:
        """Return the method with validation data."""
        return with_validation(self, validation)

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> FunctionPosterior:
        """Return the learned process."""
        refuse_energy(problem.likelihood, 1.0)
        network = problem.network
        if len(network.output_shape) > 1:
            raise UnsupportedError("FMGP() takes outputs (B, C), not tokens (B, T, C) or images; use Kron().")
        generator = independent_generator(generator)
        one_number = network.output_shape[-1] == 1 and not problem.likelihood.has_logits
        kind = self.kernel or ("rbf" if one_number else "features")
        uses_features = KERNELS[kind].uses_features
        first = next(iter(data.batches("first batch"))).inputs
        sight = Sight(network, last_layer_network(network, first) if uses_features else None)
        table, statistics = FeatureTable.read(network, problem.likelihood, data, sight)
        problem = problem.with_known_prior().with_residual_noise(statistics)
        units = Units.of(table.u, per_column=not uses_features)
        held_out = None
        if self.validation is not None:
            rows, _ = FeatureTable.read(network, problem.likelihood, self.validation, sight)
            refuse_ignored(problem.likelihood, rows.y, "validation targets")
            held_out = units.standardise(rows)
        table = units.standardise(table)
        # A length-scale would otherwise be learned for the rounding in constant columns.
        table = replace(table, u=torch.where(units.varies, table.u, 0))
        state = KernelState.initial(kind, problem.likelihood, table, units.varies, self.num_inducing, generator)
        learned, steps = Learning(self, problem.likelihood, table, held_out, generator, state).run(data.progress)
        return learned.in_features(units).posterior(problem, sight, statistics, steps)

    def cost(self, workload: Workload) -> Cost:
        if len(workload.output_shape) > 1:
            return Cost.unsupported("outputs for each token: use Kron")
        linear = [block.form for block in workload.blocks if block.form is not None]
        by_features = self.kernel == "features" or (self.kernel is None and workload.outputs > 1)
        dimensions = linear[-1][2] if by_features and linear else workload.input_size
        points, batch = min(self.num_inducing, workload.data), self.batch_size
        kernel = points * (batch + points) * dimensions  # of a batch with the points, and of the points
        rows = workload.outputs * batch * points
        step = 3 * Work(4 * NUMBER * rows, kernel + rows * points, points**3)  # with its gradient
        predict = Work(workload.forward, points * dimensions + workload.outputs * points**2)
        stored = 8 * (points * (dimensions + points + 1) + workload.outputs**2)
        peak = 8 * (workload.data * (dimensions + workload.outputs) + 6 * rows) + workload.activations
        note = f"{points} points, {self.steps} steps of {batch} data without the network"
        return workload.cost(stored, peak, Work(workload.forward), predict, self.steps * step, note)

    def trial(self, workload: Workload) -> FMGP:
        """Return the method with a few steps."""
        return replace(self, steps=min(self.steps, TRIAL))
