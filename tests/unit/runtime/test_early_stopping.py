"""Early stopping: the best state on held-out data."""

from __future__ import annotations

import math

import pytest

from lapwing.runtime.threads import EarlyStopping


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


def test_later_states_that_are_worse_are_not_kept() -> None:
    stopping = stopping_on(Course(1.0, 3.0, 2.0, 1.0, 0.5), patience=9)
    assert run(stopping, 5) == 5
    assert (stopping.best_state, stopping.best_score) == (1, 3.0)


def test_it_stops_when_patience_ends() -> None:
    """Patience counts evaluations in a row: a better one starts the count again."""
    stopping = stopping_on(Course(1.0, 0.0, 2.0, 0.0, 1.9, 9.0))
    assert run(stopping, 6) == 5
    assert stopping.best_state == 2


@pytest.mark.parametrize("patience", [1, 3])
def test_patience(patience: int) -> None:
    assert run(stopping_on(Course(5.0, *[0.0] * 9), patience=patience), 10) == 1 + patience


def test_an_equal_score_is_no_better_one() -> None:
    stopping = stopping_on(Course(1.0, 1.0, 1.0))
    assert run(stopping, 3) == 3
    assert stopping.best_state == 0


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


def test_without_a_score_the_present_state_is_the_best() -> None:
    stopping = stopping_on(Course(math.nan, math.nan, math.nan))
    assert run(stopping, 2) == 2
    assert stopping.best_state == 2
