"""A cache with one entry, for values whose derived quantities depend on one more argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other)


@dataclass(eq=False)
class Latest(Generic[K, V]):
    """The result of a computation, kept until it is asked for another key.

    A frozen dataclass holds one as a ``cached_property``: ``dataclasses.replace`` then starts with an empty one, so
    that a changed value never returns the result of the old value. It is a dataclass itself, so that ``on_device``
    moves its contents.

    >>> latest = Latest[int, str]()
    >>> latest.at(1, lambda: "computed"), latest.at(1, lambda: "not computed"), latest.at(2, lambda: "again")
    ('computed', 'computed', 'again')
    """

    same: Callable[[K, K], bool] = _equal
    entry: tuple[K, V] | None = None

    def at(self, key: K, compute: Callable[[], V]) -> V:
        """Return the result for this key, computed only if the last key was another."""
        entry = self.entry
        if entry is None or not self.same(entry[0], key):
            self.entry = entry = (key, compute())
        return entry[1]
