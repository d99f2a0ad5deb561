"""The commands of docs/command_line.md run as they are printed, and print what is shown."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

from lapwing.cli import main
from lapwing.cli.program import COMMANDS

PAGE = (Path(__file__).parents[3] / "docs" / "command_line.md").read_text(encoding="utf-8")
PYTHON = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def test_the_worked_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of output begin with the words that are shown; numbers may differ between machines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    assert PYTHON is not None
    (tmp_path / "digits.py").write_text(PYTHON.group(1))
    ran = set()
    with torch.random.fork_rng(devices=[]):
        for commands, shown in SHELL.findall(PAGE):
            for line in commands.splitlines():
                words = shlex.split(line)
                if words[0] == "python":
                    runpy.run_path(words[1], run_name="__main__")
                    continue
                assert main(words[1:]) == 0, capsys.readouterr().err
                printed = capsys.readouterr().out
                ran.add(words[1])
            if shown:
                assert [line.split()[0] for line in shown.splitlines()] == [
                    line.split()[0] for line in printed.splitlines()
                ]
    monkeypatch.delitem(sys.modules, "digits")
    assert json.loads(printed)["command"] == "evaluate"
    assert ran == set(COMMANDS) - {"demo"}
    assert {path.name for path in tmp_path.iterdir()} >= {"digits.lapwing", "predictions.csv", "report.html"}


def test_every_command_and_option_is_on_the_page() -> None:
    assert all(f"`lapwing {name}`" in PAGE for name in COMMANDS)
    documented = (
        "weights", "target", "inputs", "drop", "keep", "classes", "batch-size", "likelihood", "validation", "method",
        "subset", "prior", "json", "traceback", "overwrite", "seed", "device", "version", "level", "out",
    )  # fmt: skip
    assert all(f"--{name}" in PAGE for name in documented)
