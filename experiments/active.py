"""Active learning: rows are chosen in rounds, and the network is trained again after each. Does it beat random rows?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

import lapwing as lw
from experiments.decision_tasks import Rows, rows_of
from experiments.engine.contract import Record
from experiments.options import Progress
from lapwing import metrics
from lapwing.demo.training import TrainingSettings, train_mlp
from lapwing.errors import LapwingError

RULES = {  # the rule of acquire, and whether the posterior that chooses has the precision of the evidence
    "random": ("random", False),
    "batch": ("batch", True),
    "bald": ("bald", True),
    "variance": ("variance", True),
    "batch, default posterior": ("batch", False),
}
TEST = 2000  # rows at most


@dataclass(frozen=True)
class Active:
    """Settings: which tables, how many rounds, and how networks are trained.

    A unit is one table with one seed, such as "energy/0". All rules start from the same rows and initial weights, and
    see the same pool and test rows. Scores are those of the posterior that ``lw.fit`` returns by default, whatever
    posterior chooses.
    """

    name: ClassVar[str] = "active"
    title: ClassVar[str] = "active learning on tables: chosen rows against random ones"
    choosing: ClassVar[tuple[str, ...]] = ("tables", "seeds")
    data_dir: Path | None = None
    tables: tuple[str, ...] = ("energy", "digits", "kin8nm", "concrete")
    seeds: int = 10
    pool: int = 1000  # rows to choose from, at most half of the table
    start: int = 20  # rows that are labelled at first
    rounds: int = 8
    chosen: int = 10  # rows in each round
    recipe: TrainingSettings = TrainingSettings(
        hidden=(50,), epochs=200, batch_size=64, learning_rate=1e-2, weight_decay=1e-4
    )
    seed: int = 300  # those below were used to look for the settings

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.chosen < 1 or self.start < 2:
            raise LapwingError(
                f"rounds {self.rounds}, chosen {self.chosen} and start {self.start}; expected at least 1, 1 and 2."
            )

    @classmethod
    def quick(cls) -> Active:
        """Return one table that needs no folder, with one seed."""
        return cls(tables=("digits",), seeds=1, rounds=2)

    @classmethod
    def full(cls) -> Active:
        """Return all tables with ten seeds."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return the keys, one seed of all tables after another."""
        return tuple(f"{name}/{seed}" for seed in range(self.seeds) for name in self.tables)

    def measure(self, unit: str, progress: Progress) -> Iterable[Record]:
        """Learn actively by every rule on one table."""
        name, number = unit.split("/")
        x, y = rows_of(name, self.data_dir, self.seed + int(number))
        cut = min(self.pool, len(x) // 2)
        x = (x - x[:cut].mean(0)) / x[:cut].std(0).clamp_min(1e-2)
        y = (y - y[:cut].mean()) / y[:cut].std() if y.is_floating_point() else y
        test = (x[cut : cut + TEST], y[cut : cut + TEST])
        for method, (rule, evidence) in RULES.items():
            progress(f"{unit}: {method}")
            scores = self._rounds(rule, evidence, (x[:cut], y[:cut]), test, self.seed + int(number))
            yield Record(name, method, int(number), scores)

    def _rounds(self, rule: str, evidence: bool, pool: Rows, test: Rows, seed: int) -> dict[str, float]:
        """Return the scores after the last round, and their means over the rounds."""
        generator, (x, y), labelled = torch.Generator().manual_seed(seed), pool, torch.arange(self.start)
        numbers = y.is_floating_point()
        likelihood, outputs = ("regression", 1) if numbers else ("classification", int(y.max()) + 1)
        errors: list[float] = []
        nlls: list[float] = []
        for number in range(self.rounds + 1):
            rows = (x[labelled], y[labelled])
            model = train_mlp(*rows, outputs, self.recipe, seed)
            posterior = lw.fit(model, [rows], likelihood)
            predictive = posterior.predict([test[0]])
            right = metrics.rmse(predictive.mean, test[1]) if numbers else metrics.accuracy(predictive.probs, test[1])
            errors.append(right if numbers else 1 - right)
            nlls.append(float(-predictive.log_prob(test[1]).mean()))
            if number < self.rounds:
                chooser = posterior.tuned(lw.tuners.MaximiseEvidence()) if evidence else posterior
                labelled = torch.cat([labelled, self._next(rule, chooser, x, labelled, generator)])
        name = "RMSE" if numbers else "error rate"
        means = {f"mean {name}": sum(errors[1:]) / self.rounds, "mean NLL": sum(nlls[1:]) / self.rounds}
        return {name: errors[-1], "NLL": nlls[-1], **means}

    def _next(self, rule: str, posterior: lw.Fitted, x: Tensor, labelled: Tensor, generator: torch.Generator) -> Tensor:
        """Return the numbers of the rows to label next."""
        free = torch.ones(len(x), dtype=torch.bool)
        free[labelled] = False
        rest = free.nonzero().flatten()
        if rule == "random":
            return rest[torch.randperm(len(rest), generator=generator)[: self.chosen]]
        return rest[posterior.acquire(x[rest], self.chosen, by=rule)]
