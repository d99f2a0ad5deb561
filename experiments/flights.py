"""A large table, delays of flights: one network, and every method whose cost is not quadratic in the data."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

import lapwing as lw
from experiments.data import data_folder
from experiments.engine.contract import Record
from experiments.engine.seeds import parted, records_of, seed_units
from experiments.options import Progress, add_large_data, chosen, silent
from experiments.pinned import EVIDENCE, as_fitted
from experiments.repeats import mean_scores, spread_scores
from experiments.uci import tempered
from lapwing.demo.result import ExperimentReport, Result, Row, plain
from lapwing.demo.training import Batches, SplitTable, TrainingSettings, batches, predict, scores, train_mlp
from lapwing.errors import DataError

Options = Callable[[nn.Module, Batches], dict[str, Any]]  # network and held-out batches -> arguments of lw.fit
METHODS: dict[str, Options] = {
    "plain": lambda model, held_out: {"method": lw.baselines.MapOnly()},
    "temperature": lambda model, held_out: {"method": lw.baselines.MapOnly(), "likelihood": tempered(model, held_out)},
    "last layer": lambda model, held_out: {"method": lw.Full(), "weights": "last_layer", "tuner": EVIDENCE},
    "Kron": lambda model, held_out: {"tuner": EVIDENCE},
    "Diagonal": lambda model, held_out: {"method": lw.Diagonal(), "tuner": EVIDENCE},
    "ELLA": lambda model, held_out: {"method": lw.ELLA(2000, 20), "tuner": EVIDENCE},
    "ELLA with residual": lambda model, held_out: {
        "method": lw.ELLA(2000, 20, residual=True),
        "tuner": EVIDENCE,
    },
    "VaLLA": lambda model, held_out: {"method": lw.VaLLA(100, optimiser="adam"), "tuner": EVIDENCE},
    "VaLLA, alpha 1": lambda model, held_out: {
        "method": lw.VaLLA(100, alpha=1.0, steps=2000),
        "validation": held_out,
    },
    "FMGP": lambda model, held_out: {"method": lw.FMGP(100, steps=4000), "validation": held_out},
}


@dataclass(frozen=True)
class Flights:
    """Settings: eight columns of flights_nyc13.npz, arrival delay in minutes; a tanh network 8-200-200-1, standardised.

    A tenth of the training rows is not used by the posteriors but by methods that need held-out rows. The network was
    trained on them too.
    """

    name: ClassVar[str] = "flights"
    title: ClassVar[str] = "arrival delays: a large table, every method for regression"
    choosing: ClassVar[tuple[str, ...]] = ("seeds",)

    data_dir: Path
    methods: tuple[str, ...] = tuple(METHODS)
    recipe: TrainingSettings = TrainingSettings((200, 200), "tanh", 10, 10**9, 500, 3e-3, 1e-5)
    data: int | None = 100_000
    test: int = 20_000
    seeds: int = 3
    device: str = "cpu"
    seed: int = 0

    @classmethod
    def quick(cls) -> Flights:
        """Return the settings of the quick form."""
        recipe = replace(cls.recipe, hidden=(50, 50), epochs=3)
        fast = tuple(
            name for name in METHODS if name not in ("VaLLA, alpha 1", "FMGP")
        )  # which take thousands of steps
        return cls(Path(), fast, recipe, data=5000, test=1000, seeds=1)

    @classmethod
    def full(cls) -> Flights:
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
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="methods to compare; all by default")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    settings = Flights(
        data_dir=data_folder(arguments.data_dir),
        methods=chosen(arguments.methods, tuple(METHODS), "--methods"),
        data=arguments.data or 100_000,
        seeds=arguments.seeds,
        device=arguments.device,
        seed=arguments.seed,
    )
    return ExperimentReport(arguments.out / "flights.json", (run(settings, progress),))


def run(settings: Flights, progress: Progress = silent) -> Result:
    """Score every method on the same networks."""
    begin = time.perf_counter()
    scores_of: dict[str, list[dict[str, float]]] = {}
    for seed in range(settings.seed, settings.seed + settings.seeds):
        table = _read(settings, seed)
        x, y = table.training
        model = train_mlp(x, y, 1, settings.recipe, seed)
        count = len(x) // 10
        held_out, data = batches(x[:count], y[:count], 1000), batches(x[count:], y[count:], 1000)
        for name in settings.methods:
            start = time.perf_counter()
            options = {"likelihood": "regression", **METHODS[name](model, held_out)}
            generator = torch.Generator().manual_seed(seed)
            posterior = lw.fit(model, data, progress=False, generator=generator, **options).tuned(as_fitted)
            taken = time.perf_counter() - start
            of_seed = {**scores(predict(posterior, table), table.y_test), "fit s": taken}
            scores_of.setdefault(name, []).append(of_seed)
            progress(f"seed {seed}, {name}: { {k: float(f'{v:.4g}') for k, v in of_seed.items()} }")
    rows = tuple(Row(name, {**mean_scores(each), **spread_scores(each, ("NLL",))}) for name, each in scores_of.items())
    seconds = {"total": time.perf_counter() - begin}
    return Result("flights", plain(settings), settings.seed, rows, seconds)


def _read(settings: Flights, seed: int) -> SplitTable:
    """Read a random part of the training rows, and the first test rows."""
    path = settings.data_dir / "flights_nyc13.npz"
    if not path.exists():
        raise DataError(f"{path.name} is not in the data folder; expected keys X, y and test.")
    with np.load(path, allow_pickle=False) as file:
        x, y = (torch.from_numpy(file[key].astype(np.float64)) for key in ("X", "y"))
        test = torch.from_numpy(file["test"].astype(np.int64))
    y = y.reshape(-1)
    rest = torch.ones(len(x), dtype=torch.bool)
    rest[test] = False
    order = torch.randperm(int(rest.sum()), generator=torch.Generator().manual_seed(seed))[: settings.data]
    train = rest.nonzero().squeeze(1)[order]
    device = torch.device(settings.device)
    test = test[: settings.test]
    return SplitTable(x[train].to(device), y[train].to(device), x[test].to(device), y[test].to(device))
