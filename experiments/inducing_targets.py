"""Inducing points on functions with a jump or kinks, against the exact posterior of tanh and ReLU networks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

import lapwing as lw
from experiments.engine.contract import Record
from experiments.engine.seeds import records_of
from experiments.inducing_task import RECIPE, SEED, SMALL, Task, divergence
from experiments.options import Progress, silent
from lapwing import metrics
from lapwing.demo.result import Result, Row, plain
from lapwing.demo.training import TrainingSettings, train_mlp

TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "step": lambda x: (x > 0).to(x),
    "kinks": lambda x: ((x + 0.75).abs() - 0.75).abs(),  # at -1.5, -0.75 and 0
}


@dataclass(frozen=True)
class Targets:
    """Settings: functions with a jump or kinks, with noise and a gap in the data.

    No smooth kernel represents them, but the network's output is in the space of its own tangent kernel.

    Two networks learn them. ELLA has as many landmarks as directions. Training inputs are uniform on [-reach, reach]
    without the gap; new points, on which coverage and likelihood are measured, are uniform on all of it.
    """

    name: ClassVar[str] = "inducing_targets"
    title: ClassVar[str] = "functions of one input with jumps and kinks: inducing points against the exact posterior"
    choosing: ClassVar[tuple[str, ...]] = ("activations",)

    recipe: TrainingSettings = RECIPE
    activations: tuple[str, ...] = ("tanh", "relu")
    data: int = 200
    test: int = 2000
    noise_std: float = 0.1
    reach: float = 3.0
    gap: tuple[float, float] = (0.5, 1.75)
    margin: float = 1.5
    grid: int = 200
    points: tuple[int, ...] = (20, 40)
    seed: int = SEED

    @classmethod
    def quick(cls) -> Targets:
        """Return the settings of the quick form."""
        return cls(recipe=SMALL, data=60, test=200, points=(3, 6))

    @classmethod
    def full(cls) -> Targets:
        """Return the settings of the full form."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return a unit for each activation."""
        return self.activations

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train networks of one activation on every function."""
        return records_of(run(replace(self, activations=(unit,)), progress), self.seed)


def run(settings: Targets, progress: Progress = silent) -> Result:
    """Compare Full, VaLLA and ELLA on every target and network."""
    start = time.perf_counter()
    rows: list[Row] = []
    arrays: dict[str, list[float]] = {}
    notes: list[str] = []
    for name, target in TARGETS.items():
        generator = torch.Generator().manual_seed(settings.seed)
        x, y = noisy(target, settings, settings.data, generator, gap=True)
        new = noisy(target, settings, settings.test, generator, gap=False)
        for activation in settings.activations:
            model = train_mlp(x, y, 1, replace(settings.recipe, activation=activation), settings.seed)
            task = Task.of(model, x, y, settings.margin, settings.grid)
            group = f"{name}, {activation}"
            drawn = {"x": x, "y": y, "grid": task.grid, "truth": target(task.grid), "mean": task.mean}
            for label, fitted in _fits(task, settings).items():
                variance = task.variance(fitted)
                scores = {"KL": divergence(task.exact, variance), **_on_new_points(fitted, *new, settings.gap)}
                scores |= {"γ": task.gamma} if fitted is task.full else {}
                rows.append(Row(label, scores, group))
                drawn[f"{label}/std"] = variance.sqrt()
            arrays |= {f"{group}/{key}": array.detach().reshape(-1).tolist() for key, array in drawn.items()}
            notes.append(f"{group}: γ {task.gamma:.1f}")
            progress(f"{group}: {time.perf_counter() - start:.0f} s")
    seconds = {"total": time.perf_counter() - start}
    return Result("inducing_targets", plain(settings), settings.seed, tuple(rows), seconds, arrays, tuple(notes))


def noisy(
    target: Callable[[Tensor], Tensor], settings: Targets, count: int, generator: torch.Generator, gap: bool
) -> tuple[Tensor, Tensor]:
    """Draw inputs and noisy targets, with or without a gap in the inputs."""
    low, high = settings.gap
    width = 2 * settings.reach - (high - low if gap else 0.0)
    x = torch.rand(count, 1, generator=generator, dtype=torch.float64) * width - settings.reach
    x = x + (high - low) * (x > low) if gap else x
    return x, target(x) + settings.noise_std * torch.randn(count, 1, generator=generator, dtype=torch.float64)


def _fits(task: Task, settings: Targets) -> dict[str, lw.Fitted]:
    fits = {"Full": task.full}
    for count in settings.points:
        fits[f"VaLLA({count})"] = task.fit(lw.VaLLA(count), settings.seed)[0]
        fits[f"ELLA({count})"] = task.fit(lw.ELLA(count, count), settings.seed)[0]
    return fits


def _on_new_points(fitted: lw.Fitted, x: Tensor, y: Tensor, gap: tuple[float, float]) -> dict[str, float]:
    """Return coverage and NLL where there are training data, and in the gap."""
    predicted = fitted.predict(x)
    low, high = predicted.interval(0.95)
    inside = ((x > gap[0]) & (x < gap[1])).squeeze(1)
    scores: dict[str, float] = {}
    for mask, suffix in ((~inside, ""), (inside, " in gap")):
        scores[f"coverage 95 %{suffix}"] = metrics.coverage(low[mask], high[mask], y[mask])
        scores[f"NLL{suffix}"] = metrics.normal_nll(predicted.mean[mask], predicted.std[mask], y[mask])
    return scores
