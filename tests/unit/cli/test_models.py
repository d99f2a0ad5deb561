"""Import paths, models, their weights, and errors in the code of the user."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.cli.conftest import FITTED, Ran

# Models by import path, with their weights.

Run = Callable[..., Ran]


def test_a_model_may_be_a_function_a_class_or_an_object(run: Run) -> None:
    for model in ("cli_nets:classifier", "cli_nets:Keyed", "cli_nets:ready"):
        data = "cli_nets:make_dicts --target kind" if "Keyed" in model else "train.npz"
        assert run(f"check {model} --data {data} --json").code == 0


def test_a_random_network_without_weights_is_refused(run: Run, tmp_path: Path) -> None:
    fit = "fit {} --data train.npz --likelihood classification --prior 1 --out"
    error = run(fit.format("cli_nets:classifier"), str(tmp_path / "a.lapwing")).error
    assert "gives other values of 0.weight at each call, so its weights are not trained" in error
    assert "--weights FILE" in error
    assert run(fit.format("cli_nets:ready"), str(tmp_path / "b.lapwing")).code == 0


def test_the_model_is_in_evaluation_mode_and_has_the_given_weights(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lapwing.cli import commands

    seen = []
    whole = commands.check
    monkeypatch.setattr(
        commands, "check", lambda model, *args, **kwargs: seen.append(model) or whole(model, *args, **kwargs)
    )
    assert run(f"check {FITTED} --data train.npz").code == 0
    assert not any(module.training for module in seen[0].modules())
    state = torch.load(folder / "classifier.pt", weights_only=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in seen[0].state_dict().items())


# Import paths, and errors in the code of the user.

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
def test_objects_that_are_not_models_are_refused_with_the_remedy(model: str, message: str, run: Run) -> None:
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


# Weights files, which cannot run code.


def test_weights_in_every_form_give_the_same_model(run: Run, folder: Path, tmp_path: Path, posterior: Path) -> None:
    """A posterior refuses every other model, so that a prediction shows that the weights are the same."""
    state = torch.load(folder / "classifier.pt", weights_only=True)
    save_file(state, tmp_path / "w.safetensors")
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "checkpoint.ckpt")
    torch.save({"model_state_dict": state, "loss": 0.5}, tmp_path / "trainer.pt")
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "parallel.pt")
    torch.save({"model": {f"model.net.{n}": tensor for n, tensor in state.items()}}, tmp_path / "deep.pth")
    for number, file in enumerate(sorted(tmp_path.iterdir())):
        words = f"predict cli_nets:classifier --weights {file} --posterior classifier.lapwing --data test.npz"
        assert run(words, "--out", str(tmp_path / f"{number}.npz")).code == 0


def test_weights_of_another_model_are_refused_by_name(run: Run, tmp_path: Path, folder: Path) -> None:
    state = torch.load(folder / "classifier.pt", weights_only=True)
    words = "check cli_nets:classifier --data train.npz --weights"
    error = run(f"{words} wide.pt").error
    assert "wide.pt belongs to another model: 0.weight has the shape (8, 4); expected (5, 4)." in error
    torch.save({"0.weight": state["0.weight"], "head.bias": state["2.bias"]}, tmp_path / "part.pt")
    error = run(f"{words} {tmp_path / 'part.pt'}").error
    assert (
        "lacks 0.bias, 2.weight, 2.bias and has head.bias, which the model lacks. Check MODEL and --weights." in error
    )


class Attack:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("wrap", [lambda attack: attack, lambda attack: {"state_dict": attack}])
def test_a_file_with_code_is_refused_and_its_code_does_not_run(
    wrap: Callable[[object], object], run: Run, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    torch.save(wrap(Attack(made)), tmp_path / "evil.pt")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(wrap(Attack(made))))
    for name in ("evil.pt", "evil.pkl"):
        error = run(f"check cli_nets:classifier --data train.npz --weights {tmp_path / name}").error
        assert "Save the weights by torch.save(model.state_dict(), path)." in error
    assert not made.exists()
    assert (
        "reading objects can run code"
        in run(f"check cli_nets:classifier --data train.npz --weights {tmp_path / 'evil.pt'}").error
    )


def test_a_whole_model_and_damaged_files_are_refused(run: Run, tmp_path: Path, folder: Path) -> None:
    torch.save(torch.nn.Linear(4, 3), tmp_path / "model.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"loss": 0.1}, tmp_path / "number.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "cut.pt").write_bytes((folder / "classifier.pt").read_bytes()[:300])
    (tmp_path / "text.safetensors").write_text("weights")
    words = {
        "model.pt": "Python object", "list.pt": "holds a list", "number.pt": "the keys loss",
        "empty.pt": "not a file of weights, or is damaged", "cut.pt": "not a file of weights, or is damaged",
        "text.safetensors": "not a safetensors file", "missing.pt": "there is no file",
    }  # fmt: skip
    for name, message in words.items():
        assert message in run(f"check cli_nets:classifier --data train.npz --weights {tmp_path / name}").error
