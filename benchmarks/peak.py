"""The memory that a call takes: the most bytes of tensors at once, above what was held before. Needs torch alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile

CPU = torch.device("cpu")
UNTOUCHED = 31 * 2**20  # a block that passes over the data reserve and free at once, and never write


@dataclass(frozen=True)
class Held:
    """Bytes of tensors that a call held, above what was held before it."""

    most: int  # at once
    kept: int  # at the end: the answer, and what the objects that it was given keep
    result: Any  # of the call

    @property
    def taken(self) -> int:
        """The bytes that the call took besides what it leaves behind."""
        return self.most - self.kept


def peak(call: Callable[[], Any], device: torch.device = CPU) -> int:
    """Run the call and return the most bytes of tensors that it held at once, what it leaves behind included."""
    return held(call, device).most


def held(call: Callable[[], Any], device: torch.device = CPU) -> Held:
    """Run the call and return what it held.

    On a GPU from its allocator; on a CPU from the profiler, which sees every allocation of PyTorch but no memory that
    a library takes by itself (MKL, oneDNN), and slows the call by a third.
    """
    gc.collect()
    gc.freeze()  # later collections look at the objects of the call alone, which is quick
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        most = int(torch.cuda.max_memory_allocated() - before)
        gc.collect()
        return Held(most, int(torch.cuda.memory_allocated() - before), result)
    with profile(profile_memory=True) as profiler:
        result = call()
        gc.collect()
    live = most = 0
    for _, size in sorted(_allocations(profiler)):
        live += size
        most = max(most, live)
    return Held(most, live, result)


def _allocations(profiler: profile) -> Iterator[tuple[int, int]]:
    """Yield the time of each allocation, and its bytes; they are negative where memory is freed."""
    assert profiler.kineto_results is not None
    events = list(profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events.extend(event.children)
        size = getattr(event.extra_fields, "alloc_size", UNTOUCHED)
        if event.tag == _EventType.Allocation and abs(size) != UNTOUCHED:
            yield event.start_time_ns, size
