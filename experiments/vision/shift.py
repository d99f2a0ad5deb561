"""Likelihood and calibration while test images move away from the training images: rotated digits, corrupted photos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import Self

from experiments.engine.contract import Record
from experiments.options import Progress
from experiments.vision.learning import tensor_cores
from experiments.vision.limits import Limit, within
from experiments.vision.predictions import Predict, in_parts, scores_of
from experiments.vision.shift_methods import OF_SEVERAL, Effort, Methods
from experiments.vision.shift_task import Task, network_named, prepared

if TYPE_CHECKING:
    from experiments.engine.store import Stored


@dataclass(frozen=True)
class Shift:
    """Settings. ``networks`` are names of ``experiments.vision.shift_task.NETWORKS``.

    Half of the test images are validation data: the first ``tuning`` of them choose precisions and temperatures, on
    images that are not shifted. ``test`` images of the other half are shifted and scored.
    """

    name: ClassVar[str] = "shift"
    title: ClassVar[str] = "rotated digits and corrupted photographs: NLL and ECE of every method against the shift"
    choosing: ClassVar[tuple[str, ...]] = ("networks", "seeds")
    columns: ClassVar[tuple[str, ...]] = ("NLL", "ECE", "accuracy", "Brier")

    data_dir: Path | None = None
    networks: tuple[str, ...] = ("resnet18", "rotated-mnist", "resnet20", "resnet56")
    photographs: str = "cifar10"  # or "cifar10_half", the first half of the training images
    members: int = 3
    angles: tuple[float, ...] = (0, 15, 30, 45, 60, 90, 120, 150, 180)
    effort: Effort = Effort()
    tuning: int = 1000
    test: int = 1000
    seeds: int = 3  # of networks that are trained here and are small; the others have one
    limit: float | None = 35.0  # seconds after the training after which no method is begun
    device: str = "cuda"
    seed: int = 0

    @classmethod
    def quick(cls) -> Self:
        """Return the settings of the quick form: digits of scikit-learn, rotated and corrupted."""
        effort = Effort(500, 200, 250, sizes=(50, 200), samples=8, snapshots=8, steps_between=4,
                        precisions=(1.0, 10.0, 100.0, 1000.0), for_samples=(10.0, 100.0, 1000.0))  # fmt: skip
        return cls(
            networks=("rotated-digits", "corrupted-digits"), members=3, angles=(0, 30, 60, 90, 180), effort=effort,
            tuning=200, test=200, seeds=1, limit=None, device="cpu",
        )  # fmt: skip

    @classmethod
    def full(cls) -> Self:
        """Return the settings of the full form, for a GPU."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return a key for each network and seed."""
        repeats = range(self.seed, self.seed + self.seeds)
        return tuple(
            f"{name}/{seed}"
            for seed in repeats
            for name in self.networks
            if seed == self.seed or name.startswith("rotated")
        )

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Prepare one network and score every method on every step of the shift."""
        name, seed = unit.rsplit("/", 1)
        network = network_named(name)
        if network.images == "cifar10":
            network = replace(network, images=self.photographs)
        counts = (self.members, self.tuning, self.test)
        with tensor_cores(False):
            task = prepared(network, self.data_dir, self.device, counts, self.angles, int(seed))
            progress(f"{unit}: the networks are ready, {task.seconds:.1f} s each")
            methods = Methods(task, self.effort, int(seed)).by_name()
            for method, fitted in within(methods, Limit(self.limit), progress, unit):
                seconds = fitted.seconds + (method in OF_SEVERAL) * (len(task.models) - 1) * task.seconds
                for step, scores in shifted_scores(fitted.answer, task).items():
                    yield Record(f"{name}, {step}", method, int(seed), scores, seconds, fitted.peak)
                progress(f"{unit}, {method}: {seconds:.1f} s")

    def picture(self, stored: Stored, path: Path) -> None:
        """Draw NLL and ECE against the shift."""
        from experiments.vision.shift_picture import picture

        picture(stored.records, path)


def shifted_scores(predict: Predict, task: Task) -> dict[str, dict[str, float]]:
    """Return the scores at every step: the means over the kinds of shift, and NLL and ECE of each kind."""
    result = {}
    for step, kinds in task.shifts.items():
        each = {kind: scores_of(in_parts(predict, x, 500), task.y) for kind, x in kinds.items()}
        names = next(iter(each.values()))
        scores = {name: sum(one[name] for one in each.values()) / len(each) for name in names}
        for kind, one in each.items():
            scores |= {f"{name} {kind}": one[name] for name in ("NLL", "ECE")} if kind else {}
        result[step] = scores
    return result
