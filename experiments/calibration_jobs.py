"""The experiment ``calibration`` in jobs: one network that is trained, and scored with every row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import lapwing as lw
from experiments.calibration_tasks import METHOD_TASKS, QUICK, SETS, TASKS, Pair, Split, Task, quick
from experiments.data import data_folder
from experiments.engine.contract import Record
from experiments.engine.seeds import parted
from experiments.options import Progress
from experiments.uci import SETS as UCI
from experiments.uci import read_split, splits_in
from lapwing.demo.training import TrainingSettings, batches, train_mlp
from lapwing.methods.base import Method
from lapwing.registry import METHODS

BATCH = 250
LENGTHS = (40, 100, 300)  # epochs of the networks for regression
Scores = dict[str, dict[str, float]]  # of each row


@dataclass(frozen=True)
class Calibration:
    """Settings: which tasks, how often, and how many validation data."""

    name: ClassVar[str] = "calibration"
    title: ClassVar[str] = "are the error bars right as they come? many tasks, against the plain network"
    choosing: ClassVar[tuple[str, ...]] = ("tasks", "tables", "seeds", "splits", "methods")

    data_dir: Path | None
    tasks: tuple[str, ...]
    tables: tuple[str, ...] = ()
    seeds: int = 3
    splits: int = 20
    validation: int = 200
    workers: int = 1
    methods: bool = False
    short: bool = False  # training
    seed: int = 0

    @classmethod
    def quick(cls) -> Calibration:
        """Return the settings of the quick form."""
        return cls(None, QUICK, seeds=1, short=True)

    @classmethod
    def full(cls) -> Calibration:
        """Return the settings of the full form."""
        return cls(None, tuple(task.name for task in TASKS), UCI)

    def units(self) -> tuple[str, ...]:
        """Return a unit for each job: its group, and its number in the group."""
        return tuple(_keyed(self))

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Run one job."""
        group, repeat = parted(unit)
        for row, scores in _keyed(self)[unit].scores().items():
            yield Record(group, row, repeat, scores)


@dataclass(frozen=True)
class Job:
    """One network to train and score. ``cost`` orders the jobs: long ones come first, so that no process waits."""

    group: str
    scores: Callable[[], Scores]
    cost: float = 0.0


def jobs_of(settings: Calibration) -> list[Job]:
    """Return all jobs that the settings ask for."""
    return [*_classification_jobs(settings), *_regression_jobs(settings), *_method_jobs(settings)]


def _keyed(settings: Calibration) -> dict[str, Job]:
    """Return the jobs by the keys of units; data that are needed and not there raise."""
    if settings.tables or any(task.needs_folder for task in TASKS if task.name in settings.tasks):
        data_folder(settings.data_dir)
    keyed: dict[str, Job] = {}
    numbers: dict[str, int] = {}
    for job in jobs_of(settings):
        number = numbers.get(job.group, 0)
        numbers[job.group] = number + 1
        keyed[f"{job.group}/{number}"] = job
    return keyed


def _classification_jobs(settings: Calibration) -> list[Job]:
    tasks = [task for task in TASKS if task.name in settings.tasks]
    tasks = [quick(task) for task in tasks] if settings.short else tasks
    return [
        Job(task.name, partial(classify, task, settings.data_dir, settings.seed + seed, settings.validation))
        for task in tasks
        for seed in range(settings.seeds)
    ]


def classify(task: Task, folder: Path | None, seed: int, validation: int) -> Scores:
    """Return the scores of every row on one task."""
    split = SETS[task.data](folder, seed, validation)
    model = task.trained(split, seed)
    data, held_out = batches(*split.train, BATCH), batches(*split.validation, BATCH)
    fit = partial(lw.fit, model, data, "classification", progress=False)
    fits = {
        "plain": fit(method=lw.baselines.MapOnly()),
        "temperature": fit(method=lw.baselines.MapOnly(), validation=held_out),
        "evidence": fit(tuner=lw.tuners.MaximiseEvidence()),
        "default": fit(),
        "validation": fit(validation=held_out),
    }
    return {name: _class_scores(posterior, split) for name, posterior in fits.items()}


def _method_jobs(settings: Calibration) -> list[Job]:
    return [
        Job(task.name, partial(every_method, task, settings.seed + seed, settings.validation))
        for task in (METHOD_TASKS if settings.methods else ())
        for seed in range(settings.seeds)
    ]


