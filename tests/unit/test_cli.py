"""The command line as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.result import Result, Row
from experiments.tables import table
from lapwing.cli import main
from tests.experiments.test_uci import written


def test_run_prints_both_tables_and_writes_what_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "here"
    assert main(["run", "--quick", "--out", str(out), "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    for words in ("digits", "diabetes", "plain network", "posterior", "AUROC shuffled", "coverage 95 %"):
        assert words in printed
    paths = [Path(line) for line in printed.splitlines() if line.startswith(str(out))]
    assert [path.name for path in paths] == ["digits.png", "diabetes.png", "bands.png", "results.json"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[:3])
    documents = json.loads(paths[3].read_text())
    assert list(documents) == ["digits", "diabetes", "bands"]
    digits = Result.from_json(json.dumps(documents["digits"]))
    assert digits.seed == 3
    assert digits.settings["recipe"]["epochs"] == 10
    assert f"{digits.rows[0].scores['accuracy']:.3f}" in printed


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


EXPERIMENTS = ("digits", "diabetes", "bands", "uci", "fashion", "normalised", "sampling", "images", "inducing",
               "flights", "response", "pushed_images")  # fmt: skip
PICTURES = ("digits", "observed", "bands", "distances", "sampling", "inducing", "inducing_targets", "response")
WRITTEN = {  # the experiments of each command, and the files
    "run": (("digits", "diabetes", "bands"), ("digits.png", "diabetes.png", "bands.png", "results.json")),
    "uci": (("uci",), ("uci.json",)),
    "fashion": (("fashion",), ("fashion.json",)),
    "normalised": (("normalised",), ("normalised.png", "normalised.json")),
    "sampling": (("sampling",), ("sampling.png", "sampling.json")),
    "images": (("images",), ("images_mlp.json",)),
    "inducing": (("inducing", "targets"), ("inducing.png", "inducing_targets.png", "inducing.json")),
    "flights": (("flights",), ("flights.json",)),
    "response": (("response",), ("response.png", "response.json")),
    "pushed": (("pushed_images",), ("pushed.json",)),
}


@pytest.mark.parametrize("command", WRITTEN)
def test_every_command_prints_its_tables_and_what_it_wrote(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With runs that end at once: the tables, then the paths, and in every picture the result that it is of."""

    def runs(name: str) -> Callable[..., Result]:
        return lambda settings, report=lambda line: None: (report(f"{name}: done"), made(name))[1]

    for name in EXPERIMENTS:
        monkeypatch.setattr(f"experiments.{name}.run", runs(name))
    monkeypatch.setattr("experiments.inducing.run_targets", runs("targets"))
    for name in PICTURES:
        draw = lambda result, path, name=name: path.write_text(f"{name} of {result.experiment}")
        monkeypatch.setattr(f"experiments.pictures.{name}", draw)
    options = [] if command in ("run", "sampling") else ["--data-dir", str(tmp_path)]
    assert main([command, "--out", str(tmp_path), *options]) == 0
    experiments, files = WRITTEN[command]
    tables = "".join(table(made(name)) + "\n\n" for name in experiments)
    printed = capsys.readouterr()
    assert printed.out == tables + "".join(f"{tmp_path / name}\n" for name in files)
    assert printed.err == ("" if options == [] else "".join(f"{name}: done\n" for name in experiments))
    assert list(json.loads((tmp_path / files[-1]).read_text())) == list(experiments)
    assert {path.name for path in tmp_path.iterdir()} == set(files)
    drawn = [(tmp_path / name).read_text() for name in files[:-1]]
    assert [text.split(" of ")[1] for text in drawn] == list(experiments[: len(drawn)])


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
    assert captured.err.splitlines()[-1].startswith("lapwing: ")


@pytest.mark.parametrize("arguments", [[], ["run"], ["uci", "--out", "x", "--splits", "0"], ["walk"]])
def test_a_command_that_cannot_be_read_exits_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_missing_extras_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("experiments.d")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("experiments.digits", raising=False)
    monkeypatch.delattr("experiments.diabetes", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["run", "--out", str(tmp_path)]) == 1
    assert "pip install 'lapwing[run]'" in capsys.readouterr().err


def test_python_m_lapwing_is_the_same_command() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "lapwing", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "{run,uci" in found.stdout
