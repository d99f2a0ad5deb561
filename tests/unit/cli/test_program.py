"""The program, and damaged files that it reads."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lapwing
from lapwing.cli import main
from lapwing.cli.commands import COMMANDS
from tests.attack import command_line
from tests.unit.cli.conftest import FITTED, Ran

# The program: its commands, streams and exit codes.

Run = Callable[..., Ran]
FIT = f"fit {FITTED} --data train.npz --likelihood classification --prior 1"


def test_version_names_the_packages_that_numbers_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"lapwing {lapwing.__version__} (torch {torch.__version__}, Python ")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert list(COMMANDS) == ["demo", "check", "fit", "evaluate", "predict", "compare", "report"]
    assert all(f"    {name} " in printed for name in COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_and_the_common_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(option in printed for option in ("--json", "--seed", "--traceback"))
    assert ("--device" in printed) == (name != "demo")


@pytest.mark.parametrize(
    "words",
    [
        "", "uci", "run --out x", "fit", f"fit {FITTED}", f"fit {FITTED} --data a --likelihood b --out c --seed -1",
        f"check {FITTED} --data a --batch-size 0", f"check {FITTED} --data a --drop a,,b",
        f"predict {FITTED} --data a --posterior b --out c --level 1.5",
        f"predict {FITTED} --data a --posterior b --out c --level high", "compare a:b",
    ],
)  # fmt: skip
def test_a_command_that_cannot_be_read_exits_with_two(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_json_is_all_there_is_on_stdout_though_the_users_code_prints(run: Run) -> None:
    ran = run("check cli_nets:talking --weights classifier.pt --data train.npz --json")
    assert ran.facts["command"] == "check"
    assert ran.facts["versions"]["lapwing"] == lapwing.__version__
    assert ran.err == "building the network\n"


def test_a_traceback_is_shown_only_if_asked_for(run: Run) -> None:
    words = "check cli_nets:broken --data train.npz"
    assert "cli_nets:broken raised KeyError: 'no\\nsuch layer'. --traceback shows where." in run(words).error
    shown = run(words + " --traceback")
    assert shown.code == 1
    assert 'raise KeyError("no\\nsuch layer")' in shown.err
    assert shown.err.splitlines()[-1].startswith("lapwing: cli_nets:broken raised KeyError")


def test_an_error_that_was_not_expected_is_a_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("one\nover nothing")

    monkeypatch.setattr("lapwing.cli.arguments.import_model", fails)
    assert "ZeroDivisionError: one over nothing (not expected)" in run(f"check {FITTED} --data train.npz").error


def test_an_error_of_the_system_names_the_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "train.npz")

    monkeypatch.setattr("lapwing.cli.arguments.import_model", fails)
    assert run(f"check {FITTED} --data train.npz").error == "lapwing: train.npz: Permission denied. Check the path.\n"


def test_an_interrupt_ends_without_a_traceback(run: Run) -> None:
    ran = run("check cli_nets:interrupted --data train.npz")
    assert (ran.code, ran.out, ran.err) == (130, "", "lapwing: interrupted.\n")


def test_warnings_are_a_line_each(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        ran = run("check cli_nets:warning --weights classifier.pt --data train.npz")
    assert ran.code == 0
    assert ran.err == "lapwing: warning: the network is old\n"


def test_bars_are_shown_on_a_terminal_alone(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert run(FIT, "--out", str(tmp_path / "one")).err == ""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal := Terminal())
        run(FIT, "--out", str(tmp_path / "two"))
    assert "\r" in terminal.getvalue()
    assert terminal.getvalue().endswith(" \r")  # blanks over the last bar


def test_off_a_terminal_long_commands_say_where_they_are(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lapwing.runtime.threads.EVERY", 0.0)
    ran = run(FIT, "--out", str(tmp_path / "one"))
    assert ran.code == 0
    assert re.search(r"^lapwing: \w[\w ]*: 1 of 1, after 0 s$", ran.err, re.MULTILINE)
    assert "after" not in ran.out


def test_words_may_come_from_a_file(run: Run, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "net.txt").write_text(f"# the network\n{FITTED}\n--subset '^0'\n")
    assert run("check @net.txt --data train.npz --json").facts["weights"] == 4 * 5 + 5
    with pytest.raises(SystemExit) as ended:
        main(["check", "@gone.txt"])
    assert ended.value.code == 2
    assert "gone.txt" in capsys.readouterr().err


def test_the_path_of_modules_is_as_before(run: Run) -> None:
    before = list(sys.path)
    run(f"check {FITTED} --data train.npz")
    run("check cli_nets:broken --data train.npz")
    assert sys.path == before


def test_modules_in_the_current_folder_are_found_by_the_script_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script ``lapwing`` starts without the current folder on the path, unlike ``python -m lapwing``."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", ".")])
    monkeypatch.delitem(sys.modules, "cli_nets", raising=False)
    assert run(f"check {FITTED} --data train.npz").code == 0


def test_a_device_that_is_not_there_is_refused(run: Run) -> None:
    for device in ("warp:3", "meta"):
        error = run(f"check {FITTED} --data train.npz --device {device}").error
        assert f"--device is '{device}', which this machine does not have" in error
        assert "--device cpu" in error


def test_a_nul_in_an_argument_or_in_a_file_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "a\0b"]) == 1
    words = tmp_path / "words"
    words.write_text("check a\0b", encoding="utf-8")
    with pytest.raises(SystemExit):
        main([f"@{words}"])
    assert capsys.readouterr().err.count("NUL character") == 2


# Damaged files of a command: the short form of ``python -m tests.attack command_line``.


def test_damaged_files_are_read_or_refused_in_a_line(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        totals, wrong = command_line.attacked(30, seed=5, folder=tmp_path)
    assert not wrong
    assert totals["refused"] > 10
