"""Weights files, which cannot run code."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.cli.conftest import Ran

Run = Callable[..., Ran]


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
        "empty.pt": "no file of weights, or damaged", "cut.pt": "no file of weights, or damaged",
        "text.safetensors": "no safetensors file", "missing.pt": "there is no file",
    }  # fmt: skip
    for name, message in words.items():
        assert message in run(f"check cli_nets:classifier --data train.npz --weights {tmp_path / name}").error
