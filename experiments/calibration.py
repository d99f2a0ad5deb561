"""Are the error bars right as they come? Classification and regression, against the plain network and its rescaling.

Every task is data, a network and a training. The rows are the plain network, temperature scaling (or refitted noise),
the evidence alone, and ``fit`` without and with validation data. Notes count the tasks on which ``fit`` is worse.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from experiments.calibration_jobs import Calibration, Job, Scores, jobs_of
from experiments.calibration_tasks import QUICK, TASKS
from experiments.data import data_folder
from experiments.options import Progress, add_data_dir, add_quick, add_seeds, chosen, positive, silent
from experiments.repeats import mean_scores
from experiments.uci import SETS as UCI
from lapwing.demo.result import ExperimentReport, Result, Row, plain

CLASS_PAIRS = (("evidence", "plain"), ("default", "plain"), ("validation", "plain"), ("validation", "temperature"))
REAL_PAIRS = (
    ("plain", "plain"), ("evidence", "plain"), ("default", "plain"), ("noise refitted", "plain, fewer rows"),
    ("validation", "plain, fewer rows"),
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_data_dir(parser)
    add_seeds(parser, 3)
    parser.add_argument("--tasks", nargs="*", metavar="NAME", help="tasks of classification; all by default")
    parser.add_argument("--tables", nargs="*", metavar="NAME", help="tables of regression; all by default")
    parser.add_argument("--splits", type=positive, default=20, help="standard splits of the tables (20)")
    parser.add_argument("--validation", type=positive, default=200, help="validation data (200)")
    parser.add_argument("--workers", type=positive, default=1, help="processes (1)")
    parser.add_argument("--methods", action="store_true", help="every method on three small tasks, and nothing else")
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="JSON", help="join stored results of parts; run nothing"
    )
    add_quick(parser, "two tasks on data that ship with scikit-learn, with short training")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    if arguments.join:
        return ExperimentReport(arguments.out / "calibration.json", (joined(arguments.join),))
    settings = Calibration(
        data_dir=None if arguments.quick or arguments.methods else data_folder(arguments.data_dir),
        tasks=_tasks_chosen(arguments),
        tables=()
        if arguments.quick or arguments.methods or arguments.tables == []
        else chosen(arguments.tables, UCI, "--tables"),
        seeds=arguments.seeds,
        splits=arguments.splits,
        validation=arguments.validation,
        workers=arguments.workers,
        methods=arguments.methods,
        short=arguments.quick,
        seed=arguments.seed,
    )
    return ExperimentReport(arguments.out / "calibration.json", (run(settings, progress),))


def _tasks_chosen(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the tasks of classification."""
    if arguments.quick:
        return QUICK
    if arguments.methods or arguments.tasks == []:
        return ()
    return chosen(arguments.tasks, [task.name for task in TASKS], "--tasks")


def run(settings: Calibration, progress: Progress = silent) -> Result:
    """Train all networks and score all rows."""
    start = time.perf_counter()
    jobs = jobs_of(settings)
    collected: dict[str, list[Scores]] = {}
    for job, scores in zip(jobs, _done(jobs, settings.workers), strict=True):
        collected.setdefault(job.group, []).append(scores)
        progress(f"{job.group}: {len(collected[job.group])} done after {time.perf_counter() - start:.0f} s")
    return _result(settings, collected, time.perf_counter() - start)


def joined(paths: Sequence[Path]) -> Result:
    """Return the results of parts of the experiment as one, with the notes over all of them."""
    collected: dict[str, list[Scores]] = {}
    seconds, settings = 0.0, None
    for path in paths:
        part = Result.from_json(json.dumps(json.loads(path.read_text(encoding="utf-8"))["calibration"]))
        names = {key: (*getattr(settings, key, ()), *part.settings[key]) for key in ("tasks", "tables")}
        fields: dict[str, Any] = {**part.settings, **names, "data_dir": None}
        fields.setdefault("short", fields.pop("quick", False))  # its name in older files
        settings, seconds = Calibration(**fields), seconds + part.seconds["total"]
        for key, values in part.arrays.items():
            group, row, score = key.split("/")
            runs = collected.setdefault(group, [{} for _ in values])
            for run_scores, value in zip(runs, values, strict=True):
                run_scores.setdefault(row, {})[score] = value
    assert settings is not None
    return _result(settings, collected, seconds)


