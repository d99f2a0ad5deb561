"""A limit on the time of one unit of an experiment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from experiments.engine.measuring import Measured, measured
from experiments.options import Progress
from lapwing.errors import LapwingError

T = TypeVar("T")


@dataclass(frozen=True)
class Limit:
    """Seconds from now after which no further method of a unit is begun; None is no limit."""

    seconds: float | None
    begin: float = field(default_factory=time.perf_counter)

    @property
    def passed(self) -> bool:
        """Whether the time is over."""
        return self.seconds is not None and time.perf_counter() - self.begin > self.seconds


def within(
    methods: dict[str, Callable[[], T]], limit: Limit, progress: Progress, unit: str
) -> Iterator[tuple[str, Measured[T]]]:
    """Yield name and result of every method; say which one failed, or was not begun for lack of time."""
    for name, method in methods.items():
        if limit.passed:
            progress(f"{unit}, {name}: not begun, the time is over")
            continue
        try:
            yield name, measured(method)
        except (LapwingError, torch.OutOfMemoryError) as error:
            progress(f"{unit}, {name}: failed: {error}")
