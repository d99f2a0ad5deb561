"""Learning by Adam on kernel, points and noise, and by natural gradients on the distribution at the points."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.memory import runs
from lapwing.core.pool import class_labels
from lapwing.core.progress import EarlyStopping, ProgressBar
from lapwing.core.random import normal, uniform
from lapwing.core.spectra import eigh
from lapwing.core.trace import Step, Trace
from lapwing.errors import NumericalError
from lapwing.likelihoods.energies import energy
from lapwing.likelihoods.protocol import Likelihood
from lapwing.linalg.kmeans import centres_by_class
from lapwing.linalg.variational import Inducing
from lapwing.linalg.whitening import smooth_whitening
from lapwing.methods.fmgp.features import Sight, Table, Units
from lapwing.methods.fmgp.posterior import KERNELS, FreeKernel, FunctionPosterior
from lapwing.problem import Problem, Statistics

if TYPE_CHECKING:
    from lapwing.methods.fmgp.fmgp import FMGP

STEP = 24  # float64 copies of the covariance of the outputs that a step holds for each datum


@dataclass(frozen=True, eq=False)
class State:
    """All learned quantities."""

    kernel: FreeKernel
    points: Tensor  # (M, D)
    numbers: Tensor  # (M,), the output that each point belongs to
    mean: Tensor  # of the second process at the points, whitened, (M,)
    log_noise: Tensor | None  # None if the noise is given
    inducing: Inducing

    @classmethod
    def initial(
        cls, kind: str, likelihood: Likelihood, table: Table, varies: Tensor, num_inducing: int,
        generator: torch.Generator,
    ) -> State:  # fmt: skip
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

    def copied(self) -> State:
        """Return a copy that later steps do not change."""
        copy = lambda t: t.detach().clone()
        kernel = FreeKernel(self.kernel.kind, copy(self.kernel.log_lengths), copy(self.kernel.mixing))
        noise = None if self.log_noise is None else copy(self.log_noise)
        return State(kernel, copy(self.points), self.numbers, copy(self.mean), noise, self.inducing)

    def whitening(self) -> Tensor:
        """Return W (M, M) with W Wᵀ = K_Z⁻¹; ``inducing`` is in these coordinates, so the jitter must not change."""
        return smooth_whitening(self.kernel.points(self.points, self.numbers), jitter=1e-6)

    def whitened(self, table: Table, white: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the prior covariance (B, C, C) and the whitened rows (B, C, M) of some data."""
        rows = self.kernel.between(table.u, self.points, self.numbers) @ (self.whitening() if white is None else white)
        return self.kernel.marginal(table.u), rows

    def likelihood(self, given: Likelihood) -> Likelihood:
        """Return the likelihood with the learned noise."""
        return given if self.log_noise is None else given.with_dispersion(self.log_noise.exp())

    def in_features(self, units: Units) -> State:
        """Return the state in the units of the features themselves."""
        lengths = self.kernel.log_lengths + units.size.log()[: len(self.kernel.log_lengths)]
        kernel = replace(self.kernel, log_lengths=lengths)
        return replace(self, kernel=kernel, points=self.points * units.size + units.centre)

    def posterior(
        self, problem: Problem, sight: Sight, statistics: Statistics, steps: tuple[Step, ...]
    ) -> FunctionPosterior:
        """Return the posterior that this state stands for; the second process is dropped."""
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


def output_scale(likelihood: Likelihood, table: Table) -> Tensor:
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
    table: Table
    held_out: Table | None
    generator: torch.Generator
    state: State

    @cached_property
    def shift(self) -> Tensor:
        """The mean of the second process before any data, (C,): zero for logits, else the mean of the outputs."""
        f = self.table.f
        return torch.zeros_like(f[0]) if self.given.has_logits else f.mean(0)

    def run(self, progress: bool) -> tuple[State, tuple[Step, ...]]:
        """Return the last state, or the best one on held-out data, and the objective at every step."""
        optimiser = self._optimiser()
        total, patience = self.settings.steps, self.settings.patience
        stopping = None
        if self.held_out is not None:
            look = lambda: (self.held_out_score(), self.state.copied())
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
        return self.state.copied() if stopping is None else stopping.best_state, tuple(steps)

    def _optimiser(self) -> torch.optim.Optimizer:
        """Return Adam, with a step for the mixing matrix that is proportional to its size."""
        rate, mixing = self.settings.learning_rate, self.state.kernel.mixing
        size = float(mixing.detach().diagonal().abs().mean())
        others = [t for t in self.state.free if t is not mixing]
        return torch.optim.Adam([{"params": others, "lr": rate}, {"params": [mixing], "lr": 3 * rate * size}])

    def step(self, optimiser: torch.optim.Optimizer, length: float) -> float:
        """Take one step of both kinds on a mini-batch and return the objective before it.

        ``length`` is that of the natural-gradient step, at most one.
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
            prior, rows = state.whitened(part, white)
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
        self.state = replace(state, inducing=state.inducing.updated(information, length))
        return value + float(divergence.detach())

    def _parts(self, count: int) -> Iterator[slice]:
        """Yield parts of a mini-batch whose covariances, and their graph, fit the byte budget."""
        outputs, points = self.table.f.shape[-1], len(self.state.points)
        each = 8 * outputs * (6 * points + STEP * outputs)
        return runs(count, each, self.table.f.device)

    def held_out_score(self) -> float:
        """Return the mean predictive log-likelihood of the held-out data."""
        assert self.held_out is not None
        with torch.no_grad():
            total, white = 0.0, self.state.whitening()
            for some in self._parts(len(self.held_out)):
                part = self.held_out.rows(some)
                cov = self.state.inducing.posterior_cov(*self.state.whitened(part, white))
                belief = FunctionGaussian(part.f, cov)
                total += float(self.state.likelihood(self.given).predict(belief).log_prob(part.y).sum())
            return total / len(self.held_out)
