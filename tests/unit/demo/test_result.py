"""Results go to JSON and come back."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import lapwing
from lapwing.demo.result import Result, Row, plain
from lapwing.demo.training import TrainingSettings

RESULT = Result(
    "small", {"recipe": {"hidden": [3, 4]}}, 7, (Row("a", {"NLL": 0.5}), Row("b", {"NLL": 1.5}, "set")),
    {"total": 0.1}, {"y": [1.0, 2.0]}, ("a note",),
)  # fmt: skip


def test_a_result_survives_json() -> None:
    assert Result.from_json(RESULT.to_json()) == RESULT


def test_json_holds_seed_versions_and_times() -> None:
    document = json.loads(RESULT.to_json())
    assert document["seed"] == 7
    assert document["seconds"] == {"total": 0.1}
    expected = {"python": platform.python_version(), "torch": torch.__version__, "lapwing": lapwing.__version__}
    assert document["versions"] == expected


def test_numbers_that_are_not_finite_are_refused() -> None:
    broken = Result("small", {}, 0, (Row("a", {"NLL": float("nan")}),), {})
    with pytest.raises(ValueError, match="JSON compliant"):
        broken.to_json()


def test_settings_become_plain() -> None:
    @dataclass(frozen=True)
    class Settings:
        data_dir: Path
        sets: tuple[str, ...]
        recipe: TrainingSettings = TrainingSettings()

    fields = plain(Settings(Path("somewhere"), sets=("wine",)))
    assert fields["data_dir"] == "somewhere"
    assert fields["sets"] == ["wine"]
    assert fields["recipe"]["hidden"] == [50, 50]
