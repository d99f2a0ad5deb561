"""Regression on a folder of tables: are intervals wide enough, and no wider, with and without validation data?

Networks with tanh, ReLU, BatchNorm and dropout, stopped early, with weight decay, or trained for long. Every row of a
run is about the same network; "validation", "noise refitted" and "split conformal" see up to 200 further rows.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.data import data_folder
from experiments.options import Progress, add_data_dir, positive, silent
from experiments.own_tables import OwnTable, own_tables
from experiments.repeats import mean_scores
from experiments.uci import read_split
from lapwing.demo.result import ExperimentReport, Result, Row, plain
from lapwing.demo.training import TrainingSettings, batches, crps, mlp, optimise

NETWORKS: dict[str, dict[str, Any]] = {
    "tanh": {"activation": "tanh"}, "ReLU": {"activation": "relu"},
    "BatchNorm": {"activation": "relu", "batch_norm": True}, "dropout": {"activation": "relu", "dropout": 0.1},
}  # fmt: skip
TRAININGS: dict[str, dict[str, Any]] = {
    "early": {"epochs": 80, "weight_decay": 0.0},  # the epoch of the lowest error on a sixth of the rows
    "decay": {"epochs": 120, "weight_decay": 2e-2},
    "long": {"epochs": 330, "weight_decay": 0.0},
}
PAIRS = [(training, network) for training in TRAININGS for network in NETWORKS]
GAPS = ("boston", "concrete", "energy", "yacht", "wine", "power")
LEVEL = 0.95
WORSE_NLL, WORSE_CRPS = 0.01, 0.02  # nats, and a share of the plain network's
Scores = dict[str, dict[str, float]]  # of each row


@dataclass(frozen=True)
class Widths:
    """Settings: the folder, how many networks for each table, and the sizes of the parts of a table."""

    data_dir: Path
    networks: int = 2  # for each table
    rows: int = 600  # to train on, at most
    validation: int = 200
    test: int = 1000
    gap_dir: Path | None = None  # folder of the uci_NAME.npz files, for their gap splits
    gaps: int = 2  # of each of those tables
    short: bool = False  # training
    seed: int = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_data_dir(parser, "tables with the keys X, y and kind")
    parser.add_argument("--gap-dir", type=Path, help="folder of the uci_NAME.npz files, for their gap splits")
    parser.add_argument("--networks", type=positive, default=2, help="networks for each table (2)")
    parser.add_argument("--rows", type=positive, default=600, help="rows to train on, at most (600)")
    parser.add_argument("--short", action="store_true", help="two epochs of training; to try the command out")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    settings = Widths(
        data_folder(arguments.data_dir), arguments.networks, arguments.rows, gap_dir=arguments.gap_dir,
        short=arguments.short, seed=arguments.seed,
    )  # fmt: skip
    return ExperimentReport(arguments.out / "widths.json", (run(settings, progress),))


def run(settings: Widths, progress: Progress = silent) -> Result:
    """Train all networks and score all rows."""
    start = time.perf_counter()
    runs: dict[str, Scores] = {}
    for name, measure in (*_table_runs(settings), *_gap_runs(settings)):
        runs[name] = measure()
        progress(f"{name}: done after {time.perf_counter() - start:.0f} s")
    rows = [row for group, some in _groups(runs).items() for row in _rows(group, list(some.values()))]
    arrays = {
        f"{name}/{row}/{key}": [value]
        for name, scores in runs.items()
        for row, each in scores.items()
        for key, value in each.items()
    }
    seconds = {"total": time.perf_counter() - start}
    return Result("widths", plain(settings), settings.seed, tuple(rows), seconds, arrays, tuple(_notes(runs)))


def _table_runs(settings: Widths) -> Iterator[tuple[str, Callable[[], Scores]]]:
    """Yield the name and the measurement of every network on a table."""
    for number, path in enumerate(own_tables(settings.data_dir, "regression")):
        for k in range(settings.networks):
            training, network = PAIRS[(5 * number + 7 * k + settings.seed) % len(PAIRS)]
            seed = settings.seed + k

            def measure(
                path: Path = path, training: str = training, network: str = network, seed: int = seed
            ) -> Scores:
                (x, y), held, (x_test, y_test) = OwnTable.read(path).parts(seed, settings.validation)
                train = (x[: settings.rows], y[: settings.rows])
                test = (x_test[: settings.test], y_test[: settings.test])
                return _scored(train, held, test, training, network, seed, settings)

            yield f"{path.stem}, {training}, {network}", measure


def _gap_runs(settings: Widths) -> Iterator[tuple[str, Callable[[], Scores]]]:
    """Yield the name and the measurement of every network on a table without the middle third along an input."""
    for number in range(len(GAPS) * settings.gaps if settings.gap_dir else 0):
        name, gap = GAPS[number % len(GAPS)], number // len(GAPS)
        training, network = PAIRS[4 + (3 * number) % 8]  # not those stopped early

        def measure(name: str = name, gap: int = gap, training: str = training, network: str = network) -> Scores:
            assert settings.gap_dir is not None
            table = read_split(settings.gap_dir / f"uci_{name}.npz", gap, "gap")
            x, y = table.training
            test = (table.scale_x(table.x_test), table.scale_y(table.y_test).unsqueeze(1))
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(gap))
            held = order[: min(settings.validation, len(x) // 5)]
            rest = order[len(held) :][: settings.rows]
            pairs = [(x[rows].float(), y[rows].float()) for rows in (rest, held)]
            far = (test[0][: settings.test].float(), test[1][: settings.test].float())
            return _scored(pairs[0], pairs[1], far, training, network, gap, settings)

        yield f"gap {gap} of {name}, {training}, {network}", measure


def _scored(
    train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], training: str, network: str,
    seed: int, settings: Widths,
) -> Scores:  # fmt: skip
    """Train one network, fit every row to it, and score all on the test rows."""
    given = {**TRAININGS[training], **NETWORKS[network], **({"epochs": 2} if settings.short else {})}
    recipe = TrainingSettings(batch_size=32, learning_rate=1e-3, max_steps=10**9, falling=False, **given)
    start = time.process_time()
    train, model = (
        _stopped_early(*train, recipe, seed) if training == "early" else (train, _trained(*train, recipe, seed))
    )
    trained = time.process_time() - start
    fits: dict[str, dict[str, Any]] = {
        "plain": {"method": lw.baselines.MapOnly()},
        "default": {},
        "noise refitted": {"method": lw.baselines.MapOnly(), "validation": held},
        "validation": {"validation": held},
    }
    scores: Scores = {}
    with torch.no_grad():
        errors = (model(held[0]) - held[1]).abs().flatten().sort().values
        rank = min(len(errors), -int(-LEVEL * (len(errors) + 1) // 1))
        radius = float(errors[rank - 1])
        covered = float(((model(test[0]) - test[1]).abs() <= radius).double().mean())
    for row, options in fits.items():
        start = time.process_time()
        posterior = lw.fit(model, batches(*train, 32), "regression", progress=False, **options)
        taken = time.process_time() - start
        predictive = posterior.predict(test[0])
        low, high = predictive.interval(LEVEL)
        with torch.no_grad():
            scores[row] = {
                "NLL": -float(predictive.log_prob(test[1]).mean()),
                "CRPS": float(crps(predictive, test[1]).mean()),
                "coverage 95 %": lw.metrics.coverage(low, high, test[1]),
                "width / conformal": lw.metrics.interval_width(low, high) / (2 * radius),
                "fit / training": taken / trained,
            }
    scores["split conformal"] = {"coverage 95 %": covered, "width / conformal": 1.0}
    return scores


def _trained(x: Tensor, y: Tensor, recipe: TrainingSettings, seed: int) -> nn.Module:
    model = mlp(x.shape[1], 1, recipe, seed)
    optimise(model, x, y, recipe, seed)
    return model


def _stopped_early(
    x: Tensor, y: Tensor, recipe: TrainingSettings, seed: int
) -> tuple[tuple[Tensor, Tensor], nn.Module]:
    """Return the rows that were trained on, and the network of the epoch with the lowest error on the others."""
    model, held = mlp(x.shape[1], 1, recipe, seed), len(x) // 6
    best: list[Any] = [float("inf"), None]

    def after(epoch: int) -> None:
        with torch.no_grad():
            error = float((model(x[:held]) - y[:held]).square().mean())
        if error < best[0]:
            best[:] = [error, copy.deepcopy(model.state_dict())]

    optimise(model, x[held:], y[held:], recipe, seed, after)
    model.load_state_dict(best[1])
    return (x[held:], y[held:]), model


def _groups(runs: dict[str, Scores]) -> dict[str, dict[str, Scores]]:
    """Return the runs by training, those with BatchNorm, all, and those in gaps."""
    own = {name: scores for name, scores in runs.items() if not name.startswith("gap ")}
    groups = {training: {n: s for n, s in own.items() if f", {training}, " in n} for training in TRAININGS}
    groups["BatchNorm"] = {n: s for n, s in own.items() if n.endswith("BatchNorm")}
    groups["all"] = own
    groups["in gaps"] = {n: s for n, s in runs.items() if n.startswith("gap ")}
    return {name: some for name, some in groups.items() if some}


def _rows(group: str, runs: list[Scores]) -> Iterator[Row]:
    """Yield the rows of a table: means, but medians of what has outliers, and counts of the runs with harm."""
    for name in runs[0]:
        of_row = [scores[name] for scores in runs]
        means = mean_scores(of_row)
        shown = {"coverage 95 %": means["coverage 95 %"]}
        for key in ("width / conformal", "NLL", "fit / training"):
            if key in means:
                shown[f"median {key}"] = statistics.median(each[key] for each in of_row)
        if "NLL" in means:
            base = [scores["plain"] for scores in runs]
            pairs = list(zip(of_row, base, strict=True))
            shown["NLL worse"] = float(sum(a["NLL"] > b["NLL"] + WORSE_NLL for a, b in pairs))
            shown["CRPS worse"] = float(sum(a["CRPS"] > b["CRPS"] * (1 + WORSE_CRPS) for a, b in pairs))
        yield Row(name, shown, f"{group} ({len(runs)})")


def _notes(runs: dict[str, Scores]) -> Iterator[str]:
    """Yield the runs in which a row is worse than the plain network."""
    for row in ("default", "validation", "noise refitted"):
        for name, scores in _groups(runs).get("all", {}).items():
            nll = scores[row]["NLL"] - scores["plain"]["NLL"]
            share = scores[row]["CRPS"] / scores["plain"]["CRPS"] - 1
            if nll > WORSE_NLL or share > WORSE_CRPS:
                yield f"{row} is worse than plain on {name}: NLL {nll:+.3f}, CRPS {share:+.1%}"
