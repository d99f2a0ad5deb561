"""SWAG: settings and fit (Maddox et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from lapwing.core.data import Data
from lapwing.core.settings import is_real, require_integer, require_positive
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.losses import summed_loss
from lapwing.methods.protocol import Conformance, Cost, Workload
from lapwing.methods.swag.descent import Descent, Moments, Schedule
from lapwing.methods.swag.draws import DrawnPosterior, Draws
from lapwing.posteriors.members import mean_of
from lapwing.problem import Problem

FIRST, HALVINGS = 0.1, 20  # learning rates to try: FIRST, halved up to HALVINGS times
NEAR, FAR = 0.1, 1.0  # limits on the rise of the loss (see Descent.run) for a rate chosen here, and for a given one


@dataclass(frozen=True)
class SWAG:
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
            raise UnsupportedError(f"momentum is {self.momentum!r:.80}; expected a number of at least 0 and below 1.")
        decay = self.weight_decay
        if decay is not None and not (is_real(decay) and 0 <= decay < math.inf):
            raise UnsupportedError(f"weight_decay is {decay!r:.80}; expected a finite number of at least 0, or None.")

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> DrawnPosterior:
        """Return the posterior; ``generator`` is not used, ``seed`` fixes the result."""
        network = problem.network
        start = summed_loss(network, problem.likelihood, data)
        schedule = Schedule(
            self.snapshots,
            self.rank,
            self.epochs_between,
            self.steps_between,
            self.batch_size,
            self.momentum,
            self.seed,
        )
        descent = Descent.of(schedule, problem.with_residual_noise(start), data, start, self.weight_decay)
        moments, rate = self._moments(descent)
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

    def _moments(self, descent: Descent) -> tuple[Moments, float]:
        """Return the moments and the learning rate, which is chosen if none is given."""
        if self.learning_rate is not None:
            moments, loss = descent.run(self.learning_rate, FAR)
            if moments is None:
                raise NumericalError(
                    f"SWAG: the regularised loss went from {descent.start:.4g} to {loss:.4g} at learning_rate="
                    f"{self.learning_rate:g}; expected it to stay near. Lower learning_rate, or leave it out."
                )
            return moments, self.learning_rate
        for halvings in range(HALVINGS + 1):
            rate = FIRST / 2**halvings
            moments, loss = descent.run(rate, NEAR)
            if moments is not None:
                return moments, rate
        raise NumericalError(
            f"SWAG: the regularised loss goes from {descent.start:.4g} to {loss:.4g} even at a learning rate of "
            f"{rate:.2g}; expected one at which it stays near. Scale inputs and targets, lower weight_decay, or give "
            "learning_rate."
        )
