"""Names that the fit was given: the file of the posterior keeps them, and later commands use them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

import lapwing as lw
from tests.unit.cli.conftest import FITTED, Ran
from tests.unit.cli.test_commands import classifier, columns

Run = Callable[..., Ran]
FIT = f"fit {FITTED} --likelihood classification --prior 1 --method diagonal"
KINDS = ("bird", "cat", "dog")


@pytest.fixture(scope="module")
def table(folder: Path) -> Path:
    """A posterior that was fitted to a table of texts, with a target and a column to drop."""
    return folder / "table.lapwing"


@pytest.fixture(autouse=True)
def fitted(run: Run, table: Path) -> None:
    if not table.exists():
        assert run(f"{FIT} --data train.csv --target kind --drop id --out {table}").code == 0


def test_a_file_has_the_names(table: Path, folder: Path, tmp_path: Path) -> None:
    again = lw.load(table, classifier(folder))
    assert dict(again.columns) == {"target": ("kind",), "drop": ("id",), "classes": KINDS}
    again.save(tmp_path / "again")
    assert dict(lw.load(tmp_path / "again", classifier(folder)).columns) == dict(again.columns)


def test_later_commands_need_not_repeat_the_names(run: Run, table: Path, tmp_path: Path) -> None:
    options = f"--posterior {table} --data test.csv"
    short = run(f"evaluate {FITTED} {options} --json").facts["evaluation"]
    whole = run(f"evaluate {FITTED} {options} --target kind --drop id --json").facts["evaluation"]
    assert short["scores"] == whole["scores"]
    run(f"predict {FITTED} {options} --out {tmp_path / 'p.csv'}")
    assert set(columns(tmp_path / "p.csv")["class"]) <= set(KINDS)
    assert "probability_bird" in columns(tmp_path / "p.csv")
    assert run(f"report {FITTED} {options} --out {tmp_path / 'page.html'}").code == 0


def test_names_that_the_data_do_not_have_are_left_out(run: Run, table: Path, folder: Path, tmp_path: Path) -> None:
    """Data to predict have no target, and arrays have other names than columns."""
    (folder / "few.csv").write_text("a,b,c,d\n1,2,3,4\n")
    run(f"predict {FITTED} --posterior {table} --data few.csv --out {tmp_path / 'few_p.csv'}")
    assert columns(tmp_path / "few_p.csv")["class"][0] in KINDS
    assert run(f"evaluate {FITTED} --posterior {table} --data test.npz").code == 0
    assert run(f"evaluate {FITTED} --posterior {table} --data cli_nets:make_loader").code == 0


def test_options_come_before_the_names(run: Run, table: Path, folder: Path, tmp_path: Path) -> None:
    with (folder / "other.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "c", "d", "id", "kind"], [1, 2, 3, 4, 9, "dog"]])
    wrong = run(f"predict {FITTED} --posterior {table} --data other.csv --drop kind --out {tmp_path / 'p.csv'}")
    assert "does not take the inputs of other.csv" in wrong.error  # --drop kind in place of --drop id
    names = "--classes x,y,z"
    run(f"predict {FITTED} --posterior {table} --data test.csv {names} --out {tmp_path / 'named.csv'}")
    assert "probability_x" in columns(tmp_path / "named.csv")


def test_texts_keep_the_numbers_of_the_fit(run: Run, table: Path, folder: Path) -> None:
    """A file with two of the three classes: sorted texts alone would get other numbers."""
    (folder / "two_kinds.csv").write_text("a,b,c,d,kind\n1,2,3,4,dog\n1,2,3,5,cat\n")
    assert "dog" in run(f"evaluate {FITTED} --posterior {table} --data two_kinds.csv").out
    (folder / "new_kind.csv").write_text("a,b,c,d,kind\n1,2,3,4,cow\n")
    error = run(f"evaluate {FITTED} --posterior {table} --data new_kind.csv").error
    assert "'cow'; expected one of 'bird', 'cat', 'dog'" in error


def test_posteriors_with_other_names_are_told_apart(run: Run, table: Path, folder: Path) -> None:
    other = folder / "other_order.lapwing"
    run(f"{FIT} --data train.csv --target kind --drop id --classes dog,cat,bird --out {other} --overwrite")
    words = f"evaluate {FITTED} --posterior {table} {other} --data test.csv"
    assert "was fitted with --classes bird,cat,dog and other_order with --classes dog,cat,bird" in run(words).error
    assert run(f"{words} --classes bird,cat,dog").code == 0


@pytest.mark.parametrize("way", ["the same name", "a link", "another spelling", "the weights", "the posterior"])
def test_no_command_writes_over_what_it_reads(way: str, run: Run, table: Path, folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.csv"
    data.write_text("a,b,c,d\n1,2,3,4\n")
    link = tmp_path / "link.csv"
    link.symlink_to(data)
    out, option = {
        "the same name": (data, "--data"),
        "a link": (link, "--data"),
        "another spelling": (tmp_path / ".." / tmp_path.name / "d.csv", "--data"),
        "the weights": (folder / "classifier.pt", "--weights"),
        "the posterior": (table, "--posterior"),
    }[way]
    before = out.read_bytes()
    if way == "the weights":
        ran = run(f"{FIT} --data train.npz --out {out} --overwrite")
    elif way == "the posterior":
        (tmp_path / "p.csv").symlink_to(table)
        ran = run(f"predict {FITTED} --posterior {table} --data {data} --out {tmp_path / 'p.csv'} --overwrite")
    else:
        ran = run(f"predict {FITTED} --posterior {table} --data {data} --out {out} --overwrite")
    assert f"which is the file of {option}" in ran.error
    assert out.read_bytes() == before


def test_the_model_and_the_validation_data_are_not_written_over(run: Run, folder: Path) -> None:
    for out, option in (("cli_nets.py", "MODEL"), ("test.npz", "--validation")):
        before = (folder / out).read_bytes()
        ran = run(f"{FIT} --data train.npz --validation test.npz --out {out} --overwrite")
        assert f"which is the file of {option}" in ran.error
        assert (folder / out).read_bytes() == before
