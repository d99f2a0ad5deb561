"""The time and memory of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Measured(Generic[Answer]):
    """What a call returned, its wall-clock time, and the most bytes while it ran.

    The bytes are those of tensors on the GPU once this process uses one, else the resident memory of the process, with
    the libraries that it has loaded; None where the system does not tell.
    """

    answer: Answer
    seconds: float
    peak: int | None


def measured(call: Callable[[], Answer]) -> Measured[Answer]:
    """Run the call and return its answer, time and peak memory. Calls within calls spoil the peak of the outer one.

    >>> measured(lambda: 3).answer
    3
    """
    clean = _reset()
    start = time.perf_counter()
    answer = call()
    if _on_gpu():
        torch.cuda.synchronize()
    return Measured(answer, time.perf_counter() - start, _peak() if clean else None)


def _on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _reset() -> bool:
    """Forget the peak so far; return whether that is possible."""
    if _on_gpu():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resident memory, on Linux
    except OSError:
        return False
    return True


def _peak() -> int | None:
    if _on_gpu():
        return torch.cuda.max_memory_allocated()
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