def every_method(task: Task, seed: int, validation: int) -> Scores:
    """Return the scores of every method as it comes, guarded by a budget, and with validation data.

    What a method refuses is left out.
    """
    split = SETS[task.data](None, seed, validation)
    model = task.trained(split, seed)
    data, held_out = batches(*split.train, 64), batches(*split.validation, BATCH)
    others = [task.trained(split, seed + 1000 * i) for i in (1, 2)]
    methods: dict[str, Callable[[], Method]] = {
        **METHODS,
        "ensemble": partial(lw.baselines.Ensemble, others),
        "hfl": partial(lw.HFL, mode="linearised"),  # the other modes need weights at a minimum
    }
    scores = {}
    for name, kind in methods.items():
        ways: dict[str, Any] = {
            name: {},
            f"{name}, budget": {"tuner": lw.tuners.Budget()},
            f"{name}, validation": {"validation": held_out},
        }
        for row, given in ways.items():
            try:
                posterior = lw.fit(model, data, "classification", method=kind(), progress=False, **given)
                scores[row] = _class_scores(posterior, split)
            except lw.LapwingError:
                continue
    return scores


def _class_scores(posterior: lw.Fitted, split: Split) -> dict[str, float]:
    """Return the scores of one posterior on the test rows."""
    x, y = split.test
    predictives = [posterior.predict(part) for part in x.split(BATCH)]
    probs = torch.cat([predictive.probs.double() for predictive in predictives])
    pairs = zip(predictives, y.split(BATCH), strict=True)
    log_probs = torch.cat([predictive.log_prob(labels).double() for predictive, labels in pairs])
    scores = {
        "NLL": -float(log_probs.mean()),  # of the logarithms themselves: a probability may round to zero
        "ECE": lw.metrics.ece(probs, y),
        "Brier": lw.metrics.brier(probs, y),
        "accuracy": lw.metrics.accuracy(probs, y),
    }
    if split.far is not None:
        scores["OOD AUROC"] = lw.metrics.auroc(_entropy(probs), _entropy(_probs(posterior, split.far)))
    return scores


def _probs(posterior: lw.Fitted, x: Tensor) -> Tensor:
    return torch.cat([posterior.predict(part).probs.double() for part in x.split(BATCH)])


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


def _regression_jobs(settings: Calibration) -> list[Job]:
    jobs: list[Job] = []
    for name in settings.tables:
        assert settings.data_dir is not None
        path = settings.data_dir / f"uci_{name}.npz"
        for activation in ("tanh", "relu"):
            for epochs in LENGTHS:
                for split in range(min(settings.splits, splits_in(path))):
                    scores = partial(regress, path, split, activation, epochs, settings.validation)
                    cost = float(path.stat().st_size * epochs)
                    jobs.append(Job(f"{name}, {activation}, {epochs} epochs", scores, cost))
    return jobs


def regress(path: Path, number: int, activation: str, epochs: int, validation: int) -> Scores:
    """Return the scores of every row on one split of a table, in standardised units."""
    table = read_split(path, number)
    x, y = table.training
    test = (table.scale_x(table.x_test), table.scale_y(table.y_test).unsqueeze(1))
    recipe = TrainingSettings(activation=activation, epochs=epochs, max_steps=10**9)
    held = min(validation, len(x) // 5)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
    rows, left_out = order[held:], order[:held]
    whole, part = train_mlp(x, y, 1, recipe, number), train_mlp(x[rows], y[rows], 1, recipe, number)
    fit = partial(lw.fit, whole, batches(x, y, 1000), "regression", progress=False)
    fit_part = partial(lw.fit, part, batches(x[rows], y[rows], 1000), "regression", progress=False)
    validated = [(x[left_out], y[left_out])]
    fits = {
        "plain": fit(method=lw.baselines.MapOnly()),
        "evidence": fit(tuner=lw.tuners.MaximiseEvidence()),
        "default": fit(),
        "plain, fewer rows": fit_part(method=lw.baselines.MapOnly()),
        "noise refitted": fit_part(method=lw.baselines.MapOnly(), validation=validated),
        "validation": fit_part(validation=validated),
    }
    return {name: _real_scores(posterior, test) for name, posterior in fits.items()}


def _real_scores(posterior: lw.Fitted, test: Pair) -> dict[str, float]:
    """Return the scores of one posterior on the test rows."""
    x, y = test
    predictive = posterior.predict(x)
    low, high = predictive.interval(0.95)
    with torch.no_grad():
        return {
            "NLL": -float(predictive.log_prob(y).mean()),
            "coverage 95 %": lw.metrics.coverage(low, high, y),
            "width": lw.metrics.interval_width(low, high),
            "RMSE": lw.metrics.rmse(predictive.mean, y),
            "CRPS": lw.metrics.crps(predictive.mean, predictive.std, y),
        }
