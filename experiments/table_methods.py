"""The methods that are compared on one split of a table, and their scores."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.engine.contract import Record
from experiments.options import Progress
from experiments.pinned import EVIDENCE
from experiments.stacked import StackedTraining, trained_stack
from lapwing import metrics
from lapwing.demo.training import SplitTable
from lapwing.errors import CalibrationWarning, DivergedError, LapwingError

NORMAL_95 = 1.959964  # a normal variable is within this many standard deviations of its mean with probability 95 %
JOINT = lw.tuners.MaximiseEvidence(noise=True)
SHARE = 10  # the subnetwork is one weight of so many
SLOW = ("ensemble", "SWAG", "HFL")
METHODS = (
    "MAP", "linearised", "sampled network", "subnetwork", "Kron", "diagonal", "last layer", "ELLA", "VaLLA",
    "MC dropout", *SLOW,
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much work the methods do."""

    samples: int = 100  # of the weights, of dropout masks and of SWAG
    landmarks: int = 500  # of ELLA
    directions: int = 20
    inducing: int = 100  # points of VaLLA
    inducing_steps: int = 150
    snapshots: int = 30  # of SWAG, 20 steps apart
    pushes: int = 16  # of HFL
    push_steps: int = 500


@dataclass(frozen=True, eq=False)
class Belief:
    """Mean and variance of the outputs at the test rows, (B,), and the variance of the noise; standardised units."""

    mean: Tensor
    variance: Tensor
    noise: float

    @classmethod
    def of(cls, posterior: lw.Fitted, x: Tensor, noise: float) -> Belief:
        """Return the belief of a posterior at some inputs."""
        with torch.no_grad():
            functions = posterior.functions(x)
        return cls(functions.mean[:, 0], functions.variance[:, 0], noise)

    def scores(self, table: SplitTable) -> dict[str, float]:
        """Return the scores in the units of the table. The predictive is normal, with the sum of both variances."""
        units, y = table.scale_y, table.y_test
        mean = self.mean * units.std + units.mean
        std = (self.variance + self.noise).sqrt() * units.std
        low, high = mean - NORMAL_95 * std, mean + NORMAL_95 * std
        return {
            "log-likelihood": -metrics.normal_nll(mean, std, y),
            "RMSE": metrics.rmse(mean, y),
            "coverage 95 %": metrics.coverage(low, high, y),
            "noise std": math.sqrt(self.noise) * float(units.std),
        }


@dataclass(frozen=True, eq=False)
class Task:
    """One split with its trained networks, and the noise that the methods share.

    ``inflation`` is the noise variance over the mean squared residual of the first network.
    """

    table: SplitTable
    training: StackedTraining
    sizes: Sizes
    model: nn.Sequential
    others: list[nn.Sequential]  # the rest of the ensemble
    dropping: nn.Sequential
    exact: lw.Fitted  # linearised, all weights
    seconds: float  # of training one network
    exact_seconds: float
    inflation: float
    seed: int

    @classmethod
    def trained(cls, table: SplitTable, training: StackedTraining, sizes: Sizes, seed: int, members: int) -> Task:
        """Train ``members`` networks and one with dropout, and fit the exact posterior of the first."""
        x, y = table.training
        start = time.perf_counter()
        networks = trained_stack(x, y, training, seed, members, 1)
        seconds = (time.perf_counter() - start) / len(networks)
        start = time.perf_counter()
        exact = _exact(networks[0], x, y)
        inflation = float(exact.likelihood.dispersion) / _mean_square(networks[0](x) - y)
        taken = time.perf_counter() - start
        return cls(
            table, training, sizes, networks[0], networks[1:-1], networks[-1], exact, seconds, taken, inflation, seed
        )  # fmt: skip

    @property
    def noise(self) -> float:
        """The noise variance of the evidence."""
        return float(self.exact.likelihood.dispersion)

    @property
    def x_test(self) -> Tensor:
        """The standardised test inputs."""
        return self.table.scale_x(self.table.x_test)

    def fit(self, method: Any, model: nn.Module | None = None, **options: Any) -> lw.Fitted:
        """Fit a method with the noise of the evidence; the precision is learned, unless one is given."""
        likelihood = lw.Gaussian(noise_std=self.noise**0.5)
        generator = torch.Generator().manual_seed(self.seed)
        return lw.fit(
            model or self.model, [self.table.training], likelihood, method=method, generator=generator, progress=False,
            **options,
        )  # fmt: skip


def records(task: Task, group: str, split: int, methods: tuple[str, ...], progress: Progress) -> Iterator[Record]:
    """Yield the scores of every method. A method that raises an error of Lapwing is left out, with a line that says so.

    Seconds do not count the training of the first network, nor, for "sampled network", the exact posterior.
    """
    for method in methods:
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CalibrationWarning)  # the scores say the same
                belief, before = _beliefs(method)(task)
        except LapwingError as error:
            progress(f"{group}, split {split}, {method}: {error}")
            continue
        seconds = time.perf_counter() - start + before
        yield Record(group, method, split, belief.scores(task.table), seconds)


