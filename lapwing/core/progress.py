"""Progress bars: whether to show one, and the one implementation."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def shows_progress(progress: bool | None) -> bool:
    """Return whether to show progress bars; None means: only on a terminal."""
    return sys.stderr.isatty() if progress is None else progress


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
