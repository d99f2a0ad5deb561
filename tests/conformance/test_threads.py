"""Every method from eight threads at once: the short form of ``python -m tests.attack threads``."""

from __future__ import annotations

import pytest

from lapwing.runtime.threads import FORWARD_MODE
from tests.attack.memory import grown
from tests.attack.threads import SPECIAL, at_once, fit_task, predictions, train_task
from tests.conformance.declared import SMALL


@pytest.mark.parametrize("name", [*SMALL, *SPECIAL])
def test_predictions_are_the_serial_ones(name: str) -> None:
    assert predictions(name, 1 if name == "hfl" else 3).faults == ()


def test_different_models_at_once() -> None:
    tasks = [fit_task("kron", 0), fit_task("ensemble", 1), *(train_task(seed) for seed in range(3))]
    assert at_once(tasks, 2).faults == ()


def test_no_lock_stays_taken() -> None:
    assert FORWARD_MODE.acquire(blocking=False)
    FORWARD_MODE.release()


def test_memory_does_not_grow() -> None:
    assert grown(10, 20)[1] <= 0
