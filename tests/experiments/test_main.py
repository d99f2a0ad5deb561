"""``python -m experiments`` as a user meets it."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.__main__ import EXPERIMENTS, main
from lapwing.demo.result import Result, Row, table
from tests.experiments.test_uci import written


def test_uci_prints_a_table_for_the_sets_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, "wine")
    command = ["uci", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), "--splits", "1"]
    assert main([*command, "--sets", "wine", "yacht", "--variants", "plain", "default"]) == 0
    printed = capsys.readouterr()
    assert "yacht: skipped, uci_yacht.npz is not in the data folder" in printed.out
    assert "of 1 tables" in printed.out
    assert "wine: done" in printed.err
    result = Result.from_json(json.dumps(json.loads((tmp_path / "out" / "uci.json").read_text())["uci"]))
    assert [row.name for row in result.rows if row.group == "wine"] == ["plain", "default"]


RESULTS = {
    "inducing": ("inducing", "inducing_targets"),
    "language": ("language", "language_tokens"),
}  # of experiments with more than one
FILES = {  # that each experiment writes
    "calibration": ("calibration.json",),
    "cifar": ("cifar.json",),
    "uci": ("uci.json",),
    "biased": ("biased.json",),
    "widths": ("widths.json",),
    "flights": ("flights.json",),
    "fashion": ("fashion.json",),
    "normalised": ("normalised.png", "normalised.json"),
    "sampling": ("sampling.png", "sampling.json"),
    "inducing": ("inducing.png", "inducing_targets.png", "inducing.json"),
    "images": ("images_mlp.json",),
    "language": ("language.json",),
    "response": ("response.png", "response.json"),
    "pushed": ("pushed.json",),
}
PICTURES = {
    "inducing.picture": "inducing", "inducing.targets_picture": "inducing_targets", "normalised.picture": "normalised",
    "response.picture": "response", "sampling.picture": "sampling",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "tomography"])  # which has several parts
def test_every_experiment_prints_its_tables_and_what_it_wrote(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With runs that end at once: the tables, then the paths, and each picture shows its result."""

    def runs(name: str) -> Callable[..., Result]:
        return lambda settings, progress=lambda line: None: (progress(f"{name}: done"), made(name))[1]

    results = RESULTS.get(name, (name,))
    for module in results:
        monkeypatch.setattr(f"experiments.{module}.run", runs(module))
    for picture, subject in PICTURES.items():
        draw = lambda result, path, subject=subject: path.write_text(f"{subject} of {result.experiment}")
        monkeypatch.setattr(f"experiments.{picture}", draw)
    options = [] if name == "sampling" else ["--data-dir", str(tmp_path)]
    assert main([name, "--out", str(tmp_path), *options]) == 0
    tables = "".join(table(made(each)) + "\n\n" for each in results)
    printed = capsys.readouterr()
    assert printed.out == tables + "".join(f"{tmp_path / file}\n" for file in FILES[name])
    assert printed.err == ("" if options == [] else "".join(f"{each}: done\n" for each in results))
    assert list(json.loads((tmp_path / FILES[name][-1]).read_text())) == list(results)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES[name])
    drawn = [(tmp_path / file).read_text() for file in FILES[name][:-1]]
    assert drawn == [f"{each} of {each}" for each in results[: len(drawn)]]


def made(name: str) -> Result:
    return Result(name, {}, 0, (Row("plain", {"NLL": 1.25}),), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data-dir", "nowhere"], "the data folder nowhere does not exist"),
        ([], "set LAPWING_DATA"),
        (["--data-dir", ".", "--sets", "rain"], "--sets: unknown rain; expected some of boston"),
        (["--data-dir", ".", "--sets", "wine"], "none of wine is in"),
    ],
)
def test_mistakes_end_with_a_message_and_a_one(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LAPWING_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["uci", "--out", str(tmp_path / "out"), *options]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.splitlines()[-1].startswith("experiments: ")


@pytest.mark.parametrize("arguments", [[], ["uci"], ["uci", "--out", "x", "--splits", "0"], ["walk"]])
def test_a_command_that_cannot_be_read_exits_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_missing_extras_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "experiments.sampling", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["sampling", "--out", str(tmp_path)]) == 1
    assert "pip install 'lapwing[run]'" in capsys.readouterr().err


def test_help_lists_every_experiment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as ``python -m`` runs it, in this process: another one would import PyTorch again."""
    monkeypatch.delitem(sys.modules, "experiments.__main__")
    monkeypatch.setattr(sys, "argv", ["experiments", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("experiments", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in EXPERIMENTS)
