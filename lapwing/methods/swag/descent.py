"""SGD that goes on from the trained weights, and the moments of its iterates."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.core.data import Batch, Data
from lapwing.core.pool import shuffled
from lapwing.core.progress import ProgressBar
from lapwing.core.random import derived_generator
from lapwing.errors import UnsupportedError
from lapwing.losses import Statistics
from lapwing.problem import Problem


@dataclass(frozen=True)
class Schedule:
    """Settings of SGD, and the steps after which snapshots are taken."""

    snapshots: int
    rank: int  # number of last snapshots whose deviations are kept
    epochs_between: int
    steps_between: int | None  # takes the place of ``epochs_between``
    batch_size: int
    momentum: float
    seed: int  # of the order of the mini-batches


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of the snapshots, as steps from the trained weights w̃."""

    mean: Tensor  # (P,)
    variance: Tensor  # (P,)
    deviations: Tensor  # of the last R snapshots from the mean, (R, P)


@dataclass(frozen=True, eq=False)
class Descent:
    """SGD on the regularised loss: the mean loss at unit dispersion, plus ½ Σ decay (θ - μ)²."""

    schedule: Schedule
    problem: Problem
    data: Data
    loss: float  # the mean loss at w̃
    gap: Tensor  # w̃ - μ, (P,) in float64
    decay: Tensor  # (P,), or () if it is the same for all weights
    epoch: int  # steps in one pass over the data
    progress: bool

    @classmethod
    def of(
        cls, schedule: Schedule, problem: Problem, data: Data, start: Statistics, weight_decay: float | None
    ) -> Descent:
        """Return the descent from the network's weights; raise if all data fit in one mini-batch."""
        quiet = replace(data, progress=False)  # there is one progress bar, for the steps
        size, count = schedule.batch_size, sum(len(batch.targets) for batch in quiet.batches("counting"))
        epoch = max(1, (2 * count + size) // (2 * size))
        if epoch == 1:
            raise UnsupportedError(
                f"all {start.data} data are one mini-batch of batch_size={size}; expected several: without noise in "
                "the gradient SGD has no spread. Lower batch_size."
            )
        gap, decay = problem.network.theta().double() - problem.prior.mean, _decay(weight_decay, problem, start.data)
        return cls(schedule, problem, quiet, start.loss / start.data, gap, decay, epoch, data.progress)

    @property
    def start(self) -> float:
        """The regularised loss at w̃."""
        return self.loss + self._penalty(torch.zeros_like(self.gap))

    def _penalty(self, d: Tensor) -> float:
        return 0.5 * float((self.decay * (self.gap + d).square()).sum())

    def run(self, rate: float, most: float) -> tuple[Moments | None, float]:
        """Run SGD at a learning rate; return the moments and the regularised loss over the last pass.

        The moments are None if the loss over a pass rises by more than ``most`` nats for each datum, or by ``most``
        times the mean loss at the start if that is more.
        """
        schedule, network = self.schedule, self.problem.network
        allowed = self.start + most * max(abs(self.loss), float(self.problem.likelihood.dispersion))
        between = schedule.steps_between or schedule.epochs_between * self.epoch
        order = derived_generator(torch.Generator().manual_seed(schedule.seed), torch.empty(0))
        batches = shuffled(self.data, schedule.batch_size, order, fresh=True)
        d, velocity = torch.zeros_like(self.gap), torch.zeros_like(self.gap)
        total, running = schedule.snapshots * between, RunningMoments(d, schedule.rank, network.dtype)
        recent = RecentLoss(self.epoch)
        bar = ProgressBar(range(total), "snapshots", self.progress)
        for step in bar:
            loss, count, slope = self._slope(next(batches), d)
            recent.add(loss + count * self._penalty(d), count)
            velocity = schedule.momentum * velocity + slope + self.decay * (self.gap + d)
            d = d - rate * velocity
            if (step + 1) % between == 0:
                running.add(d)
            passed = (step + 1) % self.epoch == 0 or step + 1 == total < self.epoch
            if not math.isfinite(loss) or (passed and not recent.mean() <= allowed):
                return None, recent.mean()
            bar.show(loss=loss / count)
        return running.moments() if bool(torch.isfinite(d).all()) else None, recent.mean()

    def _slope(self, batch: Batch, d: Tensor) -> tuple[float, int, Tensor]:
        """Return loss and count of a mini-batch, and the gradient of its mean loss, (P,) in float64."""
        network, likelihood = self.problem.network, self.problem.likelihood
        with torch.enable_grad():
            weights = {name: value.requires_grad_() for name, value in network.weights(d).items()}
            f = network.under(weights, batch.inputs).to(network.dtype)
            y = likelihood.targets(f, batch.targets)
            loss, count = likelihood.loss(f, y).sum(), max(int(likelihood.count(f, y)), 1)
            grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
        full = torch.cat([(g.to_dense() if g.is_sparse else g).reshape(-1).double() for g in grads])
        return float(loss.detach()), count, network.selection.picked(full) / count


def _decay(weight_decay: float | None, problem: Problem, count: int) -> Tensor:
    """Return the given weight decay; else that of a given prior, φ A/n; else zero."""
    prior = problem.prior
    if weight_decay is not None:
        return torch.tensor(weight_decay, dtype=torch.float64)
    if problem.learn_prior:
        return torch.tensor(0.0, dtype=torch.float64)
    if prior.needs_curvature:
        raise UnsupportedError("a g-prior follows the curvature, which SWAG() does not have; use isotropic().")
    return problem.likelihood.dispersion.to(prior.vector) * prior.vector / count


class RecentLoss:
    """The mean loss over the last ``steps`` mini-batches, which may differ in size."""

    def __init__(self, steps: int) -> None:
        self._losses: deque[tuple[float, int]] = deque(maxlen=steps)

    def add(self, loss: float, count: int) -> None:
        """Add the summed loss of a mini-batch of ``count`` data."""
        self._losses.append((loss, count))

    def mean(self) -> float:
        """Return the mean loss of one datum."""
        return sum(loss for loss, _ in self._losses) / sum(count for _, count in self._losses)


class RunningMoments:
    """Mean and variance of the snapshots so far, in float64, and the last ``rank`` of them in ``dtype``."""

    def __init__(self, like: Tensor, rank: int, dtype: torch.dtype) -> None:
        self._count, self._mean, self._squares = 0, torch.zeros_like(like), torch.zeros_like(like)
        self._last: deque[Tensor] = deque(maxlen=rank)
        self._dtype = dtype

    def add(self, d: Tensor) -> None:
        """Add a snapshot, (P,)."""
        self._count += 1
        before = d - self._mean
        self._mean = self._mean + before / self._count
        self._squares += before * (d - self._mean)
        self._last.append(d.to(self._dtype))

    def moments(self) -> Moments:
        """Return the moments of all snapshots."""
        mean = self._mean.to(self._dtype)
        variance = (self._squares / (self._count - 1)).to(self._dtype)
        return Moments(mean, variance, torch.stack(list(self._last)) - mean)
