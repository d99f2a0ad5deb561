"""SWAG: a Gaussian fitted to the iterates of SGD (Maddox et al. 2019)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.inputs import Batch
from lapwing.data.streams import shuffle_batches, steps_of_pass
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.methods.base import NUMBER, Conformance, Cost, Method, Work, Workload, refuse_g_prior
from lapwing.posteriors.sampled import Drawn, mean_of
from lapwing.problem import Problem, Statistics, summed_loss
from lapwing.runtime.settings import BELOW_ONE, NONE, POSITIVE, Rule, integer, is_real, setting
from lapwing.runtime.states import ABOVE_ZERO, WEIGHTS, Array, State, saved, stored
from lapwing.runtime.threads import ProgressBar, derived_generator, normal

FIRST, HALVINGS = 0.1, 20  # learning rates to try: FIRST, halved up to HALVINGS times
SMALLEST = FIRST / 2**HALVINGS
NEAR, FAR = 0.1, 1.0  # limits on the rise of the loss (see Descent.run) for a rate chosen here, and for a given one
Moments = tuple[Tensor, Tensor, Tensor]  # mean and variance of the snapshots, (P,), and the last deviations, (R, P)
DECAY = Rule("a finite number of at least 0", lambda v: is_real(v) and 0 <= v < math.inf)


@dataclass(frozen=True)
class SWAG(Method):
    """A Gaussian fitted to the iterates of SGD, as a baseline.

    SGD with momentum goes on from the trained weights at a constant learning rate, on mini-batches of the mean loss.
    The posterior of the weights is N(mean of the snapshots, half their variances plus half the covariance of the last
    ``rank``). The model is not changed: a copy of its weights moves, in evaluation mode, so that normalisation layers
    keep their statistics. Predictions put draws of the weights into the network; their mean is not the network's
    output, and the noise of a regression is the residual of that mean.

    Args:
        snapshots: Number of iterates.
        rank: Number of last snapshots whose deviations are kept; at most ``snapshots``.
        learning_rate: Learning rate of SGD. None takes the largest of 0.1, 0.05, 0.025, ... under which the regularised
            loss over a pass stays within a tenth of a nat for each datum (or of the loss at the start if that is more).
        epochs_between: Passes over the data between snapshots.
        steps_between: Steps between snapshots, instead of passes.
        batch_size: Rows in a mini-batch.
        momentum: Momentum of SGD.
        weight_decay: Weight decay. None takes that of a given prior with precision A, φ A/n for the dispersion φ and n
            data, so that the objective is φ U(θ)/n; without a prior there is none.
        samples: Number of draws behind a prediction.
        seed: Seed of the mini-batches; draw k has the seed ``seed + k``.

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, for a g-prior, or if all data are one
            mini-batch.
        NumericalError: In ``fit``, if the loss rises too far at the given learning rate, or at every rate tried.

    Cost: ``snapshots`` epochs of training, and those that try a learning rate; ``rank`` + 2 numbers for each weight. A
    prediction takes ``samples`` forward passes.

    >>> from lapwing.api import fit
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> method = SWAG(snapshots=4, rank=2, batch_size=5)
    >>> bool((fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", method=method).functions(x).std > 0).all())
    True
    """

    snapshots: int = setting(30, integer(2))  # the spread of one snapshot is not defined
    rank: int = setting(20, integer(2))
    learning_rate: float | None = setting(None, POSITIVE | NONE)
    epochs_between: int = setting(1, integer())
    steps_between: int | None = setting(None, integer() | NONE)
    batch_size: int = setting(128, integer())
    momentum: float = setting(0.9, BELOW_ONE)
    weight_decay: float | None = setting(None, DECAY | NONE)
    samples: int = setting(32, integer(2))
    seed: int = setting(0, integer(0))
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="it is a Gaussian through iterates of SGD",
        small=lambda model: {"": SWAG(2, 2, learning_rate=1e-3, batch_size=2, samples=2)},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank > self.snapshots:
            raise UnsupportedError(
                f"rank is {self.rank} and snapshots {self.snapshots}; expected no more deviations than snapshots."
            )
        if self.steps_between is not None and self.epochs_between != 1:
            raise UnsupportedError(
                f"steps_between is {self.steps_between} and epochs_between {self.epochs_between}; expected one of them."
            )

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> DrawnPosterior:
        """Return the posterior; ``generator`` is not used, ``seed`` fixes the result."""
        posterior = self.collect(problem, data)
        statistics = summed_loss(mean_of(posterior.outputs), problem.likelihood, data, "outputs of a draw")
        problem = problem.with_residual_noise(statistics).with_known_prior()
        return replace(posterior, problem=problem, statistics=statistics)

    def collect(self, problem: Problem, data: Data) -> DrawnPosterior:
        """Return the posterior of the snapshots, still with the loss and the noise of the network itself."""
        start = summed_loss(problem.network, problem.likelihood, data)
        rate, moments = self._moments(Descent.of(self, problem.with_residual_noise(start), data, start))
        return DrawnPosterior(problem, start, problem.network.theta(), self.samples, self.seed, *moments, rate)

    def cost(self, workload: Workload) -> Cost:
        stored = workload.itemsize * (self.rank + 2) * workload.weights
        if 2 * workload.data < 3 * self.batch_size:
            return Cost.unsupported(f"{workload.data} data are one mini-batch of {self.batch_size}: lower batch_size")
        epochs: float = self.snapshots * self.epochs_between
        if self.steps_between is not None:
            epochs = self.snapshots * self.steps_between * self.batch_size / workload.data
        fit = Work(epochs * workload.training + (1 + self.samples) * workload.forward)
        steps = epochs * workload.data / self.batch_size
        once = Work(8 * NUMBER * steps * workload.weights)  # the optimiser's sums, in float64
        drawn = self.rank * workload.weights / workload.inputs  # once for all inputs
        predict = Work(self.samples * (workload.forward + drawn))
        peak = 8 * 4 * workload.weights + workload.activations
        trials = "" if self.learning_rate is not None else ", and those that try learning rates"
        return workload.cost(stored, peak, fit, predict, once, f"{epochs:.3g} epochs of SGD{trials}")

    def trial(self, workload: Workload) -> SWAG:
        """Return the method with a few steps, at a learning rate that is not tried first."""
        settings = {"snapshots": self.rank, "epochs_between": 1, "steps_between": 1}
        return replace(self, **settings, learning_rate=self.learning_rate or SMALLEST)

    def _moments(self, descent: Descent) -> tuple[float, Moments]:
        """Return the learning rate, which is chosen if none is given, and the moments of the snapshots."""
        if self.learning_rate is not None:
            moments, loss = descent.run(self.learning_rate, FAR)
            if moments is None:
                raise NumericalError(
                    f"SWAG: the regularised loss went from {descent.start:.4g} to {loss:.4g} at learning_rate="
                    f"{self.learning_rate:g}; expected it to stay near. Lower learning_rate, or leave it out."
                )
            return self.learning_rate, moments
        for halvings in range(HALVINGS + 1):
            rate = FIRST / 2**halvings
            moments, loss = descent.run(rate, NEAR)
            if moments is not None:
                return rate, moments
        raise NumericalError(
            f"SWAG: the regularised loss goes from {descent.start:.4g} to {loss:.4g} even at a learning rate of "
            f"{rate:.2g}; expected one at which it stays near. Scale inputs and targets, lower weight_decay, or give "
            "learning_rate."
        )


@dataclass(frozen=True, eq=False)
class Descent:
    """SGD on the regularised loss: the mean loss at unit dispersion, plus ½ Σ decay (θ - μ)²."""

    settings: SWAG
    problem: Problem
    data: Data
    loss: float  # the mean loss at w̃
    gap: Tensor  # w̃ - μ, (P,) in float64
    decay: Tensor  # (P,), or () if it is the same for all weights
    epoch: int  # steps in one pass over the data
    progress: bool

    @classmethod
    def of(cls, settings: SWAG, problem: Problem, data: Data, start: Statistics) -> Descent:
        """Return the descent from the network's weights; raise if all data fit in one mini-batch."""
        quiet = replace(data, progress=False)  # there is one progress bar, for the steps
        epoch = steps_of_pass(quiet, settings.batch_size)
        if epoch == 1:
            raise UnsupportedError(
                f"all {start.data} data are one mini-batch of batch_size={settings.batch_size}; expected several: "
                "without noise in the gradient SGD has no spread. Lower batch_size."
            )
        gap = problem.network.theta().double() - problem.prior.mean
        decay = _decay(settings, problem, start.data)
        return cls(settings, problem, quiet, start.loss / start.data, gap, decay, epoch, data.progress)

    @property
    def start(self) -> float:
        """The regularised loss at w̃."""
        return self.loss + self._penalty(torch.zeros_like(self.gap))

    def _penalty(self, d: Tensor) -> float:
        return 0.5 * float((self.decay * (self.gap + d).square()).sum())

    def run(self, rate: float, most: float) -> tuple[Moments | None, float]:
        """Run SGD at a learning rate; return the moments of its snapshots, and the loss over the last pass.

        The moments are None if the regularised loss over a pass rises by more than ``most`` nats for each datum, or by
        ``most`` times the mean loss at the start if that is more.
        """
        settings, network = self.settings, self.problem.network
        allowed = self.start + most * max(abs(self.loss), float(self.problem.likelihood.dispersion))
        between = settings.steps_between or settings.epochs_between * self.epoch
        order = derived_generator(torch.Generator().manual_seed(settings.seed), torch.empty(0))
        batches = shuffle_batches(self.data, settings.batch_size, order, fresh=True)
        d, velocity = torch.zeros_like(self.gap), torch.zeros_like(self.gap)
        total, moments = settings.snapshots * between, RunningMoments(d, settings.rank, network.dtype)
        recent: deque[tuple[float, int]] = deque(maxlen=self.epoch)  # losses and counts of the mini-batches of a pass
        bar = ProgressBar(range(total), "snapshots", self.progress)
        for step in bar:
            loss, count, slope = self._slope(next(batches), d)
            recent.append((loss + count * self._penalty(d), count))
            velocity = settings.momentum * velocity + slope + self.decay * (self.gap + d)
            d = d - rate * velocity
            if (step + 1) % between == 0:
                moments.add(d)
            passed = (step + 1) % self.epoch == 0 or step + 1 == total < self.epoch
            if not math.isfinite(loss) or (passed and not _mean(recent) <= allowed):
                return None, _mean(recent)
            bar.show(loss=loss / count)
        if not bool(torch.isfinite(d).all()):
            return None, _mean(recent)
        return moments.value(), _mean(recent)

    def _slope(self, batch: Batch, d: Tensor) -> tuple[float, int, Tensor]:
        """Return loss and count of a mini-batch, and the gradient of its mean loss, (P,) in float64."""
        network = self.problem.network
        with torch.enable_grad():
            weights = {name: value.requires_grad_() for name, value in network.weights(d).items()}
            loss, count = self.problem.batch_loss(weights, batch)
            grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
        full = torch.cat([(g.to_dense() if g.is_sparse else g).reshape(-1).double() for g in grads])
        return float(loss.detach()), count, network.selection.pick(full) / count


def _decay(settings: SWAG, problem: Problem, count: float) -> Tensor:
    """Return the given weight decay; else that of a given prior, φ A/n; else zero."""
    prior = problem.prior
    if settings.weight_decay is not None or problem.learn_prior:
        return torch.tensor(settings.weight_decay or 0.0, dtype=torch.float64)
    refuse_g_prior(settings, prior)
    return problem.likelihood.dispersion.to(prior.vector) * prior.vector / count


def _mean(losses: deque[tuple[float, int]]) -> float:
    """Return the mean loss of one datum, from the summed losses and counts of mini-batches."""
    return sum(loss for loss, _ in losses) / sum(count for _, count in losses)


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

    def value(self) -> Moments:
        """Return mean (P,) and variance (P,) of all snapshots, and the deviations of the last from the mean, (R, P)."""
        mean = self._mean.to(self._dtype)
        variance = (self._squares / (self._count - 1)).to(self._dtype)
        return mean, variance, torch.stack(list(self._last)) - mean


def _refuse_one(deviations: Tensor) -> str:
    """Check that there are several deviations (R, P)."""
    return "" if len(deviations) > 1 else "SWAG has fewer than two deviations; expected two or more"


@saved
@dataclass(frozen=True, eq=False)
class DrawnPosterior(Drawn):
    """The outputs of the network under draws from the Gaussian of the snapshots.

    θ - w̃ ~ N(mean, ½ diag(variance) + ½ DᵀD/(R - 1)) with the R rows of D, at R P multiplications for a draw.
    """

    mean: Tensor = stored(WEIGHTS)
    variance: Tensor = stored(replace(WEIGHTS, least=0))
    last_deviations: Tensor = stored(Array(("K", "P"), dtype="weights", also=_refuse_one))  # D, (R, P)
    learning_rate: float = stored(ABOVE_ZERO)  # of the SGD that the draws come from

    def draw_step(self, generator: torch.Generator | None) -> Tensor:
        independent = normal(tuple(self.mean.shape), generator, self.mean)
        shared = normal((len(self.last_deviations),), generator, self.mean)
        correlated = shared @ self.last_deviations / (len(self.last_deviations) - 1) ** 0.5
        return self.mean + 0.5**0.5 * (self.variance.sqrt() * independent + correlated)

    def state(self) -> State:
        return _rename_tensor(super().state(), "last_deviations", "deviations")

    @classmethod
    def from_state(cls, state: State, owner: Any = None) -> Any:
        return super().from_state(_rename_tensor(state, "deviations", "last_deviations"), owner)


def _rename_tensor(state: State, old: str, new: str) -> State:
    """Return the state with another name for one tensor: files had theirs before ``Posterior.deviations``."""
    return replace(state, tensors={new if name == old else name: each for name, each in state.tensors.items()})
