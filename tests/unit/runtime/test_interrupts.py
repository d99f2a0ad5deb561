"""Ctrl-C is noted inside a call and raised where nothing is half done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.runtime import threads as interrupts
from lapwing.runtime.threads import allow_interrupts, defer_interrupts, poll
from tests.attack.interrupts import attack


@pytest.fixture(autouse=True)
def signals_are_heard() -> Iterator[None]:
    """A process that a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)  # Python runs handlers between instructions


def test_raised_at_the_end_of_the_outermost_block() -> None:
    steps = []

    def call() -> None:
        with defer_interrupts():
            with defer_interrupts():
                ctrl_c()
                steps.append("inside")
            steps.append("between")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert steps == ["inside", "between"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_raised_by_poll_and_where_code_of_the_user_runs() -> None:
    for raising in (poll, lambda: allow_interrupts().__enter__()):
        with defer_interrupts():
            ctrl_c()
            with pytest.raises(KeyboardInterrupt):
                raising()
    with defer_interrupts(), pytest.raises(KeyboardInterrupt), allow_interrupts():
        ctrl_c()


def test_a_second_one_is_raised_at_once_if_nothing_happened_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE", 0.01)
    with defer_interrupts():
        ctrl_c()
        time.sleep(0.02)
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()


def test_handlers_of_the_user_are_called_and_kept() -> None:
    calls: list[int] = []
    handler = lambda number, frame: calls.append(number)
    before = signal.signal(signal.SIGINT, handler)
    try:
        with defer_interrupts():
            ctrl_c()
            assert not calls
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with defer_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_do_nothing() -> None:
    handlers: list[Any] = []

    def work() -> None:
        with defer_interrupts(), allow_interrupts():
            poll()
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


class Stops(nn.Module):
    """Sends Ctrl-C in its forward pass, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(2, 1), iter(range(1))

    def forward(self, x: Tensor) -> Tensor:
        if next(self.after, None) is None:
            ctrl_c()
        result: Tensor = self.layer(x)
        return result


def test_a_loader_that_hangs_can_be_interrupted() -> None:
    class Loader:
        def __iter__(self) -> Iterator[Any]:
            ctrl_c()
            pytest.fail("not raised at once")

    x = torch.ones(3, 2)
    with pytest.raises(KeyboardInterrupt):
        lw.fit(nn.Linear(2, 1), Loader(), "regression")  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        lw.fit(Stops(), [(x, x[:, :1])], "regression")


def test_signals_at_random_moments_change_nothing() -> None:
    """The short form of ``python -m tests.attack interrupts``."""
    names = ["fit full", "predict dropout", "predict lstm kron", "predict free_parameter", "save", "train"]
    _, _, faults = attack(60, 0, names, seconds=2.0)
    assert not faults
