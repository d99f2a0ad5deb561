"""A limit on the time of one unit, and the time that a piece of work takes on any device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch

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


def timed(work: Callable[[], T], device: str | torch.device) -> tuple[T, float]:
    """Return the result and the seconds, with all work on a GPU done.

    >>> timed(lambda: 3, "cpu")[0]
    3
    """
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    if on_gpu:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def within(
    methods: dict[str, Callable[[], T]], limit: Limit, device: str | torch.device, progress: Progress, unit: str
) -> Iterator[tuple[str, T, float]]:
    """Yield name, result and seconds of every method; say which one failed, or was not begun for lack of time."""
    for name, method in methods.items():
        if limit.passed:
            progress(f"{unit}, {name}: not begun, the time is over")
            continue
        try:
            result, seconds = timed(method, device)
        except (LapwingError, torch.OutOfMemoryError) as error:
            progress(f"{unit}, {name}: failed: {error}")
            continue
        yield name, result, seconds
