"""VaLLA as published: everything learned by Adam, and the network with the random numbers of the demonstration."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.inducing_task import Task
from experiments.options import Progress
from lapwing.demo.training import ACTIVATIONS, TrainingSettings
from lapwing.linalg.dense import kmeans
from lapwing.methods.inducing_points import Anchors
from lapwing.priors import prior_kernel


def trained_as_published(x: Tensor, y: Tensor, recipe: TrainingSettings, seed: int) -> nn.Sequential:
    """Train with the random numbers of the published demonstration, which the seed alone does not determine.

    Weights are drawn in float64, and batches come from a DataLoader that continues with the same global generator.
    """
    sizes, layers = (x.shape[1], *recipe.hidden, 1), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for d_in, d_out in pairwise(sizes):
            layers += [nn.Linear(d_in, d_out, dtype=torch.float64), ACTIVATIONS[recipe.activation]()]
        model = nn.Sequential(*layers[:-1])
        optimiser = torch.optim.Adam(model.parameters(), lr=recipe.learning_rate)
        loader = DataLoader(TensorDataset(x, y), batch_size=recipe.batch_size, shuffle=True)
        endless = (batch for _ in iter(int, 1) for batch in loader)
        for inputs, targets in islice(endless, recipe.max_steps):
            optimiser.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimiser.step()
    optimiser.zero_grad()
    return model.eval()


@dataclass(frozen=True, eq=False)
class State:
    """The published variant after some iterations."""

    variance: Tensor  # of f on the grid, (G,)
    gap: float  # from the bound to the exact log evidence
    seconds: float
    points: Tensor  # (M, 1)


@dataclass(frozen=True, eq=False)
class Published:
    """VaLLA with locations Z and a lower triangular factor L, both learned by Adam.

    With A = L (I + Lᵀ K L)⁻¹ Lᵀ the variance is k(x, x) - K_xZ A K_Zx, and KL = ½ log|I + Lᵀ K L| - ½ tr K A.
    """

    task: Task
    z: Tensor
    factor: Tensor

    @classmethod
    def started(cls, task: Task, count: int, generator: torch.Generator) -> Published:
        """Start from the centres of k-means and L = I."""
        z = kmeans(task.x, count, generator)
        return cls(task, z.requires_grad_(), torch.eye(count, dtype=z.dtype).requires_grad_())

    def _at(self, inputs: Tensor) -> Anchors:
        return Anchors(self.task.full.network, inputs, torch.zeros(len(inputs), dtype=torch.long))

    @cached_property
    def _anchors(self) -> Anchors:
        return self._at(self.z.detach())

    @cached_property
    def data(self) -> tuple[Anchors, Tensor]:
        """The data and their prior variance, (N,)."""
        return self._with_variance(self.task.x)

    @cached_property
    def grid(self) -> tuple[Anchors, Tensor]:
        """The grid and its prior variance, (G,)."""
        return self._with_variance(self.task.grid)

    def _with_variance(self, inputs: Tensor) -> tuple[Anchors, Tensor]:
        anchors = self._at(inputs)
        return anchors, anchors.kernel(self.task.full.prior).diagonal()

    def variance(self, inputs: Anchors, prior_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the posterior variance at some inputs, (N,), and KL."""
        prior, jacobian, lower = self.task.full.prior, self._anchors.differentiable(self.z), self.factor.tril()
        eye = torch.eye(len(lower), dtype=lower.dtype)
        root = torch.linalg.cholesky(eye + lower.mT @ prior_kernel(jacobian, prior) @ lower)
        inverse = torch.linalg.solve_triangular(root, eye, upper=False)
        explained = inverse @ lower.mT @ inputs.against(jacobian, prior)
        kl = root.diagonal().log().sum() - 0.5 * (len(eye) - inverse.square().sum())
        return prior_variance - explained.square().sum(0), kl

    def objective(self, rows: Tensor | None = None) -> Tensor:
        """Return n/b Σ v / (2σ²) + KL over a batch of b data, or over all data."""
        v, kl = self.variance(*self.data)
        batch = v if rows is None else v[rows]
        return len(v) / len(batch) * batch.sum() / (2 * self.task.noise) + kl

    def state(self, seconds: float) -> State:
        """Return variance, gap of the bound and locations as they are now."""
        posterior: Any = self.task.full.posterior
        penalty = float(posterior.problem.prior.penalty(posterior.theta.double()))
        least = -float(posterior.log_occam()) - 0.5 * penalty  # ½ log det (I + K/σ²)
        gap = float(self.objective().detach()) - least
        return State(self.variance(*self.grid)[0].detach(), gap, seconds, self.z.detach().clone())


@dataclass(frozen=True)
class Schedule:
    """How the published variant is learned: Adam with rate 1e-3 on batches, and the iterations to record."""

    points: int
    batch_size: int
    recorded: tuple[int, ...]
    seed: int


def learned_as_published(task: Task, schedule: Schedule, progress: Progress) -> dict[int, State]:
    """Learn from k-means and L = I; return the state after each recorded iteration."""
    generator = torch.Generator().manual_seed(schedule.seed)
    model = Published.started(task, schedule.points, generator)
    optimiser = torch.optim.Adam([model.z, model.factor], lr=1e-3)
    states: dict[int, State] = {}
    rows: list[Tensor] = []
    spent, last = 0.0, max(schedule.recorded)
    for step in range(1, last + 1):
        start = time.perf_counter()
        rows = rows or list(torch.randperm(len(task.x), generator=generator).split(schedule.batch_size))
        optimiser.zero_grad()
        model.objective(rows.pop()).backward(inputs=[model.z, model.factor])  # and not into the network's weights
        optimiser.step()
        spent += time.perf_counter() - start
        if step % 1000 == 0:
            progress(f"published variant: {step:,} of {last:,} iterations, {spent:.0f} s")
        if step in schedule.recorded:
            states[step] = model.state(spent)
    return states
