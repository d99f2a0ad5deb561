"""Cost against quality, on a small table of scikit-learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from experiments.costs import METHODS, Costs
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
        assert record.scores["fit / epoch"] > 0
    costs = {record.method: record.scores["fit s"] for record in records}
    assert costs["plain"] < costs["Ensemble"]  # whose members are trained


def test_the_picture(records: list[Record], tmp_path: Path) -> None:
    draw(records, tmp_path / "costs.png")
    assert imread(tmp_path / "costs.png").shape[:2] == (1230, 690)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(LapwingError, match="unknown walk"):
        replace(TINY, methods=("walk",)).units()
    with pytest.raises(LapwingError, match="unknown walk"):
        replace(TINY, tasks=("walk",)).units()
    assert len(set(METHODS)) == len(METHODS)
