"""Nine regression tables with their standard splits: does the posterior help, and are its intervals honest?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.regression import Table, predicted, scores, tempered
from experiments.result import Result, Row, mean_scores, plain
from experiments.training import Batches, Recipe, batches, best_seconds, epoch_seconds, trained
from lapwing.errors import DataError

SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"method": lw.baselines.MapOnly()},
    "temperature": {"method": lw.baselines.MapOnly()},
    "default": {},
    "per layer": {"prior": lw.per_layer(1.0), "tuner": lw.tuners.MaximiseEvidence()},
    "joint noise": {"tuner": lw.tuners.MaximiseEvidence(noise=True)},
    "full": {"method": lw.Full()},
    "ELLA": {"method": lw.ELLA(1000, 20)},
    "ELLA with residual": {"method": lw.ELLA(1000, 20, residual=True)},
    "VaLLA": {"method": lw.VaLLA(50)},
    "VaLLA, alpha 1": {"method": lw.VaLLA(50, alpha=1.0)},
    "FMGP": {"method": lw.FMGP(50)},
    "MC dropout": {"method": lw.baselines.MCDropout(64)},
    "SWAG": {"method": lw.baselines.SWAG(weight_decay=Recipe().weight_decay)},
}
USUAL = ("plain", "default", "per layer", "joint noise", "full")
DROPPED = 0.05  # of the units of the network for MC dropout, which is trained with it


@dataclass(frozen=True)
class Uci:
    """One recipe for all tables. ``variants`` are compared on the same trained networks; two train their own.

    A table with fewer than ``splits`` splits gives those that it has.
    """

    data_dir: Path
    sets: tuple[str, ...] = SETS
    splits: int = 3
    variants: tuple[str, ...] = USUAL
    recipe: Recipe = Recipe()
    seed: int = 0


def run(settings: Uci, report: Callable[[str], None] = lambda line: None) -> Result:
    """Scores of every variant on every table found; ``report`` hears about progress, line by line."""
    begun = time.perf_counter()
    rows: list[Row] = []
    arrays: dict[str, list[float]] = {}
    notes: list[str] = []
    for name in settings.sets:
        path = settings.data_dir / f"uci_{name}.npz"
        if not path.exists():
            notes.append(f"{name}: skipped, {path.name} is not in the data folder")
            report(notes[-1])
            continue
        found = [_split(path, split, settings) for split in range(min(settings.splits, splits_in(path)))]
        for variant in settings.variants:
            mine = [each[variant] for each in found]
            rows.append(Row(variant, mean_scores(mine), name))
            arrays.update({f"{name}/{variant}/{key}": [each[key] for each in mine] for key in mine[0]})
        report(f"{name}: done after {time.perf_counter() - begun:.0f} s")
    if not rows:
        raise DataError(f"none of {', '.join(settings.sets)} is in {settings.data_dir}; expected uci_NAME.npz files.")
    notes += improvements(rows)
    means = [_mean_row(variant, rows) for variant in settings.variants]
    seconds = {"total": time.perf_counter() - begun}
    return Result("uci", plain(settings), settings.seed, (*rows, *means), seconds, arrays, tuple(notes))


def improvements(rows: list[Row]) -> list[str]:
    """For each variant the number of tables on which its mean NLL is below that of the plain network."""
    base = {row.group: row.scores["NLL"] for row in rows if row.name == "plain"}
    lines = []
    for variant in dict.fromkeys(row.name for row in rows if row.name != "plain"):
        mine = [row for row in rows if row.name == variant and row.group in base]
        better = sum(row.scores["NLL"] < base[row.group] for row in mine)
        lines.append(f"{variant}: lower NLL than the plain network on {better} of {len(mine)} tables")
    return lines if base else []


def _mean_row(variant: str, rows: list[Row]) -> Row:
    """Over the tables; only of scores that do not carry the units of y with them, or only as a shift."""
    comparable = ("NLL", "coverage 95 %", "fit / epoch")
    mine = [{name: row.scores[name] for name in comparable} for row in rows if row.name == variant]
    return Row(variant, mean_scores(mine), "mean")


def _split(path: Path, split: int, settings: Uci) -> dict[str, dict[str, float]]:
    """The scores of every variant around one trained network."""
    table = read_split(path, split)
    x, y = table.training
    model = trained(x, y, 1, settings.recipe, settings.seed + split)
    data = batches(x, y, settings.recipe.batch_size)
    epoch = epoch_seconds(model, data)
    own = {"MC dropout": _dropping, "temperature": _tempered}
    found = {}
    for variant in settings.variants:
        network, likelihood = own[variant](x, y, settings, split) if variant in own else (model, lw.Gaussian())
        options = {"likelihood": likelihood, **VARIANTS[variant]}
        found[variant] = _scored(network, data, table, options, epoch)
    return found


def _dropping(x: Tensor, y: Tensor, settings: Uci, split: int) -> tuple[nn.Module, lw.Gaussian]:
    """The same network trained with dropout."""
    return trained(x, y, 1, replace(settings.recipe, dropout=DROPPED), settings.seed + split), lw.Gaussian()


def _tempered(x: Tensor, y: Tensor, settings: Uci, split: int) -> tuple[nn.Module, lw.Gaussian]:
    """The same network trained on nine tenths of the rows; the others choose its noise."""
    seed = settings.seed + split
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held, rest = order.tensor_split([len(x) // 10])
    model = trained(x[rest], y[rest], 1, settings.recipe, seed)
    return model, tempered(model, [(x[held], y[held])])


def _scored(model: nn.Module, data: Batches, table: Table, options: dict[str, Any], epoch: float) -> dict[str, float]:
    taken, fitted = best_seconds(lambda: lw.fit(model, data, progress=False, **options), repeats=1)
    return {**scores(predicted(fitted, table)), "fit / epoch": taken / epoch}


def splits_in(path: Path) -> int:
    """How many standard splits a file has: train_0, train_1 and so on."""
    with np.load(path, allow_pickle=False) as file:
        count = 0
        while f"train_{count}" in file:
            count += 1
    return max(count, 1)  # a file without any is refused when its first is read


def read_split(path: Path, split: int) -> Table:
    """Rows ``train_N`` and ``test_N`` of a table with the keys X and y."""
    with np.load(path, allow_pickle=False) as file:
        missing = [key for key in ("X", "y", f"train_{split}", f"test_{split}") if key not in file]
        if missing:
            raise DataError(f"{path.name} lacks {', '.join(missing)}; expected X, y, train_{split} and test_{split}.")
        x, y = (torch.from_numpy(file[key].astype(np.float64)) for key in ("X", "y"))
        train, test = (torch.from_numpy(file[f"{part}_{split}"].astype(np.int64)) for part in ("train", "test"))
    y = y.reshape(-1)
    return Table(x[train], y[train], x[test], y[test])
