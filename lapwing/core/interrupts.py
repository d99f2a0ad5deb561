"""Ctrl-C while the library works: noted at once, raised where nothing is half done.

Python raises ``KeyboardInterrupt`` between any two instructions, also inside the ``__enter__`` or ``__exit__`` of a
context manager, whose change is then not undone. So a public call of the main thread notes the signal, and the loops
over data, steps and runs of the model ask for it. While the user's loader runs it is raised at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

PATIENCE = 5.0  # seconds after which a second Ctrl-C is raised at once: the model may hang


class _Waiting:
    """A handler of SIGINT that notes the signal for later."""

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self.previous, self.at_once = previous, False
        self.since: float | None = None  # the time of the first signal that was not delivered

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        hangs = self.since is not None and now - self.since > PATIENCE
        self.since = now if self.since is None else self.since
        if self.at_once or hangs:
            self.at_once = False
            self.deliver(frame)

    def deliver(self, frame: FrameType | None = None) -> None:
        """Call the handler that was there before, which raises ``KeyboardInterrupt``, if there was a signal."""
        if self.since is not None:
            self.since = None
            self.previous(signal.SIGINT, frame)


_waiting: _Waiting | None = None  # of the main thread, which is the only one that gets signals


def _own() -> _Waiting | None:
    return _waiting if _waiting is not None and threading.current_thread() is threading.main_thread() else None


@contextmanager
def deferred() -> Iterator[None]:
    """Note Ctrl-C until ``poll`` or the end of the outermost such block; in other threads do nothing."""
    global _waiting
    outer = _waiting is None and threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT) if outer else None
    if not callable(previous):  # not ours to change: ignored, or the default, which ends the process
        yield
        return
    waiting = _Waiting(previous)
    try:
        _waiting = waiting
        signal.signal(signal.SIGINT, waiting)
        yield
    finally:
        _waiting = None
        if signal.getsignal(signal.SIGINT) is waiting:
            signal.signal(signal.SIGINT, previous)
        waiting.deliver()


def poll() -> None:
    """Raise ``KeyboardInterrupt`` here if Ctrl-C was noted."""
    if _waiting is not None and _waiting.since is not None and (waiting := _own()):
        waiting.deliver()


@contextmanager
def at_once() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` at once while code of the user runs that may take any time, such as a loader."""
    poll()
    waiting = _own()
    if waiting is None:
        yield
        return
    try:
        waiting.at_once = True
        yield
    finally:
        waiting.at_once = False
