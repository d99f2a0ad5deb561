"""A Gaussian through the iterates of SGD (Maddox et al. 2019): what training would do next, as error bars."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.data import Batch, Data
from lapwing.core.pool import shuffled
from lapwing.core.progress import ProgressBar
from lapwing.core.random import derived_generator
from lapwing.core.settings import is_real, require_integer, require_positive
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.losses import Statistics, summed_loss
from lapwing.methods.protocol import Conformance, Cost, Workload
from lapwing.methods.swag.draws import DrawnPosterior, Draws
from lapwing.posteriors.members import mean_of
from lapwing.problem import Problem

FIRST, HALVINGS = 0.1, 20  # the rates that are tried where none is given
NEAR, FAR = 0.1, 1.0  # how far the loss may rise, see Descent.run: where the rate is chosen here; where it is given


@dataclass(frozen=True)
class SWAG:
    """N(mean of ``snapshots`` iterates of SGD, half their variances and half the covariance of the last ``rank``).

    SGD with momentum goes on from the trained weights at a constant rate, on mini-batches of the mean loss, and is
    looked at after every ``epochs_between`` passes (or ``steps_between`` steps). ``learning_rate=None`` takes the
    largest of 0.1, 0.05, 0.025, ... under which the regularised loss over a pass stays within a tenth of a nat for each
    datum (of the loss at the start, if that is more). The model is not changed: a copy of its weights moves, in
    evaluation mode, so that normalisation keeps its statistics.

    ``weight_decay=None`` is that of a given prior, φ A/n, so that the objective is U(θ)/n times the dispersion φ;
    without a prior there is none. Predictions are those of ``samples`` draws, the seeds ``seed + k``; their mean is not
    the model's own output, and the noise of a regression is its residual.

    Cost: ``snapshots`` epochs of training, and those that try a rate; ``rank`` + 2 numbers for each weight. A
    prediction takes ``samples`` forward passes.

    >>> from lapwing.api import fit
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> method = SWAG(snapshots=4, rank=2, batch_size=5)
    >>> bool((fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", method=method).functions(x).std > 0).all())
    True
    """

    snapshots: int = 30
    rank: int = 20
    learning_rate: float | None = None
    epochs_between: int = 1
    steps_between: int | None = None
    batch_size: int = 128
    momentum: float = 0.9
    weight_decay: float | None = None
    samples: int = 32
    seed: int = 0
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="it is a Gaussian through iterates of SGD",
        small=lambda model: {"": SWAG(2, 2, learning_rate=1e-3, batch_size=2, samples=2)},
    )

    def __post_init__(self) -> None:
        for name in ("snapshots", "rank", "samples"):
            require_integer(name, getattr(self, name), least=2)  # one has no spread
        for name in ("epochs_between", "batch_size"):
            require_integer(name, getattr(self, name))
        require_integer("seed", self.seed, least=0)
        if self.steps_between is not None:
            require_integer("steps_between", self.steps_between)
        if self.learning_rate is not None:
            require_positive("learning_rate", self.learning_rate)
        if self.rank > self.snapshots:
            raise UnsupportedError(
                f"rank is {self.rank} and snapshots {self.snapshots}; expected no more deviations than snapshots."
            )
        if self.steps_between is not None and self.epochs_between != 1:
            raise UnsupportedError(
                f"steps_between is {self.steps_between} and epochs_between {self.epochs_between}; expected one of them."
            )
        if not is_real(self.momentum) or not 0 <= self.momentum < 1:
            raise UnsupportedError(f"momentum is {self.momentum!r:.80}; expected a number from 0 up to, but not, 1.")
        decay = self.weight_decay
        if decay is not None and not (is_real(decay) and 0 <= decay < math.inf):
            raise UnsupportedError(f"weight_decay is {decay!r:.80}; expected a number from 0 on, or None.")

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> DrawnPosterior:
        network = problem.network
        start = summed_loss(network, problem.likelihood, data)
        moments, rate = self._collected(Descent.of(self, problem.with_residual_noise(start), data, start))
        draws = Draws(network, moments.mean, moments.variance, moments.deviations, self.samples, self.seed)
        statistics = summed_loss(mean_of(draws), problem.likelihood, data, "outputs of a draw")
        problem = problem.with_residual_noise(statistics).with_known_prior()
        return DrawnPosterior(problem, draws, statistics, network.theta(), rate)

    def cost(self, workload: Workload) -> Cost:
        stored = workload.itemsize * (self.rank + 2) * workload.weights
        if 2 * workload.data < 3 * self.batch_size:
            note = f"{workload.data} data are one mini-batch of {self.batch_size}: lower batch_size"
            return Cost(stored, 0.0, note, supported=False)
        epochs: float = self.snapshots * self.epochs_between
        if self.steps_between is not None:
            epochs = self.snapshots * self.steps_between * self.batch_size / workload.data
        work = epochs * workload.training + (1 + self.samples) * workload.forward
        trials = "" if self.learning_rate is not None else ", and those that try learning rates"
        return workload.cost(stored, work, f"{epochs:.3g} epochs of SGD{trials}")

    def _collected(self, descent: Descent) -> tuple[Moments, float]:
        if self.learning_rate is not None:
            found, loss = descent.run(self.learning_rate, FAR)
            if found is None:
                raise NumericalError(
                    f"SWAG: the regularised loss went from {descent.start:.4g} to {loss:.4g} at learning_rate="
                    f"{self.learning_rate:g}; expected it to stay near. Lower learning_rate, or leave it out."
                )
            return found, self.learning_rate
        for halvings in range(HALVINGS + 1):
            rate = FIRST / 2**halvings
            found, loss = descent.run(rate, NEAR)
            if found is not None:
                return found, rate
        raise NumericalError(
            f"SWAG: the regularised loss goes from {descent.start:.4g} to {loss:.4g} even at a rate of {rate:.2g}; "
            "expected one at which it stays near. Scale inputs and targets, lower weight_decay, or give learning_rate."
        )


@dataclass(frozen=True, eq=False)
class Moments:
    """Of the snapshots, as steps from w̃: mean (P,), variance (P,), deviations of the last of them (R, P)."""

    mean: Tensor
    variance: Tensor
    deviations: Tensor


@dataclass(frozen=True, eq=False)
class Descent:
    """SGD on the regularised loss: the mean loss at unit dispersion, and half the decay times (θ - μ)²."""

    method: SWAG
    problem: Problem
    data: Data
    loss: float  # the mean loss at w̃
    gap: Tensor  # w̃ - μ, (P,) in float64
    decay: Tensor  # (P,), or () where it is one for all
    epoch: int  # steps in a pass over the data
    shown: bool

    @classmethod
    def of(cls, method: SWAG, problem: Problem, data: Data, start: Statistics) -> Descent:
        quiet = replace(data, progress=False)  # there is one bar for all steps
        size, count = method.batch_size, sum(len(batch.targets) for batch in quiet.batches("counting"))
        epoch = max(1, (2 * count + size) // (2 * size))
        if epoch == 1:
            raise UnsupportedError(
                f"all {start.data} data are one mini-batch of batch_size={size}; expected several: without noise in "
                "the gradient SGD has no spread. Lower batch_size."
            )
        gap, decay = problem.network.theta().double() - problem.prior.mean, _decay(method, problem, start.data)
        return cls(method, problem, quiet, start.loss / start.data, gap, decay, epoch, data.progress)

    @property
    def start(self) -> float:
        """The regularised loss at w̃."""
        return self.loss + self._penalty(torch.zeros_like(self.gap))

    def _penalty(self, d: Tensor) -> float:
        return 0.5 * float((self.decay * (self.gap + d).square()).sum())

    def run(self, rate: float, most: float) -> tuple[Moments | None, float]:
        """(moments, the regularised loss over the last pass); no moments where that rises too far.

        That is by more than ``most`` nats, or times the mean loss at the start where there are more nats in that.
        """
        method, network = self.method, self.problem.network
        allowed = self.start + most * max(abs(self.loss), float(self.problem.likelihood.dispersion))
        between = method.steps_between or method.epochs_between * self.epoch
        order = derived_generator(torch.Generator().manual_seed(method.seed), torch.empty(0))
        batches = shuffled(self.data, method.batch_size, order, fresh=True)
        d, velocity = torch.zeros_like(self.gap), torch.zeros_like(self.gap)
        total, running, recent = method.snapshots * between, Running(d, method.rank, network.dtype), Recent(self.epoch)
        bar = ProgressBar(range(total), "snapshots", self.shown)
        for step in bar:
            loss, count, slope = self._slope(next(batches), d)
            recent.add(loss + count * self._penalty(d), count)
            velocity = method.momentum * velocity + slope + self.decay * (self.gap + d)
            d = d - rate * velocity
            if (step + 1) % between == 0:
                running.add(d)
            passed = (step + 1) % self.epoch == 0 or step + 1 == total < self.epoch
            if not math.isfinite(loss) or (passed and not recent.mean() <= allowed):
                return None, recent.mean()
            bar.show(loss=loss / count)
        return running.moments() if bool(torch.isfinite(d).all()) else None, recent.mean()

    def _slope(self, batch: Batch, d: Tensor) -> tuple[float, int, Tensor]:
        """Loss and count of a mini-batch, and the gradient of its mean loss, (P,) in float64."""
        network, likelihood = self.problem.network, self.problem.likelihood
        with torch.enable_grad():
            weights = {name: value.requires_grad_() for name, value in network.weights(d).items()}
            f = network.under(weights, batch.inputs).to(network.dtype)
            y = likelihood.targets(f, batch.targets)
            loss, count = likelihood.loss(f, y).sum(), max(int(likelihood.count(f, y)), 1)
            grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
        full = torch.cat([(g.to_dense() if g.is_sparse else g).reshape(-1).double() for g in grads])
        return float(loss.detach()), count, network.selection.picked(full) / count


class Recent:
    """The mean over as many steps as there are in a pass: mini-batches may differ in size."""

    def __init__(self, steps: int) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=steps)

    def add(self, loss: float, count: int) -> None:
        self._seen.append((loss, count))

    def mean(self) -> float:
        return sum(loss for loss, _ in self._seen) / sum(count for _, count in self._seen)


class Running:
    """Mean and squared deviations of the snapshots so far, in float64, and the last of them in ``dtype``."""

    def __init__(self, like: Tensor, rank: int, dtype: torch.dtype) -> None:
        self._count, self._mean, self._squares = 0, torch.zeros_like(like), torch.zeros_like(like)
        self._last: deque[Tensor] = deque(maxlen=rank)
        self._dtype = dtype

    def add(self, d: Tensor) -> None:
        self._count += 1
        before = d - self._mean
        self._mean = self._mean + before / self._count
        self._squares += before * (d - self._mean)
        self._last.append(d.to(self._dtype))

    def moments(self) -> Moments:
        mean = self._mean.to(self._dtype)
        variance = (self._squares / (self._count - 1)).to(self._dtype)
        return Moments(mean, variance, torch.stack(list(self._last)) - mean)


def _decay(method: SWAG, problem: Problem, count: int) -> Tensor:
    prior = problem.prior
    if method.weight_decay is not None:
        return torch.tensor(method.weight_decay, dtype=torch.float64)
    if problem.learn_prior:
        return torch.tensor(0.0, dtype=torch.float64)
    if prior.needs_curvature:
        raise UnsupportedError("a g-prior follows the curvature, which SWAG() does not have; use isotropic().")
    return problem.likelihood.dispersion.to(prior.vector) * prior.vector / count
