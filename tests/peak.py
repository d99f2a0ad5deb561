"""The memory that a call takes on the CPU: the most bytes of tensors at once, and those that it leaves behind.

PyTorch's profiler reports every allocation of its CPU allocator: results, intermediate results, what autograd saves,
and the workspaces that its kernels ask it for. Memory that a library takes by itself (MKL, oneDNN) is not seen. It
slows a call by a third. A ``TorchDispatchMode`` that follows storages takes eight times as long and sees no workspaces.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _EventType
from torch.autograd.profiler import profile


@dataclass(frozen=True)
class Peak:
    """Bytes of tensors that a call took, above what was held before it."""

    most: int  # at once
    kept: int  # at the end: the answer, and what the objects that it was given keep
    result: Any  # of the call

    @property
    def taken(self) -> int:
        """The bytes that the call took besides what it leaves behind."""
        return self.most - self.kept


def peak(call: Callable[[], Any]) -> Peak:
    """Run the call and return what it took. Garbage is collected before and after it."""
    gc.collect()
    gc.freeze()  # the second collection looks at the objects of the call alone, which is quick
    with profile(profile_memory=True) as profiler:
        result = call()
        gc.collect()
    live = most = 0
    for _, size in sorted(_allocations(profiler)):
        live += size
        most = max(most, live)
    return Peak(most, live, result)


def _allocations(profiler: profile) -> Iterator[tuple[int, int]]:
    """Yield the time of each allocation, and its bytes; they are negative where memory is freed."""
    assert profiler.kineto_results is not None
    events = list(profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
