"""The learned quantities: kernel, inducing points, noise, and the distribution of the process at the points."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.core.pool import class_labels
from lapwing.core.random import normal, uniform
from lapwing.core.trace import Step, Trace
from lapwing.likelihoods.protocol import Likelihood
from lapwing.linalg.kmeans import kmeans
from lapwing.linalg.variational import Inducing
from lapwing.linalg.whitening import smooth_whitening
from lapwing.losses import Statistics
from lapwing.methods.fmgp.kernels import KERNELS, FreeKernel
from lapwing.methods.fmgp.posterior import FunctionPosterior, Sight
from lapwing.methods.fmgp.table import Table, Units, output_scale
from lapwing.problem import Problem


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
        points = _centres(some, numbers, outputs, generator)
        noise = normal(tuple(points.shape), generator, points)
        points = points + 1e-3 * noise * varies  # equal centres would make the kernel singular
        lengths = _initial_lengths(some.u, varies, KERNELS[kind].length_per_column)
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

    def whitened(self, table: Table) -> tuple[Tensor, Tensor]:
        """Return the prior covariance (B, C, C) and the whitened rows (B, C, M) of some data."""
        rows = self.kernel.between(table.u, self.points, self.numbers) @ self.whitening()
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
        values, vectors = torch.linalg.eigh(self.inducing.decided)
        mix = self.whitening() @ (vectors * values.clamp_min(0).sqrt())
        theta, trace = problem.network.theta(), Trace("FMGP", "objective", steps)
        return FunctionPosterior(problem, sight, self.kernel, self.points, self.numbers, mix, statistics, theta, trace)


def _centres(table: Table, numbers: Tensor, outputs: int, generator: torch.Generator) -> Tensor:
    """Return k-means centres, (M, D): for each output as many as it has points, from the data of its class."""
    labels = class_labels(table.y, outputs)
    centres = []
    for number in numbers.unique().tolist():
        members = table.u if labels is None else table.u[labels == number]
        centres.append(kmeans(members if len(members) else table.u, int((numbers == number).sum()), generator))
    return torch.cat(centres)


def _initial_lengths(u: Tensor, varies: Tensor, per_column: bool) -> Tensor:
    """Return length-scales (D,) or (1,) from the spread of features u (n, D); one for features without spread."""
    spread = u.std(0, correction=0)
    usual = varies & (spread > 1e-3)  # of these rows; over all data the spread is one
    if per_column:
        return torch.where(usual, spread, 1) * math.sqrt(u.shape[1])
    return spread.clamp_min(1e-3).mean().reshape(1) if bool(usual.any()) else torch.ones_like(spread[:1])
