"""Errors of two objectives for samples, on few digits."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from experiments import objectives
from experiments.engine.contract import Record
from experiments.engine.machine import Machine
from experiments.engine.store import Stored, Unit
from experiments.objectives import Objectives, compared, equal_errors, tangent_matrix
from experiments.options import silent
from tests.tolerances import SOLVED, assert_close

SETTINGS = Objectives(
    data=24, epochs=20, precisions=(300.0, 3.0), batches=(2, 6, 24), rounds=(2, 6), samples=3, seeds=2
)


@cache
def records(unit: str) -> tuple[Record, ...]:
    return tuple(SETTINGS.measure(unit, silent))


def error(unit: str, method: str) -> float:
    (record,) = (record for record in records(unit) if record.method == method)
    return record.scores["error, %"]


def test_units_are_seeds_and_precisions() -> None:
    assert SETTINGS.units() == ("0/300", "0/3", "1/300", "1/3")
    assert Objectives.quick().seeds >= 5
    assert Objectives.full().images == "mnist"


def test_noise_in_the_regulariser_leaves_a_smaller_error_under_a_strong_prior() -> None:
    for batch in (2, 6):
        assert error("0/300", f"L', batch {batch}, 144 steps") < 0.5 * error("0/300", f"L, batch {batch}, 144 steps")


def test_with_all_data_in_a_batch_both_objectives_are_the_same() -> None:
    for steps in (48, 144):
        one, other = (error("0/300", f"{name}, batch 24, {steps} steps") for name in ("L", "L'"))
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)


def test_more_steps_leave_less() -> None:
    assert error("0/300", "L, batch 6, 144 steps") < error("0/300", "L, batch 6, 48 steps")


@pytest.mark.parametrize("rows", [9, 200])
def test_the_solution_is_exact(rows: int) -> None:
    """With fewer rows than weights, and with more."""
    matrix = torch.randn(rows, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    system = objectives._system(matrix, 4, 0.7, seed=2)
    solved = objectives._Solved.of(matrix, system)
    left = solved.z @ (matrix.T @ matrix + 0.7 * torch.eye(31))
    assert_close(left, 0.7**0.5 * system.zeta + system.eps @ matrix, SOLVED)
    assert solved.error(solved.z) == 0
    assert solved.error(2 * solved.z) == pytest.approx(1)


def test_the_matrix_is_that_of_the_tangent_model() -> None:
    matrix = tangent_matrix(SETTINGS, 0)
    assert matrix.shape == (24 * 9, 1898)
    assert torch.equal(matrix, tangent_matrix(SETTINGS, 0))
    assert not torch.equal(matrix, tangent_matrix(SETTINGS, 1))


def test_equal_errors_are_found_in_both_directions() -> None:
    steep, flat = [0.8, 0.4, 0.2], [0.2, 0.1, 0.05]
    assert equal_errors((1, 4, 16), steep, flat) == pytest.approx(16)
    assert equal_errors((1, 4, 16), flat, steep) == pytest.approx(1 / 16)
    assert equal_errors((1, 4, 16), steep, steep) == pytest.approx(1)
    assert equal_errors((1, 4, 16), steep, [0.1, 0.05, 0.02]) is None


def test_batches_and_errors_are_compared() -> None:
    """Errors that fall with one over the root of the batch, and are twice as large on L."""
    errors = {"classic": 0.8, "reduced": 0.4}
    runs = {(name, b, r): error / (b**0.5 * r) for name, error in errors.items() for b in (1, 4, 16) for r in (1, 3)}
    assert compared(runs) == pytest.approx({"factor of batches": 4, "ratio of errors": 2})
    (last,) = (record for record in records("0/300") if record.method == "L over L'")
    assert last.scores["ratio of errors"] > 1.5


def test_the_picture(tmp_path: Path) -> None:
    units = {key: Unit(records(key), 1.0, None, Machine.here(), "", "") for key in ("0/300", "0/3")}
    Objectives.picture(Stored("objectives", "quick", {}, 0, units), tmp_path / "picture.png")
    assert imread(tmp_path / "picture.png").std() > 0.01
