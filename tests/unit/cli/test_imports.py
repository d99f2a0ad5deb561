"""Import paths, and errors in the code of the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Ran

Run = Callable[..., Ran]
CHECK = "check {} --data train.npz --json"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("cli_nets", "MODEL is 'cli_nets'; expected an import path such as cli_nets:factory."),
        ("cli_nets.py:classifier", "expected an import path such as cli_nets:classifier."),
        ("./nets/cli_nets.py:classifier", "expected an import path such as nets.cli_nets:classifier."),
        (":classifier", "expected an import path such as package.module:classifier."),
        ("cli_net:classifier", "there is no module 'cli_net'"),
        ("cli_net:classifier", "Did you mean 'cli_nets'?"),
        ("cli_nets.inner:classifier", "there is no module 'cli_nets.inner'"),
        ("cli_nets:clasifier", "cli_nets has no 'clasifier'; expected the name of something in it. Did you mean 'cl"),
        ("cli_nets:Needs", "which needs the arguments hidden; expected one that is called without any. Write a func"),
        ("cli_nets:number", "which returns 3; expected a function that returns a torch.nn.Module."),
        ("cli_nets:LIMIT", "which is 7; expected a function that returns a torch.nn.Module."),
        ("cli_nets:broken", "cli_nets:broken raised KeyError: "),
    ],
)
def test_what_is_no_model_is_refused_with_the_remedy(model: str, message: str, run: Run) -> None:
    assert message in run(CHECK.format(model)).error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import nothing_like_this", "raised ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("def f(:", "raised SyntaxError"),
        (
            "import sys; sys.exit(3)",
            "ended the program with 3; expected definitions. Put what the script does under if _",
        ),
        ("1 / 0", "raised ZeroDivisionError: division by zero. --traceback shows where."),
    ],
)
def test_a_module_that_fails_is_named(
    content: str, message: str, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = folder / "failing"
    at.mkdir(exist_ok=True)
    (at / "cli_failing.py").write_text(content)
    monkeypatch.syspath_prepend(str(at))
    assert f"the import of cli_failing {message}" in run(CHECK.format("cli_failing:net")).error
