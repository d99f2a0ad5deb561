"""The case study as an experiment of the engine: a phantom, a table over images, the next angles, a large image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from experiments.engine.contract import Record
from experiments.engine.seeds import records_of
from experiments.options import Progress, chosen
from experiments.tomography.case import scans
from experiments.tomography.grid import GridSettings, setting_scores
from experiments.tomography.large import LargeSettings
from experiments.tomography.large import reconstructed as large_reconstruction
from experiments.tomography.phantoms import digits, ellipses
from experiments.tomography.scanning import STRATEGIES, DesignSettings, Scanned, scanned, summarised
from experiments.tomography.study import Study, StudySettings

if TYPE_CHECKING:
    from experiments.engine.store import Stored

PARTS = ("phantom", "table", "angles", "large")
NEXT = "next angles"  # the group of the records of the part "angles"


@dataclass(frozen=True)
class Tomography:
    """Settings of the parts.

    Units are "phantom"; "table/ANGLES/NOISE", one setting of the table over all images; "angles/IMAGE", every way to
    choose the next angles of one image; and "large".
    """

    name: ClassVar[str] = "tomography"
    title: ClassVar[str] = (
        "images from few X-ray angles, with error bars: a phantom, digits, the next angles, 501 x 501"
    )
    choosing: ClassVar[tuple[str, ...]] = ("parts",)
    columns: ClassVar[tuple[str, ...]] = ("PSNR", "LL", "RMS z", "coverage 95 %", "correlation")

    data_dir: Path | None = None
    parts: tuple[str, ...] = PARTS
    images: str = "mnist"  # of the table: a file of the data folder, or "ellipses", which are made
    phantom: StudySettings = StudySettings()
    table: GridSettings = GridSettings()
    angles: DesignSettings = DesignSettings()
    large: LargeSettings = LargeSettings()
    device: str = "cuda"  # of the parts "table" and "large"
    seed: int = 0

    @classmethod
    def quick(cls) -> Self:
        """Return the settings of the quick form: images of 12 to 25 pixels that are made, and networks of few steps."""
        return cls(
            images="ellipses",
            phantom=StudySettings(size=12, angles=5, steps=20, channels=3, samples=16, tuning=50),
            table=GridSettings(images=2, size=12, angles=(3,), noises=(0.05,), steps=20, channels=3, samples=16),
            angles=DesignSettings(images=2, size=12, counts=(2, 3), candidates=6, steps=20, channels=3),
            large=LargeSettings(
                size=25, angles=4, bins=17, scales=3, steps=20, channels=3, samples=8, memory="1GB", tuning=50
            ),
            device="cpu",
        )

    @classmethod
    def full(cls) -> Self:
        """Return the settings of the full form: the parts "table" and "large" are for a GPU."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return the keys of the parts that were asked for."""
        chosen(self.parts, PARTS, "parts")
        keys = {
            "phantom": ["phantom"],
            "table": [f"table/{s.angles}/{s.noise:g}" for s in self.table.settings],
            "angles": [f"angles/{image}" for image in range(self.angles.images)],
            "large": ["large"],
        }
        return tuple(key for part in self.parts for key in keys[part])

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Run one unit; a record is of one image."""
        part, *rest = unit.split("/")
        if part == "table":
            return self._setting(unit, progress)
        if part == "angles":
            return self._angles(int(rest[0]))
        return self._phantom(progress) if part == "phantom" else self._large(progress)

    def picture(self, stored: Stored, path: Path) -> None:
        """Draw the PSNR against the number of angles, from the units of the part "angles", if there are some."""
        from experiments.tomography.pictures import design

        records = [record for record in stored.records if record.group == NEXT]
        if records:
            result = summarised({(r.method, r.repeat): Scanned.from_scores(r.scores) for r in records}, self.angles)
            design(result, path)

    def _phantom(self, progress: Progress) -> Iterator[Record]:
        study = Study.of(self.phantom, self.seed, progress)
        for name, result in (
            ("phantom", study.scores(self.phantom, self.seed)),
            ("phantom, priors", study.priors(self.phantom, self.seed)),
            ("phantom, hyperparameters", study.hyperparameters(self.phantom, self.seed)),
        ):
            yield from records_of(replace(result, experiment=name), self.seed)

    def _setting(self, unit: str, progress: Progress) -> Iterator[Record]:
        (setting,) = (s for s in self.table.settings if unit == f"table/{s.angles}/{s.noise:g}")
        cases = scans(self._truths(), setting, self.seed)
        for image, scores in enumerate(setting_scores(cases, setting, self.table, self.seed, progress, self.device)):
            for method, each in scores.items():
                yield Record(str(setting), method, image, each)

    def _truths(self) -> Tensor:
        count = self.table.images
        if self.images != "ellipses":
            return digits(self.data_dir, count, name=self.images)
        generators = (torch.Generator().manual_seed(self.seed + image) for image in range(count))
        return torch.stack([ellipses(self.table.size, generator) for generator in generators])

    def _angles(self, image: int) -> Iterator[Record]:
        for name in STRATEGIES:
            answer = scanned(self.angles, name, self.seed + image)
            yield Record(NEXT, name, image, answer.to_scores(self.angles.counts))

    def _large(self, progress: Progress) -> Iterator[Record]:
        result = large_reconstruction(self.large, self.seed, progress, self.device)
        return records_of(replace(result, experiment=f"{self.large.size} x {self.large.size}"), self.seed)
