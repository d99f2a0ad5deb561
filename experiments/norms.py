"""Naive against corrected evidence in small: a classifier and a regression, without norms and with two kinds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

import lapwing as lw
from experiments.engine.contract import Record
from experiments.options import Progress
from lapwing import metrics
from lapwing.demo.training import TrainingSettings, optimise

NORMS: dict[str, Callable[[int], nn.Module] | None] = {
    "no norm": None,
    "BatchNorm": nn.BatchNorm1d,
    "LayerNorm": nn.LayerNorm,
}
TUNED: dict[str, Callable[[], dict[str, Any]]] = {  # arguments of lw.fit; a new tuner for each fit
    "naive, one precision": lambda: {"tuner": lw.tuners.MaximiseEvidence()},
    "corrected, one precision": lambda: {"tuner": lw.tuners.LinearMode()},
    "corrected, groups": lambda: {"tuner": lw.tuners.LinearMode(), "prior": lw.priors.per_normalised_group()},
    "corrected, g-prior": lambda: {"tuner": lw.tuners.LinearMode(), "prior": lw.priors.g_prior()},
}
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Norms:
    """Settings: 300 digits of scikit-learn with ``Kron``, and 100 points in three dimensions with ``Full``.

    The networks have two hidden layers of ``units`` units, and are trained without weight decay, so that they fit some
    of the noise. A seed draws the data and the network.
    """

    tasks: tuple[str, ...] = ("digits", "regression")
    norms: tuple[str, ...] = tuple(NORMS)
    units_of_layers: int = 24
    digits: int = 300
    points: int = 100
    test: int = 1000
    noise_std: float = 0.3
    epochs: int = 200
    seeds: int = 3
    seed: int = 0

    name: ClassVar[str] = "norms"
    title: ClassVar[str] = (
        "small networks without norms, with BatchNorm, with LayerNorm: naive against corrected evidence"
    )
    choosing: ClassVar[tuple[str, ...]] = ("tasks", "norms", "seeds")

    @classmethod
    def quick(cls) -> Self:
        """Return the quick form: one seed, few data and a small network."""
        return cls(units_of_layers=4, digits=60, points=30, test=100, epochs=20, seeds=1)

    @classmethod
    def full(cls) -> Self:
        """Return the full form."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return one unit for each task, norm and seed."""
        seeds = range(self.seed, self.seed + self.seeds)
        return tuple(f"{task}/{norm}/{seed}" for seed, task, norm in product(seeds, self.tasks, self.norms))

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train one network and score it with every posterior."""
        task, norm, number = unit.split("/")
        seed, group = int(number), f"{task}, {norm}"
        train, test = self._data(task, seed)
        model = self._network(train[0].shape[1], 10 if task == "digits" else 1, NORMS[norm], seed)
        recipe = TrainingSettings(epochs=self.epochs, batch_size=32, weight_decay=0.0)
        optimise(model, *train, recipe, seed)
        options: dict[str, Any] = {
            "likelihood": "classification" if task == "digits" else "regression",
            "progress": False,
        }
        method = lw.Kron() if task == "digits" else lw.Full()
        plain = lw.fit(model, [train], method=lw.baselines.MapOnly(), **options)
        yield Record(group, "plain", seed, _scores(plain, test))
        for name, arguments in TUNED.items():
            start = time.perf_counter()
            posterior = lw.fit(model, [train], method=method, **options, **arguments())
            seconds = time.perf_counter() - start
            progress(f"{unit}, {name}: {seconds:.1f} s")
            yield Record(group, name, seed, _scores(posterior, test), seconds)

    def _network(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module] | None, seed: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for d_in, d_out in pairwise((inputs, self.units_of_layers, self.units_of_layers)):
                layers += [nn.Linear(d_in, d_out), *([] if norm is None else [norm(d_out)]), nn.Tanh()]
            return nn.Sequential(*layers, nn.Linear(self.units_of_layers, outputs)).double()

    def _data(self, task: str, seed: int) -> tuple[Pair, Pair]:
        """Return training and test data."""
        generator = torch.Generator().manual_seed(seed)
        if task == "digits":
            from sklearn.datasets import load_digits

            x, y = map(torch.as_tensor, load_digits(return_X_y=True))
            rows = torch.randperm(len(x), generator=generator)
            train, test = rows.split([self.digits, len(x) - self.digits])
            x = x.double() / 16
            return (x[train], y[train].long()), (x[test[: self.test]], y[test[: self.test]].long())
        x = torch.randn(self.points + self.test, 3, generator=generator, dtype=torch.float64)
        y = torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:]
        y = y + self.noise_std * torch.randn(y.shape, generator=generator, dtype=torch.float64)
        return (x[: self.points], y[: self.points]), (x[self.points :], y[self.points :])


def _scores(posterior: lw.Fitted, test: Pair) -> dict[str, float]:
    """Return the NLL, and the ECE of classes or the coverage of 95 % intervals."""
    x, y = test
    predicted = posterior.predict(x)
    nll = float(-predicted.log_prob(y).mean())
    if not y.is_floating_point():
        return {"NLL": nll, "ECE": float(metrics.ece(predicted.probs, y))}
    low, high = predicted.interval(0.95)
    return {"NLL": nll, "coverage 95 %": float(metrics.coverage(low, high, y))}
