"""The command line as a user meets it."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lapwing.cli import main
from lapwing.demo import bands, digits
from lapwing.demo.result import ExperimentReport, Result, Row, table


def test_run_prints_both_tables_and_writes_what_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With some of the images, and a small network for the curve."""
    images, labels = digits.load_digits(return_X_y=True)
    monkeypatch.setattr(digits, "load_digits", lambda **_: (images[:500], labels[:500]))
    whole = bands.run
    small = lambda settings: whole(replace(settings, recipe=replace(settings.recipe, hidden=(20,))))
    monkeypatch.setattr(bands, "run", small)
    out = tmp_path / "made" / "here"
    assert main(["demo", "--quick", "--out", str(out), "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    for words in ("noisy digits", "diabetes", "plain network", "naive evidence", "AUROC", "coverage 95 %"):
        assert words in printed
    paths = [Path(line) for line in printed.splitlines() if line.startswith(str(out))]
    assert [path.name for path in paths] == ["overview.png", "results.json"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    documents = json.loads(paths[1].read_text())
    assert list(documents) == ["digits", "diabetes", "bands"]
    of_digits = Result.from_json(json.dumps(documents["digits"]))
    assert of_digits.seed == 3
    assert of_digits.settings["recipe"]["epochs"] == 10
    assert f"{of_digits.rows[0].scores['accuracy']:.3f}" in printed


def test_tables_are_printed_then_paths_and_the_picture_shows_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With runs that end at once."""
    names = ("digits", "diabetes", "bands")
    results = {name: Result(name, {}, 0, (Row("plain", {"NLL": 1.25}),), {}) for name in names}
    for name, result in results.items():
        monkeypatch.setattr(f"lapwing.demo.{name}.run", lambda settings, result=result: result)
    draw = lambda one, other, path: path.write_text(f"{one.experiment} and {other.experiment}")
    monkeypatch.setattr("lapwing.demo.overview.picture", draw)
    assert main(["demo", "--out", str(tmp_path)]) == 0
    files = ["overview.png", "results.json"]
    tables = "".join(table(result) + "\n\n" for result in results.values())
    printed = capsys.readouterr()
    assert printed.out == tables + "".join(f"{tmp_path / name}\n" for name in files)
    assert printed.err == ""
    assert list(json.loads((tmp_path / "results.json").read_text())) == list(names)
    assert {path.name for path in tmp_path.iterdir()} == set(files)
    assert (tmp_path / "overview.png").read_text() == "digits and bands"


def test_a_run_leaves_the_number_of_threads_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []

    def ended(settings: object) -> Result:
        seen.append(torch.get_num_threads())
        raise OSError("the disk is full")

    monkeypatch.setattr("lapwing.demo.digits.run", ended)
    torch.set_num_threads(2)
    try:
        assert main(["demo", "--out", str(tmp_path)]) == 1
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_a_folder_that_cannot_be_made_ends_with_a_message_and_a_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.startswith("lapwing: ")


def test_without_a_folder_the_files_go_to_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    folders: list[Path] = []
    monkeypatch.setattr(
        "lapwing.demo.run.run", lambda out, *_: folders.append(out) or ExperimentReport(out / "results.json", ())
    )
    assert main(["demo"]) == 0
    assert folders == [Path("out")]
    assert (tmp_path / "out" / "results.json").is_file()


@pytest.mark.parametrize("arguments", [[], ["uci", "--out", "x"], ["demo", "--out", "x", "--seed", "one"]])
def test_a_command_that_cannot_be_read_exits_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_missing_extras_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("digits", "diabetes", "overview", "run"):
        monkeypatch.delitem(sys.modules, f"lapwing.demo.{name}", raising=False)
        monkeypatch.delattr(f"lapwing.demo.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert "pip install 'lapwing[run]'" in capsys.readouterr().err


def test_python_m_lapwing_is_the_same_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as ``python -m`` runs it, in this process: another one would import PyTorch again."""
    monkeypatch.delitem(sys.modules, "lapwing.__main__", raising=False)
    monkeypatch.setattr(sys, "argv", ["lapwing", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lapwing", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert "demo" in capsys.readouterr().out
