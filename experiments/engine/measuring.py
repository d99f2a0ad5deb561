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


_PEAKS: list[int] = []  # so far, of the calls that are running; the outermost is the first


def measured(call: Callable[[], Answer]) -> Measured[Answer]:
    """Run the call and return its answer, time and peak memory. Calls may be within others.

    >>> measured(lambda: 3).answer
    3
    """
    _note_peak()
    clean = _reset()
    _PEAKS.append(0)
    try:
        start = time.perf_counter()
        answer = call()
        if _on_gpu():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        _note_peak()
        return Measured(answer, seconds, _PEAKS[-1] or None if clean else None)
    finally:
        most = _PEAKS.pop()
        _PEAKS[-1:] = [max(most, outer) for outer in _PEAKS[-1:]]


def _note_peak() -> None:
    """Keep the peak of the innermost call that is running, before it is forgotten."""
    _PEAKS[-1:] = [max(peak, _peak() or 0) for peak in _PEAKS[-1:]]


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
