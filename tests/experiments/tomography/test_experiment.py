"""The case study as an experiment of the engine: every part in small, units that go on, and the picture."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from experiments.__main__ import main
from experiments.engine.contract import Record
from experiments.engine.running import Plan, run
from experiments.engine.store import Stored, load
from experiments.engine.tables import summarised
from experiments.options import silent
from experiments.tomography.beliefs import METHODS
from experiments.tomography.experiment import Tomography
from experiments.tomography.scanning import STRATEGIES, Scanned
from lapwing.errors import DataError, LapwingError

QUICK = Tomography.quick()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    assert main(["tomography", "--form", "quick", "--out", str(folder)]) == 0
    return folder / "tomography_quick.json"


def records(stored: Path, group: str) -> list[Record]:
    return [record for record in load(stored).records if record.group == group]


def test_every_part_has_its_records(stored: Path) -> None:
    assert tuple(load(stored).units) == QUICK.units()
    rows = {(record.method, record.repeat) for record in records(stored, "3 angles, 5% noise")}
    assert rows == {(method, image) for method in ("FBP", *METHODS) for image in range(2)}
    assert [record.method for record in records(stored, "phantom")] == ["FBP", *METHODS]
    assert {"tangent, evidence", "FBP"} <= {record.method for record in records(stored, "25 x 25")}
    assert {record.method for record in records(stored, "next angles")} == set(STRATEGIES)
    scores = summarised(load(stored).records).rows["3 angles, 5% noise", "tangent, evidence"]
    assert scores["LL"].n == 2
    assert math.isfinite(scores["LL"].mean)


def test_the_picture_of_angles(stored: Path, tmp_path: Path) -> None:
    assert imread(stored.with_suffix(".png")).ndim == 3
    QUICK.picture(Stored("tomography", "quick", {}, 0), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()  # nothing is stored of that part


def test_units_that_are_stored_are_not_run_again(stored: Path) -> None:
    lines: list[str] = []
    outcome = run(QUICK, Plan(stored, "quick"), lines.append)
    assert lines == ["tomography/quick: 5 of 5 units are stored already"]
    assert not outcome.left


def test_a_curve_goes_to_scores_and_back() -> None:
    curve = Scanned((20.5, 21.5), (0.0, 30.0, 90.0))
    scores = curve.to_scores((2, 3))
    assert scores == {"2 angles": 20.5, "3 angles": 21.5, "angle 1": 0.0, "angle 2": 30.0, "angle 3": 90.0}
    assert Scanned.from_scores(scores) == curve


def test_the_table_reads_images_of_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 255, (2, 12, 12), dtype=np.uint8)
    np.savez(tmp_path / "mnist.npz", x_test=images, x_train=images, y_test=np.zeros(2), y_train=np.zeros(2))
    read = replace(QUICK, images="mnist", data_dir=tmp_path)._truths()
    assert read.shape == (2, 12, 12)
    monkeypatch.delenv("LAPWING_DATA", raising=False)
    with pytest.raises(DataError, match="pass --data-dir DIR or set LAPWING_DATA"):
        list(replace(QUICK, images="mnist").measure("table/3/0.05", silent))


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(LapwingError, match="unknown walk"):
        replace(QUICK, parts=("walk",)).units()
    assert replace(QUICK, parts=("angles",)).units() == ("angles/0", "angles/1")
