"""The best state on held-out data, and when to stop looking for a better one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")


@dataclass(eq=False)
class BestState(Generic[S]):
    """Looks at a score every so many steps and keeps the state that had the best one.

    It also looks after 1, 2, 4, ... steps until then, so that what is best early is found however rarely it looks.
    Patience is with the other looks: as long as they rise, they may yet rise above what was best early.

    >>> looks = iter([(1.0, "a"), (3.0, "b"), (2.0, "c"), (2.5, "d")])
    >>> watch = BestState(lambda: next(looks), every=1, patience=2)
    >>> [watch.ended(step) for step in range(4)], watch.score, watch.best
    ([False, False, False, True], 3.0, 'b')
    """

    look: Callable[[], tuple[float, S]]  # a score, higher is better, and the state that has it
    every: int
    patience: int
    score: float = -math.inf
    kept: S | None = None
    usual: float = -math.inf  # the best of the looks that are not early
    waited: int = 0

    def ended(self, step: int) -> bool:
        """Whether ``patience`` looks in a row found nothing better."""
        done = step + 1
        early = done < self.every and done & (done - 1) == 0
        if done % self.every and not early:
            return False
        score, state = self.look()
        if score > self.score:
            self.score, self.kept = score, state
        if early:
            return False
        if score > self.usual:
            self.usual, self.waited = score, 0
            return False
        self.waited += 1
        return self.waited >= self.patience

    @property
    def best(self) -> S:
        """The state with the best score; the present one where none was looked at or none was a number."""
        return self.look()[1] if self.kept is None else self.kept
