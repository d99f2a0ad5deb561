"""Stored results: to JSON and back, joined, and refused where they are damaged or not finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.engine.contract import Record
from experiments.engine.machine import Machine
from experiments.engine.store import Stored, Unit, checked, join, load, save
from lapwing.errors import FileError

HERE = Machine("a processor, 2 cores", {"python": "3.11", "torch": "2.13"}, 1, "python -m experiments toy")
GPU = replace(HERE, hardware="a GPU")


def unit(value: float, machine: Machine = HERE, error: str = "") -> Unit:
    records = () if error else (Record("wine", "Kron, γ", 3, {"NLL": value, "RMSE": 2.0}, 0.5, 2**33),)
    return Unit(records, 1.5, None, machine, "abc", "toy 1", error)


STORED = Stored("toy", "full", {"sets": ["wine"], "limit": None}, 7, {"a": unit(0.1), "b": unit(0.2, GPU)})


def test_results_go_to_json_and_come_back(tmp_path: Path) -> None:
    save(STORED, tmp_path / "new" / "toy_full.json")
    assert load(tmp_path / "new" / "toy_full.json") == STORED
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["toy_full.json"]
    failed = STORED.with_unit("c", unit(0.0, error="DataError: no"))
    assert Stored.from_json(failed.to_json()) == failed
    assert len(failed.records) == 2
    assert Stored.from_json(Stored("toy", "full", {}, 0).to_json()) == Stored("toy", "full", {}, 0)


def test_the_file_does_not_depend_on_the_order_in_which_units_ended() -> None:
    other = replace(STORED, units=dict(reversed(STORED.units.items())))
    assert other.to_json() != STORED.to_json()
    assert other.ordered(["a", "b"]).to_json() == STORED.to_json()
    assert list(other.ordered(["a"]).units) == ["a", "b"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(FileError, match="not finite"):
        replace(STORED, units={"a": unit(value)}).to_json()
    with pytest.raises(FileError, match=r"NLL of wine/Kron, γ/3 is (nan|inf); expected a finite number"):
        checked(unit(value).records)


def test_two_records_of_one_name_are_refused() -> None:
    with pytest.raises(FileError, match="two records of"):
        checked([*unit(1.0).records, *unit(2.0).records])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"units": {}}', '{"uci": {"rows": []}}'])
def test_damaged_files_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "toy_full.json").write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=r"toy_full\.json is not a stored result"):
        load(tmp_path / "toy_full.json")


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        load(tmp_path / "toy_full.json")


def test_parts_keep_their_machines_and_failures_do_not_win() -> None:
    first = replace(STORED, units={"a": unit(0.1), "b": unit(0.0, error="x")})
    second = replace(STORED, units={"a": unit(0.0, error="x"), "b": unit(0.2, GPU)})
    assert join([first, second]) == STORED
    with pytest.raises(FileError, match="nothing to join"):
        join([])


@pytest.mark.parametrize("other", [{"form": "quick"}, {"settings": {}}, {"seed": 3}, {"experiment": "uci"}])
def test_parts_of_different_results_are_not_joined(other: dict[str, object]) -> None:
    with pytest.raises(FileError, match=f"differ in {next(iter(other))}"):
        join([STORED, replace(STORED, **other)])  # type: ignore[arg-type]
