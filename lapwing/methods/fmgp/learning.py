"""Learning by Adam on kernel, points and noise, and by natural gradients on the distribution at the points."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.progress import EarlyStopping, ProgressBar
from lapwing.core.random import uniform
from lapwing.core.trace import Step
from lapwing.errors import NumericalError
from lapwing.likelihoods.energies import energy
from lapwing.likelihoods.protocol import Likelihood
from lapwing.methods.fmgp.state import State
from lapwing.methods.fmgp.table import Table, output_level


@dataclass(frozen=True)
class Schedule:
    """The number of steps, the learning rate and the batches of the learning."""

    steps: int
    learning_rate: float
    batch_size: int
    patience: int  # evaluations of held-out data without a better one before learning stops


@dataclass(eq=False)
class Learning:
    """Maximisation of the predictive log-likelihood of two processes with one covariance, minus their divergences.

    One process has the network's mean, the other a mean in the span of the points; see docs/methods/fmgp.md.
    """

    schedule: Schedule
    given: Likelihood
    table: Table
    held_out: Table | None
    generator: torch.Generator
    state: State

    @cached_property
    def shift(self) -> Tensor:
        """The mean of the second process before any data, (C,)."""
        return output_level(self.given, self.table)

    def run(self, progress: bool) -> tuple[State, tuple[Step, ...]]:
        """Return the last state, or the best one on held-out data, and the objective at every step."""
        optimiser = self._optimiser()
        stopping = None
        if self.held_out is not None:
            every = max(1, self.schedule.steps // 20)
            look = lambda: (self.held_out_score(), self.state.copied())
            stopping = EarlyStopping(look, every, self.schedule.patience)
        bar, steps = ProgressBar(range(self.schedule.steps), "fixed-mean process", progress), []
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
        rate, state = self.schedule.learning_rate, self.state
        size = state.kernel.mixing.detach().diagonal().abs().mean()
        rest = [t for t in state.free if t is not state.points and t is not state.kernel.mixing]
        return torch.optim.Adam(
            [
                {"params": [state.points], "lr": rate},
                {"params": [state.kernel.mixing], "lr": float(3 * rate * size)},
                {"params": rest, "lr": rate},
            ]
        )

    def step(self, optimiser: torch.optim.Optimizer, length: float) -> float:
        """Take one step of both kinds on a mini-batch and return the objective before it.

        ``length`` is that of the natural-gradient step, at most one.
        """
        table, state = self.table, self.state
        draw = uniform((self.schedule.batch_size,), self.generator, torch.empty(0, dtype=torch.float64))
        part = table.rows((draw * len(table)).long().to(table.f.device))
        share = len(table) / len(part)
        prior, rows = state.whitened(part)
        cov = state.inducing.left(prior, rows)
        likelihood = state.likelihood(self.given)
        second = rows @ state.mean + self.shift  # the mean of the second process
        fixed = cov.detach().requires_grad_()
        gains = sum(energy(likelihood, 1.0, mean, fixed, part.y).sum() for mean in (part.f, second.detach()))
        assert isinstance(gains, Tensor)
        weights = torch.autograd.grad(gains, fixed)[0]
        energies = sum(energy(likelihood, 1.0, mean, cov, part.y).sum() for mean in (part.f, second))
        divergence = 2 * state.inducing.divergence() + 0.5 * state.mean.square().sum()
        value = divergence - share * energies
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        with torch.no_grad():  # both processes share the covariance, so its update is the average of the two
            rows, omega = rows.detach(), -0.5 * (weights + weights.mT)
            gained = share * torch.einsum("bcr,bcd,bds->rs", rows, omega, rows)
            self.state = replace(state, inducing=state.inducing.updated(gained, length))
        return float(value.detach())

    def held_out_score(self) -> float:
        """Return the mean predictive log-likelihood of the held-out data."""
        assert self.held_out is not None
        with torch.no_grad():
            cov = self.state.inducing.left(*self.state.whitened(self.held_out))
            belief = FunctionGaussian(self.held_out.f, cov)
            return float(self.state.likelihood(self.given).predict(belief).log_prob(self.held_out.y).mean())
