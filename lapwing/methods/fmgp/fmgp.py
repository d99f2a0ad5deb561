"""A Gaussian process with a kernel of its own around the network's output (Ortega et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.core.data import Data, check_finite
from lapwing.core.early_stopping import EarlyStopping
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.pool import class_labels
from lapwing.core.progress import ProgressBar
from lapwing.core.random import independent_generator, normal, uniform
from lapwing.core.settings import require_integer, require_positive
from lapwing.core.trace import Step, Trace
from lapwing.errors import DataError, NumericalError, UnsupportedError
from lapwing.likelihoods.energies import energy, refuse_energy, refuse_ignored
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.protocol import Likelihood
from lapwing.linalg.kmeans import kmeans
from lapwing.linalg.variational import Inducing
from lapwing.linalg.whitening import smooth_whitening
from lapwing.losses import Statistics, checked_count, sample_count
from lapwing.methods.fmgp.features import last_layer_network
from lapwing.methods.fmgp.kernels import KERNELS, FreeKernel
from lapwing.methods.fmgp.posterior import FunctionPosterior, Sight
from lapwing.methods.protocol import Conformance, Cost, Workload
from lapwing.problem import Problem


@dataclass(frozen=True)
class FMGP:
    """A sparse Gaussian process whose mean is the network: cheap error bars without Jacobians.

    The kernel is free: "rbf" on the inputs with a length for every dimension, or "features", linear in what the last
    layer sees; by default "rbf" for one number and "features" for several or for classes. Kernel, inducing points and
    noise are learned on the predictive log-likelihood of the training data, together with a second process that has
    the same kernel and covariance but a mean of its own: without it nothing would tie the kernel to the data. The
    prior over weights has no say. It is no Laplace posterior: error bars come from distances, not from curvature.

    Cost: one forward pass over the data, whose features and outputs are kept (n (D + C) numbers), then ``steps`` steps
    of B C M² + M³ without the network. Predictions cost a forward pass.
    """

    num_inducing: int = 100
    kernel: str | None = None
    steps: int = 1000
    learning_rate: float = 0.01
    batch_size: int = 100
    validation: Any = field(default=None, repr=False)
    patience: int = 5
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="its kernel is learned and not that of the network",
        small=lambda model: {"": FMGP(num_inducing=3, steps=2)},
    )

    def __post_init__(self) -> None:
        for name in ("num_inducing", "steps", "batch_size", "patience"):
            require_integer(name, getattr(self, name))
        require_positive("learning_rate", self.learning_rate)
        if self.kernel is not None and self.kernel not in KERNELS:
            raise UnsupportedError(f"kernel is {self.kernel!r}; expected one of {', '.join(KERNELS)}.")

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> FunctionPosterior:
        refuse_energy(problem.likelihood, 1.0)
        network = problem.network
        if len(network.output_shape) > 1:
            raise UnsupportedError("FMGP() takes outputs (B, C), not tokens (B, T, C); use Kron().")
        generator = independent_generator(generator)
        first = next(iter(data.batches("first batch"))).inputs
        discrete = hasattr(problem.likelihood, "link") or network.output_shape[-1] > 1
        kind = self.kernel or ("features" if discrete else "rbf")
        sight = Sight(network, last_layer_network(network, first) if kind == "features" else None)
        table, statistics = Table.read(problem.likelihood, sight, data)
        problem = replace(problem, learn_prior=False)
        problem = problem.with_residual_noise(statistics)
        held = None
        if self.validation is not None:
            source = Data(self.validation, network.device, data.target_key, name="validation")
            held, _ = Table.read(problem.likelihood, sight, source)
            refuse_ignored(problem.likelihood, held.y, "validation targets")
        learning = Learning.of(self, problem.likelihood, kind, table, held, generator)
        state, steps = learning.run(data.progress)
        return _finished(problem, sight, state, statistics, steps)

    def cost(self, workload: Workload) -> Cost:
        if len(workload.output_shape) > 1:
            return Cost(0, 0.0, "outputs for each token: use Kron", supported=False)
        linear = [block.form for block in workload.blocks if block.form is not None]
        by_features = self.kernel == "features" or (self.kernel is None and workload.outputs > 1)
        dimensions = linear[-1][2] if by_features and linear else workload.input_size
        points, batch = self.num_inducing, self.batch_size
        kernel = points * (batch + points) * dimensions  # of a batch with the points, and of the points
        step = 3 * (kernel + workload.outputs * batch * points**2 + points**3)  # with its gradient
        note = f"{points} points, {self.steps} steps of {batch} data without the network"
        return workload.cost(
            8 * points * (dimensions + points), workload.forward + self.steps * step / workload.data, note
        )


def _finished(
    problem: Problem, sight: Sight, state: State, statistics: Statistics, steps: tuple[Step, ...]
) -> FunctionPosterior:
    likelihood = problem.likelihood
    if state.log_noise is not None:
        problem = problem.with_likelihood(likelihood.with_dispersion(state.log_noise.exp()))
    white = state.whitening()
    values, turn = torch.linalg.eigh(state.inducing.decided)
    mix = white @ (turn * values.clamp_min(0).sqrt())
    theta = problem.network.theta()
    trace = Trace("FMGP", "objective", steps)
    return FunctionPosterior(problem, sight, state.kernel, state.points, state.numbers, mix, statistics, theta, trace)


@dataclass(frozen=True, eq=False)
class Table:
    """Features (n, D), outputs (n, C) and targets of all data: the network is not needed after that."""

    seen: Tensor
    f: Tensor
    y: Tensor

    @classmethod
    def read(cls, likelihood: Likelihood, sight: Sight, data: Data) -> tuple[Table, Statistics]:
        seen: list[Tensor] = []
        outputs, targets, loss, count = [], [], 0.0, 0
        for batch in data.batches("features"):
            sample_count(sight.network, batch)
            u, f = sight(batch.inputs)
            check_finite(f, "outputs of the network")
            y = likelihood.targets(f, batch.targets)
            y = y.double() if y.is_floating_point() else y
            loss += float(likelihood.loss(f, y).sum())
            count += int(likelihood.count(f, y))
            if seen and u.shape[1] != seen[0].shape[1]:
                raise DataError(f"inputs of {seen[0].shape[1]} and of {u.shape[1]} numbers; expected as many in all.")
            seen.append(u)
            outputs.append(f)
            targets.append(y)
        found = cls(torch.cat(seen), torch.cat(outputs), torch.cat(targets))
        return found, Statistics(loss, checked_count(count), found.f.shape[-1])

    def rows(self, index: Tensor) -> Table:
        return Table(self.seen[index], self.f[index], self.y[index])

    def __len__(self) -> int:
        return len(self.f)


@dataclass(frozen=True, eq=False)
class Units:
    """Where the features of each column are and how far they spread: learning moves points in these units.

    A constant column has the spread of the others, and nothing moves in it. The features of a last layer share one
    unit, their spread; where they have none, their size.
    """

    centre: Tensor
    size: Tensor
    varies: Tensor  # which columns are not constant but for rounding

    @classmethod
    def of(cls, kind: str, seen: Tensor) -> Units:
        if kind != "rbf":
            spread, level = seen.std(correction=0), seen.square().mean().sqrt()
            size = spread if bool(spread > 1e-9 * level) else torch.where(level > 0, level, 1)
            return cls(torch.zeros_like(seen[0]), size.expand_as(seen[0]), torch.ones_like(seen[0], dtype=torch.bool))
        centre, spread = seen.mean(0), seen.std(0, correction=0)
        varies = spread > 1e-9 * centre.abs()
        usual = spread[varies].square().mean().sqrt() if bool(varies.any()) else torch.ones_like(spread[0])
        return cls(centre, torch.where(varies, spread, usual), varies)

    def measured(self, table: Table) -> Table:
        return replace(table, seen=(table.seen - self.centre) / self.size)

    def flattened(self, table: Table) -> Table:
        """Without what rounding leaves in a constant column: a length would be learned for it."""
        return replace(table, seen=torch.where(self.varies, table.seen, 0))

    def undone(self, state: State) -> State:
        lengths = state.kernel.log_lengths + self.size.log()[: len(state.kernel.log_lengths)]
        return replace(
            state, kernel=replace(state.kernel, log_lengths=lengths), points=state.points * self.size + self.centre
        )


def scale(likelihood: Likelihood, table: Table) -> Tensor:
    """(C,): how far each output spreads; of a constant one how far its targets do, or one where those are too."""
    if not isinstance(likelihood, Gaussian):  # log-rates have no units, and targets of another scale
        return table.f.std(0, correction=0).clamp_min(1e-3)
    moments = [(t.mean(0).abs(), t.std(0, correction=0)) for t in (table.f, table.y.to(table.f))]
    rounding = 1e-9 * torch.maximum(moments[0][0], moments[1][0])
    own, targets = (torch.where(spread > rounding, spread, 0) for _, spread in moments)
    return torch.where(own > 1e-3 * targets, own, torch.where(targets > 0, targets, 1))


@dataclass(frozen=True, eq=False)
class State:
    """All that is learned."""

    kernel: FreeKernel
    points: Tensor
    numbers: Tensor
    mean: Tensor  # of the second process, whitened, (M,)
    log_noise: Tensor | None
    inducing: Inducing

    @property
    def free(self) -> list[Tensor]:
        """What Adam moves."""
        found = [self.kernel.log_lengths, self.kernel.mixing, self.points, self.mean]
        return found if self.log_noise is None else [*found, self.log_noise]

    def copied(self) -> State:
        still = lambda t: t.detach().clone()
        kernel = FreeKernel(self.kernel.kind, still(self.kernel.log_lengths), still(self.kernel.mixing))
        noise = None if self.log_noise is None else still(self.log_noise)
        return State(kernel, still(self.points), self.numbers, still(self.mean), noise, self.inducing)

    def whitening(self) -> Tensor:
        """(M, M). What the points know is in these coordinates: those of another jitter would be others."""
        return smooth_whitening(self.kernel.points(self.points, self.numbers), jitter=1e-6)

    def whitened(self, table: Table) -> tuple[Tensor, Tensor]:
        """Prior covariance (B, C, C) and whitened rows (B, C, M) of some data."""
        rows = self.kernel.between(table.seen, self.points, self.numbers) @ self.whitening()
        return self.kernel.own(table.seen), rows

    def likelihood(self, given: Likelihood) -> Likelihood:
        return given if self.log_noise is None else given.with_dispersion(self.log_noise.exp())


@dataclass(eq=False)
class Learning:
    """Adam on the kernel, the points and the noise; natural gradients on what the points know."""

    method: FMGP
    given: Likelihood
    table: Table
    held: Table | None
    generator: torch.Generator
    state: State
    shift: Tensor  # what is taken off the targets before the second process sees them
    units: Units

    @classmethod
    def of(
        cls, method: FMGP, likelihood: Likelihood, kind: str, table: Table, held: Table | None,
        generator: torch.Generator,
    ) -> Learning:  # fmt: skip
        units = Units.of(kind, table.seen)
        table, held = units.flattened(units.measured(table)), None if held is None else units.measured(held)
        outputs, count = table.f.shape[-1], min(method.num_inducing, len(table))
        numbers = (torch.arange(count, device=table.f.device) % outputs).sort().values
        labels = class_labels(table.y, outputs)
        some = uniform((len(table),), generator, torch.empty(0, dtype=torch.float64)).argsort()[: max(2000, count)]
        few = table.rows(some.to(table.f.device))
        centres = []
        for number in numbers.unique().tolist():
            mine = few.seen if labels is None else few.seen[class_labels(few.y, outputs) == number]
            centres.append(kmeans(mine if len(mine) else few.seen, int((numbers == number).sum()), generator))
        points = torch.cat(centres)
        spread = few.seen.std(0, correction=0)
        noise = normal(tuple(points.shape), generator, points)
        # Centres that fall on one another would make the kernel singular.
        points = points + 1e-3 * noise * units.varies
        usual = units.varies & (spread > 1e-3)  # of some data; in these units that of all is one
        if kind == "rbf":
            lengths = torch.where(usual, spread, 1) * math.sqrt(few.seen.shape[1])
        else:  # a length of nought, for one datum or many that are the same, would make the kernel huge
            lengths = spread.clamp_min(1e-3).mean().reshape(1) if bool(usual.any()) else torch.ones_like(spread[:1])
        # Logits are about nought and of the order of one; other outputs have the targets' own place and scale.
        logits = hasattr(likelihood, "link")
        size = torch.ones_like(table.f[0]) if logits else scale(likelihood, table)
        kernel = FreeKernel(kind, lengths.log().requires_grad_(), torch.diag(0.3 * size).requires_grad_())
        log_noise = None
        if likelihood.learns_dispersion:
            log_noise = likelihood.dispersion.detach().to(points).log().requires_grad_()
        state = State(
            kernel, points.requires_grad_(), numbers, torch.zeros(count).to(points).requires_grad_(), log_noise,
            Inducing.before_data(count, points),
        )  # fmt: skip
        shift = torch.zeros_like(table.f[0]) if logits else table.f.mean(0)
        return cls(method, likelihood, table, held, generator, state, shift, units)

    def run(self, progress: bool) -> tuple[State, tuple[Step, ...]]:
        method = self.method
        rate, state = method.learning_rate, self.state
        size = state.kernel.mixing.detach().diagonal().abs().mean()  # steps in the units of what they change
        rest = [t for t in state.free if t is not state.points and t is not state.kernel.mixing]
        optimiser = torch.optim.Adam(
            [
                {"params": [state.points], "lr": rate},
                {"params": [state.kernel.mixing], "lr": float(3 * rate * size)},
                {"params": rest, "lr": rate},
            ]
        )
        watch = None
        if self.held is not None:
            every = max(1, method.steps // 20)
            watch = EarlyStopping(lambda: (self._held_out(), self.state.copied()), every, method.patience)
        bar, steps = ProgressBar(range(method.steps), "fixed-mean process", progress), []
        with torch.inference_mode(False), torch.enable_grad():
            for step in bar:
                value = self._step(optimiser, 1.0 if step == 0 else max(0.05, 1 / (step + 1)))
                if not math.isfinite(value):
                    raise NumericalError(
                        f"FMGP: the objective is {value} at step {step}; expected a number. Lower learning_rate."
                    )
                noise = () if self.state.log_noise is None else (float(self.state.log_noise.detach().exp()),)
                steps.append(Step(-value, (), noise))
                bar.show(objective=value, KL=float(self.state.inducing.divergence()))
                if watch is not None and watch.should_stop(step):
                    break
        return self.units.undone(self.state.copied() if watch is None else watch.best_state), tuple(steps)

    def _step(self, optimiser: torch.optim.Optimizer, length: float) -> float:
        table, state = self.table, self.state
        draw = uniform((self.method.batch_size,), self.generator, torch.empty(0, dtype=torch.float64))
        part = table.rows((draw * len(table)).long().to(table.f.device))
        share = len(table) / len(part)
        before, rows = state.whitened(part)
        cov = state.inducing.left(before, rows)
        likelihood = state.likelihood(self.given)
        own = rows @ state.mean + self.shift  # what the second process expects
        watched = cov.detach().requires_grad_()
        gains = sum(energy(likelihood, 1.0, mean, watched, part.y).sum() for mean in (part.f, own.detach()))
        assert isinstance(gains, Tensor)
        weights = torch.autograd.grad(gains, watched)[0]
        energies = sum(energy(likelihood, 1.0, mean, cov, part.y).sum() for mean in (part.f, own))
        divergence = 2 * state.inducing.divergence() + 0.5 * state.mean.square().sum()
        value = divergence - share * energies
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        with torch.no_grad():  # both processes share the covariance: the average of what the two say
            still, omega = rows.detach(), -0.5 * (weights + weights.mT)
            gained = share * torch.einsum("bcr,bcd,bds->rs", still, omega, still)
            self.state = replace(state, inducing=state.inducing.updated(gained, length))
        return float(value.detach())

    def _held_out(self) -> float:
        assert self.held is not None
        with torch.no_grad():
            before, rows = self.state.whitened(self.held)
            cov = self.state.inducing.left(before, rows)
            belief = FunctionGaussian(self.held.f, cov)
            return float(self.state.likelihood(self.given).predict(belief).log_prob(self.held.y).mean())
