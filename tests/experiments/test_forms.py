"""Forms in files: each can be read, and results that are stored under its name were measured with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.engine.known import experiment_class
from experiments.engine.settings import digest, from_toml
from experiments.engine.store import load, result_path

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / "experiments" / "forms").glob("*/*.toml"))


def test_there_are_forms() -> None:
    assert {path.parent.name for path in FORMS} >= {"cnn", "evidence", "regularised", "shift"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_form_can_be_read_and_is_that_of_the_stored_result(path: Path) -> None:
    settings: Any = from_toml(experiment_class(path.parent.name), path)
    assert path.stem not in ("quick", "full")
    assert len(set(settings.units())) == len(settings.units()) > 0
    stored = result_path(ROOT / "docs" / "results", path.parent.name, path.stem)
    if stored.exists():
        units = load(stored).units
        assert set(units) <= set(settings.units())
        assert {unit.settings for unit in units.values()} == {digest(settings)}
