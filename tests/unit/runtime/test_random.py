"""Random numbers of code that draws from the global generators, in several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lapwing.runtime.threads import Stream, global_seed, undisturbed

CPU = torch.device("cpu")


def drawn(seed: int) -> torch.Tensor:
    """Draw in several blocks of one stream."""
    stream, parts = Stream(seed, CPU), []
    for _ in range(20):
        with stream.drawing():
            parts.append(torch.rand(3))
    return torch.cat(parts)


def test_a_stream_continues_and_leaves_the_global_state() -> None:
    before = torch.get_rng_state()
    numbers = drawn(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(numbers, torch.rand(60))


def test_streams_in_many_threads() -> None:
    before = torch.get_rng_state()
    expected = [drawn(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(drawn, list(range(8)) * 6))
    assert all(torch.equal(one, expected[number % 8]) for number, one in enumerate(results))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_restores_the_global_state() -> None:
    before = torch.get_rng_state()

    def fail() -> None:
        with global_seed(3, CPU):
            torch.rand(3)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_readers_do_not_meet_a_stream() -> None:
    """A loader that draws in one thread waits for the stream of another; loaders do not wait for each other."""
    order: list[str] = []
    inside = threading.Event()

    def read(_: Any) -> None:
        inside.wait()
        with undisturbed(), undisturbed():
            order.append("read")

    threads = [threading.Thread(target=read, args=(None,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    with global_seed(1, CPU), undisturbed():
        inside.set()
        for thread in threads:
            thread.join(0.02)
        order.append("drawn")
    for thread in threads:
        thread.join(10)
    assert order == ["drawn", "read", "read", "read"]


def test_readers_that_never_pause_do_not_keep_a_stream_waiting() -> None:
    """A reader that comes while a stream waits goes after it, or overlapping readers would starve it."""
    order: list[str] = []
    reading, over = threading.Event(), threading.Event()

    def first() -> None:
        with undisturbed():
            reading.set()
            over.wait(10)

    def stream() -> None:
        with global_seed(1, CPU):
            order.append("stream")

    def second() -> None:
        with undisturbed():
            order.append("reader")

    threads = [threading.Thread(target=each) for each in (first, stream, second)]
    threads[0].start()
    assert reading.wait(10)
    for thread in threads[1:]:  # each has the time to ask for its turn
        thread.start()
        thread.join(0.1)
    assert order == []
    over.set()
    for thread in threads:
        thread.join(10)
    assert order == ["stream", "reader"]


def test_two_loaders_that_start_streams_of_their_own() -> None:
    """Each waits for the other's turn as a reader to end, and does not count as one meanwhile."""
    both = threading.Barrier(2, timeout=10)

    def work(seed: int) -> torch.Tensor:
        with undisturbed():
            both.wait()
            return drawn(seed)

    with ThreadPoolExecutor(2) as pool:
        for seed, numbers in enumerate(pool.map(work, range(2))):
            assert torch.equal(numbers, drawn(seed))
