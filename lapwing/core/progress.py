"""A bar for long work, where tqdm is installed and one was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Steps:
    """Counts to ``total`` and shows what it is told.

    >>> [step for step in Steps(3, "learning", shown=False)]
    [0, 1, 2]
    """

    def __init__(self, total: int, label: str, shown: bool) -> None:
        self._total, self._bar = total, _bar(total, label) if shown else None

    def __iter__(self) -> Iterator[int]:
        try:
            for step in range(self._total):
                yield step
                if self._bar is not None:
                    self._bar.update()
        finally:
            if self._bar is not None:
                self._bar.close()

    def show(self, **numbers: float) -> None:
        if self._bar is not None:
            self._bar.set_postfix({name: f"{value:.5g}" for name, value in numbers.items()}, refresh=False)


def _bar(total: int, label: str) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=label, leave=False)
