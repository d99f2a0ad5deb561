"""Loops of many steps: their progress bar, and early stopping."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from lapwing.core.interrupts import poll
from lapwing.core.settings import FLAG, NONE

T = TypeVar("T")
S = TypeVar("S")
Call = TypeVar("Call", bound=Callable[..., Any])

_SHOWING: ContextVar[bool] = ContextVar("showing", default=False)


@contextmanager
def showing(visible: bool) -> Iterator[None]:
    """Let computations that know no data show their progress meanwhile, in this thread."""
    token = _SHOWING.set(visible)
    try:
        yield
    finally:
        _SHOWING.reset(token)


def shows_progress(progress: bool | None) -> bool:
    """Return whether to show progress bars; None means: only on a terminal."""
    (FLAG | NONE).check("progress", progress)
    return sys.stderr.isatty() if progress is None else progress


def shows_inner_progress(call: Call) -> Call:
    """Decorate a function with an argument ``progress``: computations inside show theirs if it says so."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with showing(shows_progress(kwargs.get("progress"))):
            return call(*args, **kwargs)

    return cast(Call, run)


def is_showing() -> bool:
    """Return whether progress is shown: inside ``showing(True)``."""
    return _SHOWING.get()


class ProgressBar(Generic[T]):
    """An iteration over ``items`` with a progress bar, if it is ``visible`` and tqdm is installed.

    ``first`` is the number of items that an earlier run has done; ``leave`` keeps the finished bar on the screen.

    >>> list(ProgressBar(range(3), "learning", visible=False))
    [0, 1, 2]
    """

    def __init__(self, items: Iterable[T], label: str, visible: bool, first: int = 0, leave: bool = False) -> None:
        self._items, self._bar = items, _bar(items, label, first, leave) if visible else None

    def __iter__(self) -> Iterator[T]:
        try:
            for item in self._items:
                poll()
                yield item
                if self._bar is not None:
                    self._bar.update()
        finally:
            if self._bar is not None:
                self._bar.close()

    def show(self, **numbers: float) -> None:
        """Show these numbers by name beside the bar."""
        if self._bar is not None:
            self._bar.set_postfix({name: f"{value:.5g}" for name, value in numbers.items()}, refresh=False)

    def show_text(self, text: str) -> None:
        """Show this text beside the bar at once."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)


def _bar(items: Iterable[Any], label: str, first: int, leave: bool) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    try:
        total = first + len(items)  # type: ignore[arg-type]
    except TypeError:  # no length, such as a loader over a stream
        total = None
    return tqdm(total=total, initial=first, desc=label, leave=leave)


@dataclass(eq=False)
class EarlyStopping(Generic[S]):
    """Early stopping that evaluates a score every ``every`` steps and keeps the state with the best one.

    It also evaluates after 1, 2, 4, ... steps below ``every``, so that a state that is best very early is not missed.
    Only the regular evaluations count towards ``patience``: while they still improve among themselves, they may yet
    exceed the best early score.

    >>> evaluations = iter([(1.0, "a"), (3.0, "b"), (2.0, "c"), (2.5, "d")])
    >>> stopping = EarlyStopping(lambda: next(evaluations), every=1, patience=2)
    >>> [stopping.should_stop(step) for step in range(4)], stopping.best_score, stopping.best_state
    ([False, False, False, True], 3.0, 'b')
    """

    evaluate: Callable[[], tuple[float, S]]  # the current score, higher is better, and the state that has it
    every: int
    patience: int
    best_score: float = field(default=-math.inf, init=False)
    _kept_state: S | None = field(default=None, init=False)
    _best_regular_score: float = field(default=-math.inf, init=False)
    _n_without_gain: int = field(default=0, init=False)  # regular evaluations since the best of them

    def should_stop(self, step: int) -> bool:
        """Evaluate if it is due after this step (from 0); return whether ``patience`` evaluations brought no gain."""
        done = step + 1
        early = done < self.every and done & (done - 1) == 0
        if done % self.every and not early:
            return False
        score, state = self.evaluate()
        if score > self.best_score:
            self.best_score, self._kept_state = score, state
        if early:
            return False
        if score > self._best_regular_score:
            self._best_regular_score, self._n_without_gain = score, 0
            return False
        self._n_without_gain += 1
        return self._n_without_gain >= self.patience

    @property
    def best_state(self) -> S:
        """The state with the best score; the current one if there was no evaluation or every score was NaN."""
        return self.evaluate()[1] if self._kept_state is None else self._kept_state