def _result(settings: Calibration, collected: dict[str, list[Scores]], seconds: float) -> Result:
    """Return the table, the scores of every run, and the notes."""
    rows = []
    arrays: dict[str, list[float]] = {}
    for group, runs in collected.items():
        for name in runs[0]:
            of_row = [scores[name] for scores in runs if name in scores]
            rows.append(Row(name, {**mean_scores(of_row), "NLL error": _error(of_row)}, group))
            arrays |= {f"{group}/{name}/{key}": [each[key] for each in of_row] for key in of_row[0]}
    notes = [*_classification_notes(settings, collected), *_regression_notes(settings, collected)]
    return Result("calibration", plain(settings), settings.seed, tuple(rows), {"total": seconds}, arrays, tuple(notes))


def _done(jobs: Sequence[Job], workers: int) -> Iterator[Scores]:
    """Yield the results of the jobs in order, with several processes if asked."""
    if workers == 1:
        yield from (job.scores() for job in jobs)
        return
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        order = sorted(range(len(jobs)), key=lambda i: -jobs[i].cost)
        futures = {i: pool.submit(jobs[i].scores) for i in order}
        yield from (futures[i].result() for i in range(len(jobs)))


def _error(runs: list[dict[str, float]]) -> float:
    """Return the standard error of the mean NLL."""
    values = torch.tensor([each["NLL"] for each in runs], dtype=torch.float64)
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _means(runs: list[Scores], row: str, score: str) -> float:
    return sum(each[row][score] for each in runs) / len(runs)


def _classification_notes(settings: Calibration, collected: dict[str, list[Scores]]) -> Iterator[str]:
    """Yield how often ``fit`` is worse than the plain network and than temperature scaling, for both halves."""
    for half, what in ((0, "constants chosen here"), (1, "tried here")):
        groups = {task.name: collected[task.name] for task in TASKS if task.half == half and task.name in collected}
        if not groups:
            continue
        for row, base in (
            ("evidence", "plain"),
            ("default", "plain"),
            ("validation", "plain"),
            ("validation", "temperature"),
        ):
            gaps = {name: _means(runs, row, "NLL") - _means(runs, base, "NLL") for name, runs in groups.items()}
            single = [each[row]["NLL"] - each[base]["NLL"] for runs in groups.values() for each in runs]
            ece = [_means(runs, row, "ECE") - _means(runs, base, "ECE") for runs in groups.values()]
            worst = max(gaps, key=lambda name: gaps[name])
            yield (
                f"{what}: {row} against {base}: NLL {sum(gaps.values()) / len(gaps):+.4f} on average, worse by .005 on "
                f"{sum(gap > 0.005 for gap in gaps.values())} of {len(gaps)} tasks and in "
                f"{sum(gap > 0.005 for gap in single)} of {len(single)} runs, better / worse by .002 on "
                f"{sum(gap < -0.002 for gap in gaps.values())} / {sum(gap > 0.002 for gap in gaps.values())} tasks, at "
                f"most {gaps[worst]:+.4f} ({worst}); ECE {sum(ece) / len(ece):+.4f}, at most {max(ece):+.4f}"
            )


def _regression_notes(settings: Calibration, collected: dict[str, list[Scores]]) -> Iterator[str]:
    """Yield the error of the coverage and the tables on which ``fit`` is worse than the plain network."""
    for row, base in REAL_PAIRS if settings.tables else ():
        errors, gaps = [], {}
        for table in settings.tables:
            groups = [runs for name, runs in collected.items() if name.startswith(f"{table}, ") and "epochs" in name]
            errors += [abs(_means(runs, row, "coverage 95 %") - 0.95) for runs in groups]
            gaps[table] = sum(_means(runs, row, "NLL") - _means(runs, base, "NLL") for runs in groups) / len(groups)
        worst = max(gaps, key=lambda name: gaps[name])
        yield (
            f"regression: {row} against {base}: NLL lower on {sum(gap < 0 for gap in gaps.values())} of {len(gaps)} "
            f"tables, at most {gaps[worst]:+.3f} ({worst}); |coverage - .95| {sum(errors) / len(errors):.3f} on average"
        )
