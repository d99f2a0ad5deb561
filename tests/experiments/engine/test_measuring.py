"""The time and memory of a call, and the machine in words."""

from __future__ import annotations

import mmap
import time

import pytest
import torch

from experiments.engine.machine import Machine
from experiments.engine.measuring import _PEAKS, measured


def touched(size: int) -> int:
    """Take so many bytes from the system and give them back; the allocator might have them at hand."""
    with mmap.mmap(-1, size) as block:
        for place in range(0, size, mmap.PAGESIZE):
            block[place] = 1
    return size


def test_the_peak_sees_memory_that_is_free_again() -> None:
    size = 2**26
    large = measured(lambda: touched(size))
    small = measured(lambda: 3)
    assert large.answer == size
    assert large.peak is None or (small.peak is not None and size / 2 < large.peak - small.peak < 2 * size)


def test_the_peak_of_a_call_sees_those_within_it_and_what_was_before() -> None:
    size, peaks = 2**26, []

    def outer() -> None:
        touched(size)
        peaks.append(measured(lambda: 3).peak)

    most = measured(outer).peak
    assert most is None or most - peaks[0] > size / 2
    most = measured(lambda: measured(lambda: touched(size))).peak
    assert most is None or most - peaks[0] > size / 2


def test_a_call_that_raises_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        measured(lambda: 1 // 0)
    assert _PEAKS == []


def test_seconds_are_those_of_the_call() -> None:
    assert 0.05 <= measured(lambda: time.sleep(0.05)).seconds < 5


def test_the_machine_is_named() -> None:
    machine = Machine.here("python -m experiments toy")
    assert machine.hardware
    assert machine.threads == torch.get_num_threads()
    assert set(machine.versions) == {"python", "torch", "lapwing"}
