"""Random numbers, switches, progress and Ctrl-C, in several threads."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.runtime import threads as interrupts
from lapwing.runtime.threads import (
    EarlyStopping,
    ProgressBar,
    Stream,
    allow_interrupts,
    defer_interrupts,
    global_seed,
    math_attention,
    own_kernels,
    poll,
    quiet,
    should_show_progress,
    undisturbed,
)
from tests.attack.interrupts import attack
from tests.attack.surroundings import settings

# Random numbers of code that draws from the global generators, in several threads.

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


def test_two_loaders_that_start_their_own_streams() -> None:
    """Each waits for the other's turn as a reader to end, and does not count as one meanwhile."""
    both = threading.Barrier(2, timeout=10)

    def work(seed: int) -> torch.Tensor:
        with undisturbed():
            both.wait()
            return drawn(seed)

    with ThreadPoolExecutor(2) as pool:
        for seed, numbers in enumerate(pool.map(work, range(2))):
            assert torch.equal(numbers, drawn(seed))


# Settings of the process that several threads need at once.


def test_the_last_thread_restores() -> None:
    """Threads that save and restore each for itself leave oneDNN off here."""
    before = settings()
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with own_kernels, quiet, math_attention:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    with own_kernels, quiet, math_attention:
        leave.set()
        thread.join()
        assert not torch._C._get_mkldnn_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert warnings.filters[0][0] == "ignore"
    after = settings()
    assert {key for key in before if before[key] != after[key]} == set()


# The progress bar.


def test_a_bar_shows_its_label_and_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(range(3), "inducing points", visible=True, leave=True)
    for _ in bar:
        bar.show(objective=12.3456789, KL=0.5)
    printed = capsys.readouterr().err
    assert "inducing points: 100%" in printed
    assert "3/3" in printed
    assert "objective=12.346, KL=0.5" in printed


def test_items_that_an_earlier_run_has_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(ProgressBar(range(2, 5), "learning", visible=True, first=2)) == [2, 3, 4]
    assert "2/5" in capsys.readouterr().err


def test_items_without_a_length(capsys: pytest.CaptureFixture[str]) -> None:
    class Stream:
        def __iter__(self) -> Iterator[int]:
            return iter((1, 2))

    assert list(ProgressBar(Stream(), "learning", visible=True, leave=True)) == [1, 2]
    assert "2it" in capsys.readouterr().err


def test_without_a_bar_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(range(3), "inducing points", visible=False)
    for _ in bar:
        bar.show(objective=1.0)
        bar.show_text("a text")
    assert capsys.readouterr() == ("", "")


def test_a_bar_is_closed_when_work_ends_early(capsys: pytest.CaptureFixture[str]) -> None:
    """The last thing it writes clears its line."""
    for step in ProgressBar(range(9), "learning", visible=True):
        if step == 2:
            break
    printed = capsys.readouterr().err
    assert "learning" in printed
    assert printed.rsplit("\r", 2)[-2].strip() == ""


