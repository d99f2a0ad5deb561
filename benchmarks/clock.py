"""Time and memory of one call. Needs torch alone."""

from __future__ import annotations

import platform
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def machine(threads: int) -> dict[str, Any]:
    """Set the number of threads, and return a description of the machine and the versions."""
    torch.set_num_threads(threads)
    return {"python": platform.python_version(), "torch": str(torch.__version__),
            "processor": platform.processor() or platform.machine(), "threads": threads}  # fmt: skip


def best_of(times: int, call: Callable[[], Any]) -> float:
    """Return the seconds of the shortest of several calls."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def epoch(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    """Return the seconds of a plain forward and backward pass: autograd.grad of the mean loss in all weights."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run() -> None:
        for x, y in data:
            torch.autograd.grad(F.cross_entropy(model(x), y), parameters)

    return best_of(3, run)


def forward(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    """Return the seconds of a plain forward pass without a graph."""

    def run() -> None:
        with torch.no_grad():
            for x, _ in data:
                model(x)

    return best_of(3, run)


def resident() -> int:
    """Return the bytes of memory that the process uses now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Peak:
    """The resident peak of a region above what was held before it, in MB, sampled every few milliseconds."""

    def __enter__(self) -> Peak:
        self._before = self._most = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.003):
            self._most = max(self._most, resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._most = max(self._most, resident())
        self.mb = (self._most - self._before) / 2**20
