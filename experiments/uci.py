"""Nine regression tables with their standard splits: does the posterior help, and is the coverage right?"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.data import data_folder
from experiments.options import Progress, add_data_dir, chosen, positive, silent
from experiments.pinned import EVIDENCE, as_fitted
from experiments.repeats import best_seconds, mean_scores
from lapwing.demo.result import ExperimentReport, Result, Row, plain
from lapwing.demo.training import (
    Batches,
    SplitTable,
    TrainingSettings,
    batches,
    loss_of,
    predict,
    scores,
    train_mlp,
)
from lapwing.errors import DataError

SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"method": lw.baselines.MapOnly()},
    "temperature": {"method": lw.baselines.MapOnly()},
    "default": {"tuner": EVIDENCE},
    "per layer": {"prior": lw.per_layer(1.0), "tuner": EVIDENCE},
    "joint noise": {"tuner": lw.tuners.MaximiseEvidence(noise=True)},
    "full": {"method": lw.Full(), "tuner": EVIDENCE},
    "ELLA": {"method": lw.ELLA(1000, 20), "tuner": EVIDENCE},
    "ELLA with residual": {"method": lw.ELLA(1000, 20, residual=True), "tuner": EVIDENCE},
    "VaLLA": {"method": lw.VaLLA(50), "tuner": EVIDENCE},
    "VaLLA, alpha 1": {"method": lw.VaLLA(50, alpha=1.0), "tuner": as_fitted},
    "FMGP": {"method": lw.FMGP(50)},
    "MC dropout": {"method": lw.baselines.MCDropout(64)},
    "SWAG": {"method": lw.baselines.SWAG(weight_decay=TrainingSettings().weight_decay)},
}
USUAL = ("plain", "default", "per layer", "joint noise", "full")
DROPOUT = 0.05  # of the network for MC dropout, which is trained with it


@dataclass(frozen=True)
class Uci:
    """Settings: one recipe for all tables.

    ``variants`` are compared on the same trained networks, apart from "temperature" and "MC dropout", which need
    networks trained in another way. A table with fewer than ``splits`` splits gives those that it has.
    """

    data_dir: Path
    sets: tuple[str, ...] = SETS
    splits: int = 3
    variants: tuple[str, ...] = USUAL
    recipe: TrainingSettings = TrainingSettings()
    seed: int = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_data_dir(parser, "the uci_NAME.npz files")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="names of tables; all nine by default")
    parser.add_argument("--splits", type=positive, default=3, help="standard splits to use (3)")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="variants to compare; five of them by default")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    settings = Uci(
        data_dir=data_folder(arguments.data_dir),
        sets=chosen(arguments.sets, SETS, "--sets"),
        splits=arguments.splits,
        variants=chosen(arguments.variants or USUAL, tuple(VARIANTS), "--variants"),
        seed=arguments.seed,
    )
    return ExperimentReport(arguments.out / "uci.json", (run(settings, progress),))


def run(settings: Uci, progress: Progress = silent) -> Result:
    """Score every variant on every table of the folder."""
    start = time.perf_counter()
    rows: list[Row] = []
    arrays: dict[str, list[float]] = {}
    notes: list[str] = []
    for name in settings.sets:
        path = settings.data_dir / f"uci_{name}.npz"
        if not path.exists():
            notes.append(f"{name}: skipped, {path.name} is not in the data folder")
            progress(notes[-1])
            continue
        splits = [_split(path, split, settings) for split in range(min(settings.splits, splits_in(path)))]
        for variant in settings.variants:
            of_variant = [scores_of[variant] for scores_of in splits]
            rows.append(Row(variant, mean_scores(of_variant), name))
            arrays |= {f"{name}/{variant}/{key}": [each[key] for each in of_variant] for key in of_variant[0]}
        progress(f"{name}: done after {time.perf_counter() - start:.0f} s")
    if not rows:
        raise DataError(f"none of {', '.join(settings.sets)} is in {settings.data_dir}; expected uci_NAME.npz files.")
    notes += improvements(rows)
    means = [_mean_row(variant, rows) for variant in settings.variants]
    seconds = {"total": time.perf_counter() - start}
    return Result("uci", plain(settings), settings.seed, (*rows, *means), seconds, arrays, tuple(notes))


def improvements(rows: list[Row]) -> list[str]:
    """Say for each variant on how many tables its mean NLL is below that of the plain network."""
    base = {row.group: row.scores["NLL"] for row in rows if row.name == "plain"}
    lines = []
    for variant in dict.fromkeys(row.name for row in rows if row.name != "plain"):
        of_variant = [row for row in rows if row.name == variant and row.group in base]
        better = sum(row.scores["NLL"] < base[row.group] for row in of_variant)
        lines.append(f"{variant}: lower NLL than the plain network on {better} of {len(of_variant)} tables")
    return lines if base else []


def _mean_row(variant: str, rows: list[Row]) -> Row:
    """Return the means over tables of those scores that do not depend on the units of y, or only by a constant."""
    comparable = ("NLL", "coverage 95 %", "fit / epoch")
    of_variant = [{name: row.scores[name] for name in comparable} for row in rows if row.name == variant]
    return Row(variant, mean_scores(of_variant), "mean")


def epoch_seconds(model: nn.Module, data: Batches) -> float:
    """Return the seconds of one epoch without the optimiser: forward and backward passes over the batches."""
    loss, parameters = loss_of(data[0][1]), list(model.parameters())

    def epoch() -> None:
        for x, y in data:
            torch.autograd.grad(loss(model(x), y), parameters)

    return best_seconds(epoch)[0]


def _split(path: Path, split: int, settings: Uci) -> dict[str, dict[str, float]]:
    """Return the scores of every variant on one split."""
    table = read_split(path, split)
    x, y = table.training
    model = train_mlp(x, y, 1, settings.recipe, settings.seed + split)
    data = batches(x, y, settings.recipe.batch_size)
    epoch = epoch_seconds(model, data)
    retrained = {"MC dropout": _dropping, "temperature": _tempered}
    scores_of = {}
    for variant in settings.variants:
        train = retrained.get(variant, lambda *_: (model, lw.Gaussian()))
        network, likelihood = train(x, y, settings, split)
        options = {"likelihood": likelihood, **VARIANTS[variant]}
        scores_of[variant] = _scored(network, data, table, options, epoch)
    return scores_of


def _dropping(x: Tensor, y: Tensor, settings: Uci, split: int) -> tuple[nn.Module, lw.Gaussian]:
    """Train the same network with dropout."""
    return train_mlp(x, y, 1, replace(settings.recipe, dropout=DROPOUT), settings.seed + split), lw.Gaussian()


def _tempered(x: Tensor, y: Tensor, settings: Uci, split: int) -> tuple[nn.Module, lw.Gaussian]:
    """Train the same network on nine tenths of the rows; the others determine its noise."""
    seed = settings.seed + split
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order.tensor_split([len(x) // 10])
    model = train_mlp(x[rest], y[rest], 1, settings.recipe, seed)
    return model, tempered(model, [(x[held_out], y[held_out])])


def tempered(model: nn.Module, held_out: Batches) -> lw.Gaussian:
    """Return the likelihood whose noise is the error on held-out rows: temperature scaling of a regression."""
    with torch.no_grad():
        residuals = torch.cat([model(x) - y for x, y in held_out])
    return lw.Gaussian(noise_std=float(residuals.square().mean().sqrt()))


def _scored(
    model: nn.Module, data: Batches, table: SplitTable, options: dict[str, Any], epoch: float
) -> dict[str, float]:
    taken, fitted = best_seconds(lambda: lw.fit(model, data, progress=False, **options), repeats=1)
    return {**scores(predict(fitted, table), table.y_test), "fit / epoch": taken / epoch}


def splits_in(path: Path) -> int:
    """Return how many standard splits a file has: train_0, train_1 and so on."""
    with np.load(path, allow_pickle=False) as file:
        count = 0
        while f"train_{count}" in file:
            count += 1
    return max(count, 1)  # a file without splits raises when its first one is read


def read_split(path: Path, split: int, kind: str = "standard") -> SplitTable:
    """Read the rows ``train_N`` and ``test_N`` of a table with the keys X and y, or those of a "gap" split.

    A gap split has the keys ``gap_train_N`` and ``gap_test_N``: its test rows are the middle third along input N.
    """
    if not path.exists():
        raise DataError(f"{path.name} is not in the data folder; expected keys X, y, train_0, test_0 and so on.")
    prefix = "gap_" if kind == "gap" else ""
    train_key, test_key = f"{prefix}train_{split}", f"{prefix}test_{split}"
    with np.load(path, allow_pickle=False) as file:
        missing = [key for key in ("X", "y", train_key, test_key) if key not in file]
        if missing:
            raise DataError(f"{path.name} lacks {', '.join(missing)}; expected X, y, {train_key} and {test_key}.")
        x, y = (torch.from_numpy(file[key].astype(np.float64)) for key in ("X", "y"))
        train, test = (torch.from_numpy(file[key].astype(np.int64)) for key in (train_key, test_key))
    y = y.reshape(-1)
    return SplitTable(x[train], y[train], x[test], y[test])