def _beliefs(method: str) -> Callable[[Task], tuple[Belief, float]]:
    """Return the function that gives the belief of a method, and the seconds that were spent on it before."""
    if method in LINEARISED:
        return lambda task: (_of(task, task.fit(tuner=EVIDENCE, **LINEARISED[method](task.sizes))), 0.0)
    return {
        "MAP": lambda task: (_of(task, task.fit(lw.baselines.MapOnly())), 0.0),
        "linearised": lambda task: (_of(task, task.exact), task.exact_seconds),
        "sampled network": lambda task: (_sampled(task), 0.0),
        "subnetwork": lambda task: (_of(task, _subnetwork(task)), 0.0),
        "MC dropout": lambda task: (_dropout(task), task.seconds),
        "ensemble": lambda task: (_ensemble(task), task.seconds * len(task.others)),
        "SWAG": lambda task: (_swag(task), 0.0),
        "HFL": lambda task: (_of(task, _pushed(task)), 0.0),
    }[method]


LINEARISED: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "Kron": lambda sizes: {"method": lw.Kron()},
    "diagonal": lambda sizes: {"method": lw.Diagonal()},
    "last layer": lambda sizes: {"method": lw.Full(), "weights": lw.last_layer},
    "ELLA": lambda sizes: {"method": lw.ELLA(sizes.landmarks, sizes.directions)},
    "VaLLA": lambda sizes: {
        "method": lw.VaLLA(sizes.inducing, start="greedy", optimiser="adam", steps=sizes.inducing_steps)
    },
}


def _exact(model: nn.Module, x: Tensor, y: Tensor) -> lw.Fitted:
    """Return the linearised posterior over all weights; the evidence chooses precision and noise.

    Where the evidence has no optimum in both, the noise is the mean squared residual.
    """
    few = len(x) < sum(p.numel() for p in model.parameters())
    method = lw.KernelSpace() if few else lw.Full()  # the same posterior
    posterior = lw.fit(model, [(x, y)], "regression", method=method, prior=1.0, progress=False)
    # Tuned afterwards: a tuner in ``fit`` is judged by predictions at all training rows, which takes as long again.
    try:
        return posterior.tuned(JOINT)
    except DivergedError:
        return posterior.tuned(EVIDENCE)


def _of(task: Task, posterior: lw.Fitted) -> Belief:
    return Belief.of(posterior, task.x_test, task.noise)


def _sampled(task: Task) -> Belief:
    """Put weights drawn from the exact posterior into the network itself, not into the tangent model."""
    generator = torch.Generator().manual_seed(task.seed)
    outputs = task.exact.network_samples(task.x_test, task.sizes.samples, generator)[..., 0]
    return Belief(outputs.mean(0), outputs.var(0), task.noise)


def _subnetwork(task: Task) -> lw.Fitted:
    """Return the exact posterior over the tenth of the weights with the largest variances under ``Diagonal``."""
    diagonal: Any = task.fit(lw.Diagonal(), tuner=EVIDENCE).posterior
    variances = diagonal.precision.variances()
    largest = variances.topk(max(1, len(variances) // SHARE)).indices.sort().values
    return task.fit(lw.Full(), weights=lw.subnetwork(largest), prior=1.0).tuned(EVIDENCE)


def _residual_noise(task: Task, posterior: lw.Fitted) -> float:
    """Return the noise of a method with another mean: its mean squared residual, inflated as for all."""
    x, y = task.table.training
    with torch.no_grad():
        return task.inflation * _mean_square(posterior.functions(x).mean - y)


def _dropout(task: Task) -> Belief:
    posterior = task.fit(lw.baselines.MCDropout(task.sizes.samples), task.dropping)
    return Belief.of(posterior, task.x_test, _residual_noise(task, posterior))


def _ensemble(task: Task) -> Belief:
    posterior = task.fit(lw.baselines.Ensemble(task.others))
    return Belief.of(posterior, task.x_test, _residual_noise(task, posterior))


def _swag(task: Task) -> Belief:
    """Go on from the trained weights by SGD with the prior of the training."""
    sizes, rows = task.sizes, len(task.table.x_train)
    method = lw.baselines.SWAG(
        sizes.snapshots, min(20, sizes.snapshots), steps_between=20, batch_size=min(64, rows // 4),
        weight_decay=task.training.precision * task.noise / rows, samples=sizes.samples,
    )  # fmt: skip
    posterior = task.fit(method)
    return Belief.of(posterior, task.x_test, _residual_noise(task, posterior))


def _pushed(task: Task) -> lw.Fitted:
    """Return random pushes by Adam, under the precision of the exact posterior, however far they have converged."""
    method = lw.HFL(
        "pretrained", variant="random", solver="adam", pushes=task.sizes.pushes, steps=task.sizes.push_steps,
        tolerance=math.inf, drift=math.inf,
    )  # fmt: skip
    return task.fit(method, prior=float(task.exact.prior.values))


def _mean_square(residuals: Tensor) -> float:
    return float(residuals.detach().square().mean())
