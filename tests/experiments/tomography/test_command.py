"""The command ``python -m experiments tomography``, in its quick form: its files and its page."""

from __future__ import annotations

import json
from pathlib import Path

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
