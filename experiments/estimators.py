"""Is ``cv=5`` of the estimators for scikit-learn better than held-out rows, and from how many rows on is it not?"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from typing_extensions import Self

import lapwing as lw
from experiments.crossfit_tasks import READERS, table
from experiments.data import data_folder
from experiments.engine.contract import Record
from experiments.options import Progress
from lapwing.sklearn import LapwingClassifier, LapwingRegressor

LEVEL = 0.95
TEST = 1000  # rows to test on, at most
SMALL = ("r_wage", "r_ames")  # tables of up to 3,000 rows


@dataclass(frozen=True)
class Estimators:
    """Settings: tables, numbers of labelled rows, and seeds, each another draw of the rows and of the network.

    Both rules have the same rows. Without ``cv`` the estimators hold out 15 % of them, to stop the training, and from
    100 such rows on to calibrate. A repeat is a table and a seed.
    """

    data_dir: Path | None = None
    tables: tuple[str, ...] = (
        "c_phoneme", "c_satimage", "c_magic", "c_spambase", "c_penbased", "c_ring", "clusters",
        "r_wage", "r_ames", "r_cps1988", "r_computers", "r_noxemissions", "r_gpa2", "friedman",
    )  # fmt: skip
    sizes: tuple[int, ...] = (100, 300, 1000, 3000)
    seeds: int = 2
    seed: int = 0

    name: ClassVar[str] = "estimators"
    title: ClassVar[str] = "cv=5 of LapwingClassifier and LapwingRegressor against their held-out rows"
    choosing: ClassVar[tuple[str, ...]] = ("sizes", "seeds")
    columns: ClassVar[tuple[str, ...]] = ("NLL", "accuracy", "RMSE", "coverage 95 %")

    @classmethod
    def quick(cls) -> Self:
        """Return the quick form: two tables that need no folder, 100 rows, one seed."""
        return cls(tables=("moons", "waves"), sizes=(100,), seeds=1)

    @classmethod
    def full(cls) -> Self:
        """Return the full form. It needs the folder of ``experiments.package_tables``."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return one unit for each size, seed and table."""
        seeds = range(self.seed, self.seed + self.seeds)
        pairs = [(n, name) for n in self.sizes for name in self.tables if n < 3000 or name not in SMALL]
        return tuple(f"{name}/{n}/{seed}" for n, name in pairs for seed in seeds)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train and score both rules on the same rows."""
        name, count, seed = unit.split("/")
        n = int(count)
        x, y = READERS.get(name, table(name))(data_folder(self.data_dir) if self.data_dir else Path())
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(int(seed)))
        train, test = order[:n], order[n : n + TEST]
        is_number = y.is_floating_point()
        if is_number:
            y = (y - y[train].mean(0)) / y[train].std(0)
        for rule, cv in (("held-out rows", None), ("cv=5", 5)):
            estimator = (LapwingRegressor if is_number else LapwingClassifier)(cv=cv, random_state=int(seed))
            start = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", lw.errors.CalibrationWarning)  # as the table shows what it says
                estimator.fit(x[train].numpy(), (y[train, 0] if is_number else y[train]).numpy())
            seconds = time.process_time() - start
            predictive = estimator.posterior_.predict(x[test].double())
            scores = {"NLL": -float(predictive.log_prob(y[test].double() if is_number else y[test]).mean())}
            if is_number:
                scores["RMSE"] = lw.metrics.rmse(predictive.mean, y[test])
                low, high = predictive.interval(LEVEL)
                scores["coverage 95 %"] = lw.metrics.coverage(low, high, y[test])
            else:
                scores["accuracy"] = lw.metrics.accuracy(predictive.probs, y[test])
                scores["ECE"] = lw.metrics.ece(predictive.probs, y[test])
            repeat = 100 * self.tables.index(name) + int(seed)
            yield Record(f"{'numbers' if is_number else 'classes'}, {n} rows", rule, repeat, scores, seconds)
