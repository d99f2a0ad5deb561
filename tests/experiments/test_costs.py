"""Cost against quality, on a small table of scikit-learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from experiments.costs import METHODS, TASKS, Costs
from experiments.costs_picture import draw
from experiments.engine.contract import Record
from experiments.options import silent
from lapwing.errors import LapwingError

TINY = replace(Costs.quick(), methods=("plain", "Kron", "Subnetwork", "Ensemble"), seeds=1)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [record for unit in TINY.units() for record in TINY.measure(unit, silent)]


def test_every_method_has_scores_and_costs(records: list[Record]) -> None:
    assert {record.method for record in records} == set(TINY.methods)
    for record in records:
        assert record.group == "wine, small"
        assert record.peak is not None
        assert record.peak > 0
        assert record.seconds is not None
        assert 0 < record.scores["validated NLL"] < 2
        assert record.scores["fit s"] > 0
    costs = {record.method: record.scores["fit s"] for record in records}
    assert costs["plain"] < costs["Ensemble"]  # whose members are trained


def test_the_picture(records: list[Record], tmp_path: Path) -> None:
    draw(records, tmp_path / "costs.png")
    assert imread(tmp_path / "costs.png").shape[:2] == (1230, 690)


def test_images_and_slow_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow methods run in the first repetition alone, and those that are not practical in none."""
    draw = np.random.default_rng(0)
    arrays = {f"x_{part}": draw.integers(0, 255, (60, 28, 28), dtype=np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "fashion_mnist.npz", **arrays, y_train=np.arange(60) % 10, y_test=np.arange(60) % 10)
    monkeypatch.setattr("experiments.costs.IMAGES", 40)
    monkeypatch.setattr("experiments.costs.VALIDATION", 20)
    few = replace(TINY, data_dir=tmp_path, tasks=("Fashion-MNIST",), methods=("plain", "VaLLA", "HFL"), test=15)
    task = TASKS["Fashion-MNIST"](tmp_path, 0)
    assert sum(p.numel() for p in task.model.parameters()) == 2026
    assert [len(part[1]) for part in (task.split.train, task.split.validation)] == [40, 20]
    (record,) = few.measure("Fashion-MNIST/1", silent)
    assert (record.method, record.peak) == ("plain", None)  # memory is measured in the first repetition
    assert 0 <= record.scores["accuracy"] <= 1


def test_unknown_names_are_refused() -> None:
    with pytest.raises(LapwingError, match="unknown walk"):
        replace(TINY, methods=("walk",)).units()
    with pytest.raises(LapwingError, match="unknown walk"):
        replace(TINY, tasks=("walk",)).units()
    assert len(set(METHODS)) == len(METHODS)
