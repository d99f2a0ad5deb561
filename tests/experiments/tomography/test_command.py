"""The command ``python -m experiments tomography``, in its quick form: every part, its files and its page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.tomography.beliefs import METHODS
from experiments.tomography.scanning import STRATEGIES
from lapwing.demo.result import Result


def results(path: Path) -> dict[str, Result]:
    documents = json.loads(path.read_text())
    return {name: Result.from_json(json.dumps(document)) for name, document in documents.items()}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    assert main(["tomography", "--quick", "--out", str(folder)]) == 0
    return folder


def test_the_study_scores_every_method(study: Path) -> None:
    scores = results(study / "tomography.json")["tomography"]
    assert [row.name for row in scores.rows] == ["FBP", *METHODS]
    assert all({"LL", "LL 7 x 7", "PSNR", "RMS z", "coverage 95 %"} <= row.scores.keys() for row in scores.rows[1:])
    assert len(scores.arrays["truth"]) == scores.settings["size"] ** 2


def test_the_page_has_every_picture_and_table_and_needs_no_network(study: Path) -> None:
    page = (study / "tomography.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    for words in (*METHODS, *STRATEGIES, "independent weights", "log evidence"):
        assert words in page
    assert "http" not in page
    assert {path.suffix for path in study.iterdir()} == {".png", ".html", ".json"}


def test_a_table_that_was_interrupted_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = np.random.default_rng(0).integers(0, 255, (2, 12, 12), dtype=np.uint8)
    np.savez(tmp_path / "mnist.npz", x_test=images, x_train=images, y_test=np.zeros(2), y_train=np.zeros(2))
    options = ["tomography", "--part", "table", "--quick", "--data-dir", str(tmp_path), "--out", str(tmp_path)]
    assert main([*options, "--angles", "3"]) == 0
    first = (tmp_path / "tomography_table.jsonl").read_text()
    capsys.readouterr()
    assert main(options) == 0
    printed = capsys.readouterr()
    assert "3 angles, 5% noise: trained" not in printed.err
    assert "5 angles, 5% noise: trained" in printed.err
    assert (tmp_path / "tomography_table.jsonl").read_text().startswith(first)
    (table,) = results(tmp_path / "tomography_table.json").values()
    assert [row.group for row in table.rows] == ["3 angles, 5% noise"] * 6 + ["5 angles, 5% noise"] * 6
    assert any("settings" in note for note in table.notes)


def test_a_large_image_in_small(tmp_path: Path) -> None:
    assert main(["tomography", "--part", "large", "--quick", "--out", str(tmp_path)]) == 0
    (large,) = results(tmp_path / "tomography_large.json").values()
    assert "68 measurements" in large.notes[0]
    assert {row.name for row in large.rows} >= {"FBP", "tangent, evidence"}


def test_a_table_without_data_says_where_to_put_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAPWING_DATA", raising=False)
    assert main(["tomography", "--part", "table", "--out", str(tmp_path)]) == 1
    assert "pass --data-dir DIR or set LAPWING_DATA" in capsys.readouterr().err
