"""``python -m experiments`` with the engine, as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.engine.store import load
from tests.experiments.engine.toy import Toy


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the engine know the toy alone, without a data folder."""
    for module in ("engine.known", "engine.command", "__main__"):
        name = "STORED" if module == "__main__" else "EXPERIMENTS"
        monkeypatch.setattr(f"experiments.{module}.{name}", {"toy": "tests.experiments.engine.toy:Toy"})
    monkeypatch.delenv("LAPWING_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_run_prints_a_table_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--form", "full", "--out", str(tmp_path / "x"), "--data-dir", str(tmp_path), "--set", "net.hidden=7"]
    assert main(["toy", *options, "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("toy/full\n")
    assert "±" in printed
    assert printed.endswith(f"\n\n{tmp_path / 'x' / 'toy_full.json'}\n")
    stored = load(tmp_path / "x" / "toy_full.json")
    assert (stored.seed, stored.settings["net"]["hidden"], len(stored.units)) == (3, [7], 6)
    command = stored.units["wine/0"].machine.command
    assert command == ("python -m experiments toy --form full --out DIR --data-dir DIR --set net.hidden=7 --seed 3")
    assert str(tmp_path) not in (tmp_path / "x" / "toy_full.json").read_text(encoding="utf-8")


def test_the_name_of_a_file_of_settings_is_that_of_the_form(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text('sets = ["wine"]\n', encoding="utf-8")
    assert main(["toy", "--config", "small.toml", "--set", "repeats=1"]) == 0
    assert list(load(Path("out/toy_small.json")).units) == ["wine/0"]


def test_failures_and_what_is_left_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toy", "--set", "bad=wine/1"]) == 1
    assert "experiments: wine/1 failed: lapwing.errors.DataError: the table is empty." in capsys.readouterr().err
    assert main(["toy", "--time", "0"]) == 0
    assert "the time is over; 1 units are left: wine/1." in capsys.readouterr().err
    assert main(["toy", "--set", "stop=wine/1"]) == 130
    assert "interrupted; 1 units are left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "depth=3"], "depth is unknown"),
        (["--config", "absent.toml"], "absent.toml"),
        (["--data-dir", "absent"], "the data folder absent does not exist"),
        (["--only", "boston"], "selects no unit"),
    ],
)
def test_mistakes_end_with_a_message_and_a_one(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["toy", *options]) == 1
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_written_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toy", "--time", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_the_list_tells_what_is_stored(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main(["toy", "--set", "bad=wine/1", "--out", "out"])
    capsys.readouterr()
    assert main(["--list", "--out", "out"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert " ".join(line.split()) == "toy 3 of 4 stored, 1 failed 6 units, none stored a toy"
    with monkeypatch.context() as patch:  # as where a table is not in the data folder
        patch.setattr(Toy, "units", lambda self: ("wine/0",))
        main(["--list", "--out", "out"])
        assert "1 of 1 stored, 1 failed, 2 more of other data or choices  " in capsys.readouterr().out
    monkeypatch.setattr(Toy, "version", 2, raising=False)
    main(["--list", "--out", "out"])
    assert "0 of 4 stored, 1 failed, 3 out of date" in capsys.readouterr().out


def test_parts_are_joined(capsys: pytest.CaptureFixture[str]) -> None:
    main(["toy", "--only", "wine/*", "--out", "a"])
    main(["toy", "--only", "yacht/*", "--out", "b"])
    capsys.readouterr()
    assert main(["--join", "a/toy_quick.json", "b/toy_quick.json", "--out", "c"]) == 0
    assert capsys.readouterr().out == "4 units\nc/toy_quick.json\n"
    assert len(load(Path("c/toy_quick.json")).units) == 4


def test_the_list_has_the_forms_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    form = tmp_path / "experiments" / "forms" / "toy" / "small.toml"
    form.parent.mkdir(parents=True)
    form.write_text('sets = ["wine"]\n', encoding="utf-8")
    monkeypatch.setattr("experiments.engine.command.IN_FILES", form.parents[1])
    assert main(["toy", "--config", str(form), "--out", "results", "--set", "repeats=1"]) == 0
    capsys.readouterr()
    assert main(["--list", "--out", "results"]) == 0
    units = len(Toy.quick().units()) // len(Toy.quick().sets)
    assert f"experiments/forms/toy/small.toml: 1 of {units} stored" in capsys.readouterr().out
