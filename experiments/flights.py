"""A large table: delays of flights, one network, every method whose cost does not grow with its square."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import lapwing as lw
from experiments.regression import Table, predicted, scores, tempered
from experiments.result import Result, Row, mean_scores, plain, spread_scores
from experiments.training import Batches, Recipe, batches, trained
from lapwing.errors import DataError

Options = Callable[[nn.Module, Batches], dict[str, Any]]  # the network and held-out batches -> what fit takes
METHODS: dict[str, Options] = {
    "plain": lambda model, held: {"method": lw.baselines.MapOnly()},
    "temperature": lambda model, held: {"method": lw.baselines.MapOnly(), "likelihood": tempered(model, held)},
    "last layer": lambda model, held: {"method": lw.Full(), "weights": "last_layer"},
    "Kron": lambda model, held: {},
    "Diagonal": lambda model, held: {"method": lw.Diagonal()},
    "ELLA": lambda model, held: {"method": lw.ELLA(2000, 20)},
    "ELLA with residual": lambda model, held: {"method": lw.ELLA(2000, 20, residual=True)},
    "VaLLA": lambda model, held: {"method": lw.VaLLA(100, optimiser="adam")},
    "VaLLA, alpha 1": lambda model, held: {"method": lw.VaLLA(100, alpha=1.0, steps=2000, validation=held)},
    "FMGP": lambda model, held: {"method": lw.FMGP(100, steps=4000, validation=held)},
}


@dataclass(frozen=True)
class Flights:
    """flights_nyc13.npz: eight columns, arrival delay in minutes; a tanh network 8-200-200-1, Adam, all standardised.

    A tenth of the training rows is kept from the posteriors, for what needs held-out rows; the network has seen it.
    """

    data_dir: Path
    methods: tuple[str, ...] = tuple(METHODS)
    recipe: Recipe = Recipe((200, 200), "tanh", 10, 10**9, 500, 3e-3, 1e-5)
    data: int | None = 100_000
    test: int = 20_000
    seeds: int = 3
    device: str = "cpu"
    seed: int = 0


def run(settings: Flights, report: Callable[[str], None] = lambda line: None) -> Result:
    """Every method on the same networks."""
    begun = time.perf_counter()
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(settings.seed, settings.seed + settings.seeds):
        table = _read(settings, seed)
        x, y = table.training
        model = trained(x, y, 1, settings.recipe, seed)
        count = len(x) // 10
        held, data = batches(x[:count], y[:count], 1000), batches(x[count:], y[count:], 1000)
        for name in settings.methods:
            start = time.perf_counter()
            options = {"likelihood": "regression", **METHODS[name](model, held)}
            generator = torch.Generator().manual_seed(seed)
            posterior = lw.fit(model, data, progress=False, generator=generator, **options)
            taken = time.perf_counter() - start
            mine = {**scores(predicted(posterior, table)), "fit s": taken}
            found.setdefault(name, []).append(mine)
            report(f"seed {seed}, {name}: { {k: float(f'{v:.4g}') for k, v in mine.items()} }")
    rows = tuple(Row(name, {**mean_scores(mine), **spread_scores(mine, ("NLL",))}) for name, mine in found.items())
    seconds = {"total": time.perf_counter() - begun}
    return Result("flights", plain(settings), settings.seed, rows, seconds)


def _read(settings: Flights, seed: int) -> Table:
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
    chosen = test[: settings.test]
    return Table(x[train].to(device), y[train].to(device), x[chosen].to(device), y[chosen].to(device))
