"""Early stopping: the best state on held-out data, and when to stop looking for a better one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")


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
