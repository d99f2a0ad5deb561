"""Do the guarantees of decisions hold, what do they cost, and which score finds strange inputs? Simulations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from experiments.decision_tasks import CLASSES, Simulated, simulated
from experiments.detection import detected, posteriors, prepared
from experiments.engine.contract import Record
from experiments.options import Progress
from lapwing.decisions.guarantees import (
    SCORES,
    Detector,
    class_scores,
    conformal_quantile,
    number_scale,
    row_shares,
    score_inputs,
    threshold_tests,
)
from lapwing.demo.training import TrainingSettings
from lapwing.errors import LapwingError

WIDE = ("kin8nm", "power", "concrete", "energy", "wine", "protein")


@dataclass(frozen=True)
class Decisions:
    """Settings: which data sets, how many draws of calibration data, and how networks are trained.

    A unit is one data set with one seed, such as "guarantees/kin8nm/0". The predictive is computed once for a pool of
    rows that neither the network nor the posterior has seen. Coverage and false alarms: the pool is split into
    ``calibration`` rows and all others, ``draws`` times. Risks: the pool is the distribution, from which calibration
    rows are drawn with replacement, so that the true risk of a rule is known. The units of ``detection``, such as
    "detection/digits/0", compare the scores of ``ood`` on strange inputs.
    """

    name: ClassVar[str] = "decisions"
    title: ClassVar[str] = "guarantees of conformal sets, abstaining and false alarms, by simulation"
    choosing: ClassVar[tuple[str, ...]] = ("sets", "detection", "seeds")
    data_dir: Path | None = None
    sets: tuple[str, ...] = (
        "digits", "cancer", "mnist", "fashion_mnist", "waves, noise", "diabetes", *WIDE,
        *(f"{name}, noise" for name in WIDE), "energy, thin", "kin8nm, thin", "power, thin",
    )  # fmt: skip
    detection: tuple[str, ...] = ()
    seeds: int = 2
    draws: int = 1000
    calibration: int = 500  # rows, or half of the pool
    level: float = 0.9
    risk: float = 0.05
    wrong: float = 0.1  # share of the pool whose errors are above the tolerance, for numbers
    rate: float = 0.05
    rows: int = 1000  # to train on at most
    recipe: TrainingSettings = TrainingSettings(hidden=(50,), epochs=60)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws < 2 or self.calibration < 20 or self.seeds < 1:
            raise LapwingError(
                f"draws {self.draws}, calibration {self.calibration} and seeds {self.seeds}; expected at least 2, 20 "
                "and 1."
            )

    @classmethod
    def quick(cls) -> Decisions:
        """Return two data sets that need no folder."""
        return cls(
            sets=("digits", "waves, noise"), seeds=1, draws=200, recipe=TrainingSettings(hidden=(50,), epochs=20)
        )

    @classmethod
    def full(cls) -> Decisions:
        """Return all data sets with two seeds."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return the keys, one seed of all data sets after another."""
        kinds = {"guarantees": self.sets, "detection": self.detection}
        return tuple(
            f"{kind}/{name}/{seed}" for seed in range(self.seeds) for kind, names in kinds.items() for name in names
        )

    def measure(self, unit: str, progress: Progress) -> Iterable[Record]:
        """Train a network; simulate all decisions on one data set, or compare the scores of strange inputs."""
        kind, name, seed = unit.split("/")
        if kind == "detection":
            return list(_detection(name, self.seed + int(seed)))
        task = simulated(name, self.data_dir, self.rows, self.recipe, self.seed + int(seed))
        return [
            Record(name, method, int(seed), scores)
            for method, scores in (*self._conformal(task, name), *self._abstain(task), *self._ood(task))
        ]

    def _count(self, task: Simulated) -> int:
        return min(self.calibration, len(task.x) // 2)

    def _conformal(self, task: Simulated, name: str) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield coverage and size of every score over random splits of the pool, with the error of their mean."""
        predictive = task.posterior.predict([task.x])
        if name in CLASSES:
            for score in ("adaptive", "threshold"):
                probs = predictive.class_probs
                each = class_scores(score, probs, row_shares(probs, 0)).double()
                own = each.gather(1, task.y.unsqueeze(1)).squeeze(1)
                yield score, self._covered(own, lambda q, rows, each=each: (each[rows] <= q).double().sum(1).mean())
            return
        for score in ("scaled", "constant"):
            scale = number_scale(score, predictive).double()[:, 0]
            own = (task.y - predictive.mean).abs().double()[:, 0] / scale
            yield score, self._covered(own, lambda q, rows, scale=scale: 2 * q * scale[rows].mean())

    def _covered(self, own: Tensor, size: Any) -> dict[str, float]:
        generator, count = torch.Generator().manual_seed(1), min(self.calibration, len(own) // 2)
        shares, sizes = [], []
        for _ in range(self.draws):
            order = torch.randperm(len(own), generator=generator)
            limit = conformal_quantile(own[order[:count]].unsqueeze(1), self.level)[0]
            shares.append((own[order[count:]] <= limit).double().mean())
            sizes.append(size(limit, order[count:]))
        coverage = torch.stack(shares)
        return {
            "coverage": float(coverage.mean()), "error": float(coverage.std() / self.draws**0.5),
            "size": float(torch.stack(sizes).mean()), "calibration": float(count),
        }  # fmt: skip

    def _abstain(self, task: Simulated) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield how often the true risk of what is answered is above the bound, over draws from the pool."""
        predictive = task.posterior.predict([task.x])
        scoring, generator = predictive.scoring, torch.Generator().manual_seed(2)
        doubt = scoring.uncertainty(predictive, scoring.uncertainties[0])
        tolerance = None
        if task.y.is_floating_point():
            tolerance = float((task.y - predictive.mean).abs().quantile(1 - self.wrong))
        wrong = scoring.wrong(predictive, task.y, tolerance).double()
        broken, answered, risks = 0, [], []
        for _ in range(self.draws):
            rows = torch.randint(len(doubt), (self._count(task),), generator=generator)
            passed = [t for t in threshold_tests(doubt[rows], wrong[rows], 0.95) if t.bounds(self.risk)]
            kept = (
                doubt < max(test.threshold for test in passed) if passed else torch.zeros_like(doubt, dtype=torch.bool)
            )
            risk = float(wrong[kept].mean()) if bool(kept.any()) else 0.0
            broken += risk > self.risk
            risks.append(risk)
            answered.append(float(kept.double().mean()))
        share = broken / self.draws
        yield "abstain", {
            "violations": share, "error": (share * (1 - share) / self.draws) ** 0.5, "risk": sum(risks) / self.draws,
            "answered": sum(answered) / self.draws, "risk of all": float(wrong.mean()),
        }  # fmt: skip

    def _ood(self, task: Simulated) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the rate of false alarms, over random splits of the pool."""
        count = self._count(task)
        for by in SCORES:
            scores, generator, rates = score_inputs(task.posterior, [task.x], by, None, False), torch.Generator(), []
            generator.manual_seed(3)
            for _ in range(self.draws):
                order = torch.randperm(len(scores), generator=generator)
                detector = Detector(task.posterior, by, self.rate, scores[order[:count]].sort().values)
                rates.append((scores[order[count:]] > detector.threshold).double().mean())
            alarms = torch.stack(rates)
            yield f"ood, {by}", {"false alarms": float(alarms.mean()), "error": float(alarms.std() / self.draws**0.5)}


def _detection(name: str, seed: int) -> Iterator[Record]:
    """Yield how well every score finds every kind of strange inputs, for each posterior of one network."""
    task = prepared(name, seed)
    for fitted, posterior in posteriors(task):
        for kind, by, scores in detected(task, posterior):
            yield Record(f"{name}: {kind}", f"{fitted}, {by}", seed, scores)