def test_without_tqdm_it_still_yields_all_items(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    bar = ProgressBar(range(2), "learning", visible=True)
    for _ in bar:
        bar.show(objective=1.0)
    assert capsys.readouterr().err == ""


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """The messages of the library's loggers."""
    found: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("lapwing")
    handler.emit = lambda record: found.append(f"{record.name}: {record.getMessage()}")  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


LOGGED = "lapwing.progress: "


def test_without_a_bar_long_work_says_where_it_is_by_logging(
    monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    assert list(ProgressBar(range(2), "learning", visible=False)) == [0, 1]
    assert messages == []  # it was short
    monkeypatch.setattr(interrupts, "EVERY", 0.0)
    list(ProgressBar(range(2), "learning", visible=True))
    assert messages == []  # there was a bar
    outer = ProgressBar(range(3, 5), "training", visible=False, first=3)
    with interrupts.show_inner_progress(False):
        for _ in outer:
            outer.show(loss=0.25)
            list(ProgressBar(iter("a"), "loss", visible=False))
    assert messages == [
        f"{LOGGED}{place}, after 0 s"
        for place in (
            "training: 3 of 5 (loss 0.25); loss: 1", "training: 4 of 5 (loss 0.25)",
            "training: 4 of 5 (loss 0.25); loss: 1", "training: 5 of 5 (loss 0.25)",
        )
    ]  # fmt: skip


def test_messages_of_one_call_are_half_a_minute_apart(monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    """However many loops it has, and each call counts anew."""
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: float(next(clock)))
    for _ in range(2):
        with interrupts.show_inner_progress(False):
            for _ in range(4):
                list(ProgressBar(range(2), "pass", visible=False))
    assert messages == [f"{LOGGED}pass: {each}" for each in ("1 of 2, after 40 s", "2 of 2, after 70 s")] * 2


def test_a_long_fit_off_a_terminal_says_where_it_is(monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    monkeypatch.setattr(interrupts, "EVERY", 0.0)
    x = torch.linspace(-1, 1, 12)[:, None]
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    lw.fit(net, [(x[:6], x[:6].sin()), (x[6:], x[6:].sin())], "regression", progress=False)
    places = [message.removeprefix(LOGGED) for message in messages]
    assert any(re.match(r"\w[\w ]*: 2 of 2, after \d+ s$", place) for place in places)
    assert any(place.startswith("eigendecompositions: ") for place in places)


@pytest.mark.parametrize("terminal", [False, True])
def test_bars_are_for_terminals_unless_asked_for(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert should_show_progress(None) is terminal
    assert should_show_progress(True)
    assert not should_show_progress(False)


# Early stopping: the best state on held-out data.


class Course:
    """Scores in order; the state is the number of the last score that was evaluated."""

    def __init__(self, *scores: float) -> None:
        self.scores, self.last = scores, -1

    def evaluate(self) -> tuple[float, int]:
        self.last += 1
        return self.scores[self.last], self.last


def stopping_on(course: Course, every: int = 1, patience: int = 2) -> EarlyStopping[int]:
    return EarlyStopping(course.evaluate, every, patience)


def run(stopping: EarlyStopping[int], steps: int) -> int:
    """Return how many steps were taken."""
    for step in range(steps):
        if stopping.should_stop(step):
            return step + 1
    return steps


def test_it_stops_when_patience_ends() -> None:
    """Patience counts evaluations in a row: a better one starts the count again."""
    stopping = stopping_on(Course(1.0, 0.0, 2.0, 0.0, 1.9, 9.0))
    assert run(stopping, 6) == 5
    assert stopping.best_state == 2


def test_it_evaluates_early_and_then_regularly() -> None:
    course = Course(*range(6))
    stopping = stopping_on(course, every=6)
    evaluations = []
    for step in range(20):
        before = course.last
        assert not stopping.should_stop(step)
        evaluations += [step + 1] if course.last > before else []
    assert evaluations == [1, 2, 4, 6, 12, 18]
    assert stopping.best_state == 5


def test_early_evaluations_are_kept_and_do_not_count_for_patience() -> None:
    stopping = stopping_on(Course(5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0), every=6, patience=2)
    assert run(stopping, 40) == 18
    assert (stopping.best_state, stopping.best_score) == (0, 5.0)


def test_regular_scores_that_rise_are_waited_for() -> None:
    """Even while the best early score is still above them."""
    stopping = stopping_on(Course(5.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 5.5), every=6, patience=2)
    assert run(stopping, 36) == 36
    assert (stopping.best_state, stopping.best_score) == (7, 6.0)


def test_a_score_of_nan_is_never_the_best() -> None:
    stopping = stopping_on(Course(math.nan, 1.0, math.nan, math.nan))
    assert run(stopping, 4) == 4
    assert (stopping.best_state, stopping.best_score) == (1, 1.0)


# Ctrl-C is noted inside a call and raised where nothing is half done.


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
    monkeypatch.setattr(interrupts, "HANG_SECONDS", 0.01)
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
