"""Classification on a folder of tables: networks trained as usual, for few epochs, for many, and on balanced rows.

Balanced rows are drawn so that all classes are equally frequent, which biases the probabilities. Every row of a run is
about the same network; "temperature", "no offsets" and "validation" see 50 or 200 further rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from experiments.data import data_folder
from experiments.options import Progress, add_data_dir, add_seeds, positive, silent
from experiments.own_tables import OwnTable, own_tables
from experiments.repeats import mean_scores
from lapwing.demo.result import ExperimentReport, Result, Row, plain
from lapwing.demo.training import TrainingSettings, batches, mlp, optimise

SIZES = (50, 200)  # validation rows
TRAININGS = {
    "usual": TrainingSettings(
        activation="relu", epochs=40, batch_size=64, learning_rate=3e-3, weight_decay=1e-3, max_steps=1500
    ),
    "few epochs": TrainingSettings(epochs=3, batch_size=64, learning_rate=3e-3, weight_decay=0.0),
    "many epochs": TrainingSettings(activation="relu", epochs=200, batch_size=64, learning_rate=3e-3, weight_decay=0.0),
    "balanced": TrainingSettings(
        activation="relu", epochs=40, batch_size=64, learning_rate=3e-3, weight_decay=1e-3, max_steps=1500
    ),
}
WORSE, APART = 0.005, 0.002  # nats
Scores = dict[str, dict[str, float]]  # of each row


@dataclass(frozen=True)
class Biased:
    """Settings: the folder, how many networks for each table and training, and the rows of a table."""

    data_dir: Path
    seeds: int = 1
    rows: int = 1000  # to train on, at most
    test: int = 1000
    every: int = 1  # of the tables, one in so many is used
    workers: int = 1
    seed: int = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_data_dir(parser, "tables with the keys X, y and kind")
    add_seeds(parser, 1)
    parser.add_argument("--rows", type=positive, default=1000, help="rows to train on, at most (1000)")
    parser.add_argument("--every", type=positive, default=1, help="use one in so many tables (1)")
    parser.add_argument("--workers", type=positive, default=1, help="processes (1)")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    settings = Biased(
        data_folder(arguments.data_dir), arguments.seeds, arguments.rows, every=arguments.every,
        workers=arguments.workers, seed=arguments.seed,
    )  # fmt: skip
    return ExperimentReport(arguments.out / "biased.json", (run(settings, progress),))


def run(settings: Biased, progress: Progress = silent) -> Result:
    """Train all networks and score all rows."""
    start = time.perf_counter()
    paths = own_tables(settings.data_dir, "classification")[:: settings.every]
    jobs = [
        (f"{path.stem}/{training}/{seed}", partial(_scored, path, training, settings.seed + seed, settings))
        for path in paths
        for training in TRAININGS
        for seed in range(settings.seeds)
    ]
    runs: dict[str, Scores] = {}
    for name, scores in _done(jobs, settings.workers):
        runs[name] = scores
        progress(f"{name}: done after {time.perf_counter() - start:.0f} s")
    rows: list[Row] = []
    arrays: dict[str, list[float]] = {}
    for training in TRAININGS:
        of_training = [scores for name, scores in runs.items() if name.split("/")[1] == training]
        rows += [Row(row, mean_scores([each[row] for each in of_training]), training) for row in of_training[0]]
    for name, scores in runs.items():
        arrays |= {f"{name}/{row}/{key}": [value] for row, each in scores.items() for key, value in each.items()}
    seconds = {"total": time.perf_counter() - start}
    return Result("biased", plain(settings), settings.seed, tuple(rows), seconds, arrays, tuple(_notes(runs)))


def _done(jobs: list[tuple[str, Any]], workers: int) -> Iterator[tuple[str, Scores]]:
    """Yield the results of the jobs in order, with several processes if asked."""
    if workers == 1:
        yield from ((name, job()) for name, job in jobs)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [(name, pool.submit(job)) for name, job in jobs]
        yield from ((name, future.result()) for name, future in futures)


def _scored(path: Path, training: str, seed: int, settings: Biased) -> Scores:
    """Train one network, fit every row to it, and score all on the test rows."""
    table = OwnTable.read(path)
    (x, y), held, test = table.parts(seed, max(SIZES))
    x, y, test = x[: settings.rows], y[: settings.rows], (test[0][: settings.test], test[1][: settings.test])
    if training == "balanced":
        counts = torch.bincount(y, minlength=table.classes).double()
        drawn = torch.Generator().manual_seed(seed)
        rows = torch.multinomial(1 / counts[y], len(y), replacement=True, generator=drawn)
        x, y = x[rows], y[rows]
    model = mlp(x.shape[1], table.classes, TRAININGS[training], seed)
    optimise(model, x, y, TRAININGS[training], seed)
    fit = partial(lw.fit, model, batches(x, y, 250), "classification", progress=False)
    network, evidence = fit(method=lw.baselines.MapOnly(), prior=1.0), fit(prior=None, tuner=lw.tuners.FixedPoint())
    fits = {"plain": network, "default": evidence.tuned(lw.tuners.Budget(batches(x, y, 250)))}
    for size in SIZES:
        some = (held[0][:size], held[1][:size])
        for row, base, options in (
            ("temperature", network, {"offsets": ()}),
            ("no offsets", evidence, {"offsets": ()}),
            ("validation", evidence, {}),
        ):
            fits[f"{row}, {size}"] = base.tuned(lw.tuners.Integrate(some, **options))
    return {row: _scores(posterior, test) for row, posterior in fits.items()}


def _scores(posterior: lw.Fitted, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return the scores of one posterior on the test rows."""
    predictive = posterior.predict(test[0])
    with torch.no_grad():
        mean = predictive.probs.double().mean(0)
        shares = torch.bincount(test[1], minlength=len(mean)).double() / len(test[1])
        return {
            "NLL": -float(predictive.log_prob(test[1]).mean()),
            "ECE": lw.metrics.ece(predictive.probs, test[1]),
            "bias": float((mean - shares).abs().max()),
        }


def _notes(runs: dict[str, Scores]) -> Iterator[str]:
    """Yield how the rows compare, over the means of the tables."""
    pairs = [("default", "plain")]
    for size in SIZES:
        validation = f"validation, {size}"
        pairs += [(validation, other) for other in ("plain", f"temperature, {size}", f"no offsets, {size}")]
    for training in TRAININGS:
        tables: dict[str, list[Scores]] = {}
        for name, scores in runs.items():
            table, kind, _ = name.split("/")
            if kind == training:
                tables.setdefault(table, []).append(scores)
        for row, base in pairs:
            gaps = {
                table: statistics.mean(each[row]["NLL"] - each[base]["NLL"] for each in some)
                for table, some in tables.items()
            }
            worst = max(gaps, key=lambda table: gaps[table])
            yield (
                f"{training}: {row} against {base}: NLL {statistics.mean(gaps.values()):+.4f}; better / worse by "
                f"{APART} on {sum(g < -APART for g in gaps.values())} / {sum(g > APART for g in gaps.values())} of "
                f"{len(gaps)} tables, worse by {WORSE} on {sum(g > WORSE for g in gaps.values())}, at most "
                f"{gaps[worst]:+.4f} ({worst})"
            )
