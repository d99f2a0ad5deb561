"""Fashion-MNIST: a prior chosen by cross-validation against one learned by the Kronecker evidence in training."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.data import Images, Shuffled, data_folder
from experiments.engine.contract import Record
from experiments.engine.seeds import parted, records_of, seed_units
from experiments.options import Progress, add_large_data, positive, silent
from experiments.pinned import PROBIT
from experiments.repeats import mean_scores, spread_scores
from lapwing import metrics
from lapwing.demo.result import ExperimentReport, Result, Row, plain
from lapwing.demo.training import TrainingSettings, mlp, optimise


@dataclass(frozen=True)
class Fashion:
    """Settings: a ReLU network with four hidden layers, as in Immer et al. 2021.

    *Cross-validation*: one network for each prior precision, trained on nine tenths of the images; the precision with
    the best likelihood on the rest is used to train on all. *Evidence*: one run, with a precision for each layer.
    """

    name: ClassVar[str] = "fashion"
    title: ClassVar[str] = "Fashion-MNIST: cross-validation against training with the evidence"
    choosing: ClassVar[tuple[str, ...]] = ("seeds",)

    data_dir: Path
    hidden: tuple[int, ...] = (1024, 512, 256, 128)
    epochs: int = 60
    batch_size: int = 1024
    learning_rate: float = 1e-3
    precisions: tuple[float, ...] = (1.0, 10.0, 30.0, 1e2, 3e2, 1e3)
    burn_in: int = 0
    frequency: int = 3
    hyper_steps: int = 100
    data: int | None = None  # training images; None takes all
    seeds: int = 3
    device: str = "cpu"
    seed: int = 0

    @classmethod
    def quick(cls) -> Fashion:
        """Return the settings of the quick form."""
        return cls(Path(), hidden=(100, 50), epochs=6, precisions=(1.0, 30.0), hyper_steps=20, data=5000, seeds=1)

    @classmethod
    def full(cls) -> Fashion:
        """Return the settings of the full form."""
        return cls(Path())

    def units(self) -> tuple[str, ...]:
        """Return a unit for each seed."""
        return seed_units(self)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Run the experiment with one seed."""
        _, seed = parted(unit)
        return records_of(run(replace(self, seeds=1, seed=seed), progress), seed)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_large_data(parser)
    parser.add_argument("--epochs", type=positive, default=60)


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    settings = Fashion(
        data_dir=data_folder(arguments.data_dir),
        epochs=arguments.epochs,
        data=arguments.data,
        seeds=arguments.seeds,
        device=arguments.device,
        seed=arguments.seed,
    )
    return ExperimentReport(arguments.out / "fashion.json", (run(settings, progress),))


def run(settings: Fashion, progress: Progress = silent) -> Result:
    """Score both ways for every seed."""
    start = time.perf_counter()
    scores_of: dict[str, list[dict[str, float]]] = {}
    notes = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        images = Images.read(settings.data_dir, "fashion_mnist", torch.device(settings.device), settings.data, seed)
        for name, scores, note in (_cross_validated(images, settings, seed), *_evidence(images, settings, seed)):
            scores_of.setdefault(name, []).append(scores)
            if note:
                notes.append(f"seed {seed}, {name}: {note}")
            progress(f"seed {seed}, {name}: {scores} {note}")
    rows = tuple(Row(name, {**mean_scores(each), **spread_scores(each)}) for name, each in scores_of.items())
    arrays = {f"{name}/{key}": [s[key] for s in each] for name, each in scores_of.items() for key in each[0]}
    seconds = {"total": time.perf_counter() - start}
    return Result("fashion", plain(settings), settings.seed, rows, seconds, arrays, tuple(notes))


def _cross_validated(images: Images, settings: Fashion, seed: int) -> tuple[str, dict[str, float], str]:
    """Return a name, the scores of the network with the best precision, and a note about that precision."""
    start = time.perf_counter()
    x, y = images.train
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    kept, held_out = order[len(x) // 10 :], order[: len(x) // 10]
    scores = {
        precision: metrics.categorical_nll(
            _softmax(_trained(x[kept], y[kept], precision, settings, seed), x[held_out]), y[held_out]
        )
        for precision in settings.precisions
    }
    best = min(scores, key=lambda precision: scores[precision])
    model = _trained(x, y, best, settings, seed)
    test_scores = _scores(_softmax(model, images.test[0]), images.test[1])
    return "cross-validation", {**test_scores, "seconds": time.perf_counter() - start}, f"precision {best:g}"


def _trained(x: Tensor, y: Tensor, precision: float, settings: Fashion, seed: int) -> nn.Module:
    """Train under a prior precision. The penalty ½ precision |w|² / N is an L2 decay of precision / N."""
    recipe = _recipe(settings)
    model = _network(settings, seed).to(x.device)
    optimise(model, x, y, replace(recipe, weight_decay=precision / len(x)), seed)
    return model


def _recipe(settings: Fashion) -> TrainingSettings:
    return TrainingSettings(
        settings.hidden, "relu", settings.epochs, 10**9, settings.batch_size, settings.learning_rate, weight_decay=0.0
    )


def _network(settings: Fashion, seed: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *mlp(784, 10, _recipe(settings), seed))


def _evidence(images: Images, settings: Fashion, seed: int) -> list[tuple[str, dict[str, float], str]]:
    """Return name, scores and note of the network that was trained with the evidence, and of its posterior."""
    start = time.perf_counter()
    x, y = images.train
    recipe = lw.recipes.online(
        settings.epochs,
        rate=settings.learning_rate,
        burn_in=settings.burn_in,
        frequency=settings.frequency,
        update=lw.tuners.Ascend(settings.hyper_steps),
        seed=seed,
    )
    data = Shuffled(x, y, settings.batch_size)
    trained = lw.train(_network(settings, seed).to(x.device), data, PROBIT, recipe=recipe, progress=False)
    taken = time.perf_counter() - start
    network_scores = _scores(_softmax(trained.model, images.test[0]), images.test[1])
    probs = torch.cat([trained.posterior.predict(part).probs for part in images.test[0].split(1000)])
    precisions = ", ".join(f"{value:.3g}" for value in trained.posterior.prior.values.tolist())
    return [
        ("evidence", {**network_scores, "seconds": taken}, f"precisions {precisions}"),
        ("evidence, posterior", {**_scores(probs, images.test[1]), "seconds": taken}, ""),
    ]


def _softmax(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part).softmax(-1) for part in x.split(5000)])


def _scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    return {
        "accuracy": metrics.accuracy(probs, y),
        "log-likelihood": -metrics.categorical_nll(probs, y),
        "ECE": metrics.ece(probs, y),
    }
