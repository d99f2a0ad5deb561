"""The two regressions with a gap on which HFL is tested: data, a network at its minimum, and new points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.engine.contract import Record
from experiments.engine.seeds import parted, seed_units
from experiments.minimum import minimised, squared_error
from experiments.options import Progress
from experiments.table_methods import NORMAL_95
from lapwing import metrics
from lapwing.demo.training import TrainingSettings, mlp
from lapwing.methods.hfl import ResponsePosterior

TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "quadratic": lambda x: x.square(),
    "sinusoid": lambda x: torch.sin(3 * x),
}
KINDS = {"standard": "", "gap": "gap_"}  # of splits of tables, and how their keys begin


@dataclass(frozen=True)
class ResponseTask:
    """Settings: y = target(x) + noise with no data in a gap, and a tanh network 1-50-1 at its minimum.

    Noise and prior are known. New points come from the whole range and from the gap; intervals have 95 %.
    """

    name: ClassVar[str] = "response"
    title: ClassVar[str] = "error bars by pushing: two tasks with a gap in the data, and real tables"
    choosing: ClassVar[tuple[str, ...]] = ("tasks", "seeds", "sets", "splits")

    tasks: tuple[str, ...] = tuple(TARGETS)
    data: int = 32
    gap: float = 0.7
    reach: float = 2.0
    noise_std: float = 0.1
    precision: float = 0.5
    hidden: int = 50
    seeds: int = 10
    new: int = 400
    pushes: int = 32
    members: int = 5
    epochs: int = 2000  # of the members of the ensemble and of the network with dropout
    steps: tuple[int, ...] = (100, 300, 1000, 3000, 10_000)
    sets: tuple[str, ...] = ("yacht", "boston")
    splits: int = 2
    data_dir: Path | None = None
    seed: int = 0

    @classmethod
    def quick(cls) -> ResponseTask:
        """Return the settings of the quick form."""
        return cls(seeds=1, steps=(20, 50), members=2, epochs=50, new=50, sets=("yacht",), splits=1)

    @classmethod
    def full(cls) -> ResponseTask:
        """Return the settings of the full form."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return a unit for each task and seed, and the sensitivity; with a data folder, each split of a table too."""
        kinds = [f"{name}/{kind}" for name in self.sets for kind in KINDS] if self.data_dir is not None else []
        tables = tuple(f"{kind}/{split}" for kind in kinds for split in range(self.splits))
        return (*seed_units(self, *self.tasks), "sensitivity", *tables)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Fit every method to one network; or measure how the variance depends on the push and its fine-tuning."""
        from experiments.response import scores_of_unit, sensitivity  # which imports this module

        if unit == "sensitivity":
            for group, rows in sensitivity(self).items():
                yield from (Record(group, name, self.seed, scores) for name, scores in rows.items())
            return
        name, repeat = parted(unit)
        for method, scores in scores_of_unit(self, name, repeat).items():
            yield Record(name.replace("/", ", "), method, repeat, scores)


@dataclass(frozen=True, eq=False)
class Problem:
    """One data set with its network at the minimum, and new points to test it on."""

    model: nn.Sequential
    x: Tensor
    y: Tensor
    settings: ResponseTask
    truth: Callable[[Tensor], Tensor]
    seed: int

    @property
    def likelihood(self) -> lw.Gaussian:
        """The likelihood with the known noise."""
        return lw.Gaussian(noise_std=self.settings.noise_std)

    def fit(self, method: Any, model: nn.Module | None = None) -> lw.Fitted:
        """Fit a method to the network at the minimum, or to another one."""
        return lw.fit(
            model or self.model, [(self.x, self.y)], self.likelihood, method=method, prior=self.settings.precision,
            progress=False, generator=torch.Generator().manual_seed(self.seed),
        )  # fmt: skip

    def responses(self, method: lw.HFL | None = None) -> ResponsePosterior:
        """Return a posterior of HFL that pushes for every prediction, by default with exact Newton steps."""
        posterior = self.fit(method or lw.HFL(drift=math.inf)).posterior
        assert isinstance(posterior, ResponsePosterior)
        return posterior

    def new(self, low: float, high: float, seed: int) -> tuple[Tensor, Tensor]:
        """Draw new inputs between two bounds, and their noisy targets."""
        generator = torch.Generator().manual_seed(10_000 + seed)
        x = low + (high - low) * torch.rand(self.settings.new, 1, generator=generator, dtype=torch.float64)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return x, self.truth(x) + self.settings.noise_std * noise


def made(task: str, settings: ResponseTask, seed: int) -> Problem:
    """Draw the data of a task and train its network to the minimum."""
    generator = torch.Generator().manual_seed(seed)
    side = torch.rand(settings.data, 1, generator=generator, dtype=torch.float64)
    x = settings.gap + (settings.reach - settings.gap) * side
    x[1::2] *= -1
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    y = TARGETS[task](x) + settings.noise_std * noise
    model = mlp(1, 1, TrainingSettings((settings.hidden,)), seed).double()
    problem = Problem(model, x, y, settings, TARGETS[task], seed)
    return replace(problem, model=minimised(model, x, squared_error(y, settings.noise_std**2), settings.precision))


def interval_scores(mean: Tensor, std: Tensor, y: Tensor, prefix: str = "") -> dict[str, float]:
    """Return coverage (PICP) and mean width (MPIW) of 95 % intervals, and the NLL."""
    low, high = mean - NORMAL_95 * std, mean + NORMAL_95 * std
    return {
        f"{prefix}PICP": metrics.coverage(low, high, y),
        f"{prefix}MPIW": metrics.interval_width(low, high),
        f"{prefix}NLL": metrics.normal_nll(mean, std, y),
    }
