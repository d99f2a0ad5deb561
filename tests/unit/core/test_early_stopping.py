"""The best state on held-out data."""

from __future__ import annotations

import math

import pytest

from lapwing.core.early_stopping import EarlyStopping


class Course:
    """Scores as they come, and the number of the last one looked at as the state."""

    def __init__(self, *scores: float) -> None:
        self.scores, self.seen = scores, -1

    def look(self) -> tuple[float, int]:
        self.seen += 1
        return self.scores[self.seen], self.seen


def watching(course: Course, every: int = 1, patience: int = 2) -> EarlyStopping[int]:
    return EarlyStopping(course.look, every, patience)


def run(watch: EarlyStopping[int], steps: int) -> int:
    """How many steps were taken."""
    for step in range(steps):
        if watch.should_stop(step):
            return step + 1
    return steps


def test_later_states_that_are_worse_are_not_kept() -> None:
    watch = watching(Course(1.0, 3.0, 2.0, 1.0, 0.5), patience=9)
    assert run(watch, 5) == 5
    assert (watch.best_state, watch.best_score) == (1, 3.0)


def test_it_ends_when_patience_does() -> None:
    """Looks in a row: a better one starts the count anew."""
    watch = watching(Course(1.0, 0.0, 2.0, 0.0, 1.9, 9.0))
    assert run(watch, 6) == 5
    assert watch.best_state == 2


@pytest.mark.parametrize("patience", [1, 3])
def test_patience(patience: int) -> None:
    assert run(watching(Course(5.0, *[0.0] * 9), patience=patience), 10) == 1 + patience


def test_an_equal_score_is_no_better_one() -> None:
    watch = watching(Course(1.0, 1.0, 1.0))
    assert run(watch, 3) == 3
    assert watch.best_state == 0


def test_it_looks_early_and_then_every_so_often() -> None:
    course = Course(*range(6))
    watch = watching(course, every=6)
    looks = []
    for step in range(20):
        before = course.seen
        assert not watch.should_stop(step)
        looks += [step + 1] if course.seen > before else []
    assert looks == [1, 2, 4, 6, 12, 18]
    assert watch.best_state == 5


def test_early_looks_are_kept_and_try_no_patience() -> None:
    watch = watching(Course(5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0), every=6, patience=2)
    assert run(watch, 40) == 18
    assert (watch.best_state, watch.best_score) == (0, 5.0)


def test_later_looks_that_rise_are_waited_for() -> None:
    """Though what was best early is above them for long."""
    watch = watching(Course(5.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 5.5), every=6, patience=2)
    assert run(watch, 36) == 36
    assert (watch.best_state, watch.best_score) == (7, 6.0)


def test_scores_that_are_no_numbers_are_never_the_best() -> None:
    watch = watching(Course(math.nan, 1.0, math.nan, math.nan))
    assert run(watch, 4) == 4
    assert (watch.best_state, watch.best_score) == (1, 1.0)


def test_without_a_score_the_present_state_is_the_best() -> None:
    watch = watching(Course(math.nan, math.nan, math.nan))
    assert run(watch, 2) == 2
    assert watch.best_state == 2
