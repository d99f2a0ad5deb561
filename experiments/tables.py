"""Regression on the UCI tables: standard splits, splits with a gap, networks 1x50 and 2x50, every method."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from experiments.data import data_folder
from experiments.engine.contract import Record
from experiments.options import Progress
from experiments.stacked import StackedTraining
from experiments.table_methods import METHODS, SLOW, Sizes, Task, records
from experiments.uci import read_split
from lapwing.errors import LapwingError

KINDS = ("standard", "gap")
DEPTHS = {"1x50": (50,), "2x50": (50, 50)}
SPLITS = {  # of each kind; large tables come first, so that no process waits for a long one at the end
    "protein": (5, 9), "naval": (20, 16), "kin8nm": (20, 8), "power": (20, 4), "wine": (20, 11), "concrete": (20, 8),
    "energy": (20, 8), "boston": (20, 13), "yacht": (20, 6),
}  # fmt: skip


@dataclass(frozen=True)
class Tables:
    """Settings: which tables, splits and networks, and how they are trained.

    A gap split leaves out the middle third of the rows along one input, so there is one for each input. A unit is one
    split for one network, such as "wine/gap/3/2x50". Its MAP network, the rest of an ensemble and a network with
    dropout are trained side by side.

    **Noise.** All methods that keep the MAP network share one noise: the one that maximises the evidence of the
    linearised posterior over all weights, jointly with the precision. It is the mean squared residual times n / (n - γ)
    for γ weights that the data determine. The MAP network has it too. Networks with another mean (MC dropout, ensemble,
    SWAG) have their own mean squared training residual times the same factor. **Prior.** Each method with an evidence
    learns its precision by it; HFL has that of the linearised posterior. **Scores.** The predictive is normal for all,
    with the mean and variance of the outputs plus the noise.

    The methods in ``SLOW`` run on the first ``slow_splits`` splits of each kind only. Units are ordered by split, so
    that a run that ends early has the first splits of everything.
    """

    name: ClassVar[str] = "uci"
    title: ClassVar[str] = "nine regression tables, standard and gap splits, every method"
    choosing: ClassVar[tuple[str, ...]] = ("sets", "kinds", "depths", "splits")
    columns: ClassVar[tuple[str, ...]] = ("log-likelihood", "RMSE", "coverage 95 %")
    data_dir: Path | None = None
    sets: tuple[str, ...] = tuple(SPLITS)
    kinds: tuple[str, ...] = KINDS
    depths: tuple[str, ...] = tuple(DEPTHS)
    splits: int = 20  # of each kind at most
    slow_splits: int = 3
    members: int = 5  # of the ensemble, with the MAP network
    methods: tuple[str, ...] = METHODS
    training: StackedTraining = StackedTraining()
    sizes: Sizes = Sizes()
    seed: int = 0

    def __post_init__(self) -> None:
        for field, known in (("sets", SPLITS), ("kinds", KINDS), ("depths", DEPTHS), ("methods", METHODS)):
            unknown = [name for name in getattr(self, field) if name not in known]
            if unknown:
                raise LapwingError(f"{field}: unknown {', '.join(unknown)}; expected some of {', '.join(known)}.")
        if self.members < 2 or self.splits < 1 or self.slow_splits < 0:
            raise LapwingError(
                f"members is {self.members}, splits {self.splits}, slow_splits {self.slow_splits}; expected at least "
                "2, 1 and 0."
            )

    @classmethod
    def quick(cls) -> Tables:
        """Return the first standard and the first gap split of three small tables, with short training."""
        return cls(sets=("energy", "boston", "yacht"), splits=1, training=StackedTraining(steps=1000))

    @classmethod
    def full(cls) -> Tables:
        """Return all splits of all tables."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return the keys, by the number of the split."""
        return tuple(
            f"{name}/{kind}/{split}/{depth}"
            for split in range(self.splits)
            for name in SPLITS
            for kind in self.kinds
            for depth in reversed(self.depths)  # the deeper network takes longer
            if name in self.sets and split < SPLITS[name][KINDS.index(kind)]
        )

    def measure(self, unit: str, progress: Progress) -> Iterable[Record]:
        """Train the networks of one split and score every method."""
        name, kind, number, depth = unit.split("/")
        split = int(number)
        table = read_split(data_folder(self.data_dir) / f"uci_{name}.npz", split, kind)
        slow = split < self.slow_splits
        methods = tuple(method for method in self.methods if slow or method not in SLOW)
        members = self.members if "ensemble" in methods else 1
        training = replace(self.training, hidden=DEPTHS[depth])
        task = Task.trained(table, training, self.sizes, self.seed + split, members)
        return tuple(records(task, f"{name}/{kind}/{depth}", split, methods, progress))
