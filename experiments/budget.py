"""Inducing points on tables: how many are needed, what they cost beside other methods, and which mean is better."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self  # of typing from Python 3.11 on

import lapwing as lw
from experiments.budget_picture import draw
from experiments.budget_task import Task, read
from experiments.engine.contract import Record
from experiments.engine.store import Stored
from experiments.options import Progress
from lapwing.demo.training import TrainingSettings, train_mlp


@dataclass(frozen=True)
class Budget:
    """Settings: every method has several sizes, from cheap to expensive, so that results of equal cost can be read off.

    Precision and noise are those of the exact posterior, except for SWAG and dropout, which have none and a noise of
    their own. "VaLLA" learns its points for ``steps`` steps of L-BFGS; "VaLLA, fixed points" leaves them at the greedy
    choice. ELLA has as many directions as landmarks. Tables are cut to ``rows`` training rows.
    For the number of points that is needed, ``growing`` is cut to each of ``growth`` rows, and fixed points are added
    until the NLL is within ``close`` nats of the exact one.
    Seconds are those of the processor, summed over cores, so that other work on the machine hardly changes them.
    """

    name: ClassVar[str] = "budget"
    title: ClassVar[str] = "VaLLA on tables: NLL and KL against M, equal compute, two means, M against n"
    choosing: ClassVar[tuple[str, ...]] = ("tables", "growth", "seeds")

    data_dir: Path = Path("data")
    tables: tuple[str, ...] = ("boston", "energy", "kin8nm")
    rows: int = 500
    sizes: tuple[int, ...] = (5, 10, 20, 50, 100, 200)
    steps: int = 10
    snapshots: tuple[int, ...] = (4, 16, 64)
    epochs: tuple[int, ...] = (25, 50, 100)
    dropout: float = 0.05
    growing: str = "kin8nm"
    growth: tuple[int, ...] = (250, 1000, 4000)
    growth_sizes: tuple[int, ...] = (25, 35, 50, 70, 100, 140, 200, 280, 400, 560, 800, 1120, 1600, 2240)
    close: float = 0.01
    recipe: TrainingSettings = TrainingSettings()
    seeds: int = 3
    seed: int = 0

    @classmethod
    def quick(cls) -> Self:
        """Return the settings of the quick form: the table of scikit-learn, which needs no data folder."""
        return cls(
            tables=("diabetes",), sizes=(5, 20, 100), snapshots=(4, 16), epochs=(25, 50), growing="diabetes",
            growth=(100, 250), growth_sizes=(25, 35, 50, 70, 100, 140, 200), seeds=2,
            recipe=TrainingSettings(epochs=50),
        )  # fmt: skip

    @classmethod
    def full(cls) -> Self:
        """Return the settings of the full form."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return a key for each table and split, and for each number of rows and split."""
        pieces = [f"methods/{table}" for table in self.tables] + [f"growth/{count}" for count in self.growth]
        return tuple(f"{piece}/{repeat}" for piece in pieces for repeat in range(self.seeds))

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Score all methods on one split of a table, or find the number of points for one number of rows."""
        part, what, repeat = unit.split("/")
        if part == "growth":
            task = self._task(self.growing, int(what), int(repeat))
            records = self._needed(task, f"{self.growing}, n = {what}", int(repeat))
        else:
            task = self._task(what, self.rows, int(repeat))
            records = self._methods(task, what, int(repeat))
        for record in records:
            progress(f"{unit}: {record.method}")
            yield record

    def _task(self, name: str, rows: int, repeat: int) -> Task:
        return Task.of(read(name, self.data_dir, repeat), rows, self.recipe, self.seed + repeat)

    def _methods(self, task: Task, group: str, repeat: int) -> Iterator[Record]:
        plain, seconds = task.timed(lw.baselines.MapOnly())
        yield Record(group, "plain", repeat, task.scores(plain), seconds)
        gamma = {"γ": task.exact.effective_parameters().total}
        yield Record(group, "exact", repeat, {**task.compared(task.exact), **gamma}, task.seconds)
        for name, method in self.approximations().items():
            fitted, seconds = task.fit(method, self.seed + repeat)
            yield Record(group, name, repeat, task.compared(fitted), seconds)
        yield from self._baselines(task, group, repeat)
        yield from self._means(task, group, repeat)

    def approximations(self) -> dict[str, Any]:
        """Return all methods that approximate the exact posterior, at every size, by name."""
        methods: dict[str, Any] = {}
        for size in self.sizes:
            learned = lw.VaLLA(size, start="greedy", optimiser="lbfgs", steps=self.steps)
            methods |= {
                f"VaLLA({size})": learned,
                f"VaLLA({size}), fixed points": lw.VaLLA(size, start="greedy", optimiser="none"),
                f"ELLA({size})": lw.ELLA(size, size),
                f"ELLA({size}), residual": lw.ELLA(size, size, residual=True),
            }
        return methods

    def _baselines(self, task: Task, group: str, repeat: int) -> Iterator[Record]:
        """Score SWAG after some snapshots, and networks trained with dropout for some epochs, which counts."""
        for count in self.snapshots:
            swag = lw.baselines.SWAG(count, min(20, count), weight_decay=self.recipe.weight_decay)
            fitted, seconds = task.timed(swag)
            yield Record(group, f"SWAG({count})", repeat, task.scores(fitted), seconds)
        for epochs in self.epochs:
            recipe = replace(self.recipe, dropout=self.dropout, epochs=epochs)
            start = time.process_time()
            model = train_mlp(task.x, task.y, 1, recipe, self.seed + repeat)
            training = time.process_time() - start
            fitted, seconds = task.timed(lw.baselines.MCDropout(64), model)
            yield Record(group, f"dropout({epochs})", repeat, task.scores(fitted), training + seconds)

    def _means(self, task: Task, group: str, repeat: int) -> Iterator[Record]:
        """Score the tangent mean beside the network's output, which all records above have."""
        yield Record(group, "exact, tangent mean", repeat, task.with_tangent_mean(task.exact))
        size = self.sizes[-1]
        valla, _ = task.fit(self.approximations()[f"VaLLA({size})"], self.seed + repeat)
        yield Record(group, f"VaLLA({size}), tangent mean", repeat, task.with_tangent_mean(valla))
        tuned, seconds = task.tuned_for_tangent_mean()
        yield Record(group, "exact, tangent mean, tuned", repeat, task.scores(tuned), seconds)

    def _needed(self, task: Task, group: str, repeat: int) -> Iterator[Record]:
        """Add points until the NLL is close to the exact one; the last record has their number, if that happens."""
        exact = task.compared(task.exact)
        gamma = {"γ": task.exact.effective_parameters().total}
        yield Record(group, "exact", repeat, {**exact, **gamma}, task.seconds)
        rows = len(task.x)
        for size in sorted({min(size, rows) for size in self.growth_sizes}):
            method = lw.VaLLA(size, start="greedy", optimiser="none", candidates=rows)
            fitted, seconds = task.fit(method, self.seed + repeat)
            scores = task.compared(fitted)
            yield Record(group, f"VaLLA({size})", repeat, scores, seconds)
            if abs(scores["NLL"] - exact["NLL"]) <= self.close:
                yield Record(group, "points needed", repeat, {"M": size, **gamma})
                return

    @staticmethod
    def picture(result: Stored, path: Path) -> None:
        """Draw NLL and KL against the number of points and against seconds, and the points needed against γ."""
        draw(result.records, path)
