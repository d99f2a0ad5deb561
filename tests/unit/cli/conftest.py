"""A folder as a user has it: a file with networks, their weights, tables, and a fitted posterior."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lapwing.cli import main

INPUTS, CLASSES, ROWS = 4, 3, 60
NETS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LIMIT = 7


def classifier():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def wide():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def regressor():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def words():
    return nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(6, 3))


def binary():
    return nn.Linear(4, 1)


class Needs(nn.Module):
    def __init__(self, hidden, depth=2):
        super().__init__()


def broken():
    raise KeyError("no\\nsuch layer")


def talking():
    print("building the network")
    return classifier()


def warning():
    import warnings

    warnings.warn("the network\\nis old")
    return classifier()


def interrupted():
    raise KeyboardInterrupt


def number():
    return 3


torch.manual_seed(5)
ready = nn.Linear(4, 3)


def rows(count):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.arange(count) % 3


def make_loader():
    return DataLoader(TensorDataset(*rows(30)), batch_size=7)


def make_dicts():
    x, y = rows(30)
    return [{"input": x[:11], "kind": y[:11]}, {"input": x[11:], "kind": y[11:]}]


class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = classifier()

    def forward(self, input):
        return self.net(input)
"""


@dataclass(frozen=True)
class Ran:
    """What a command gave."""

    code: int
    out: str
    err: str

    @property
    def facts(self) -> dict[str, Any]:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of an error, which ends with a full stop or a question."""
        assert self.code == 1
        assert self.out == ""
        assert self.err.startswith("lapwing: ")
        assert self.err.count("\n") == 1, self.err
        assert self.err.rstrip().endswith((".", "?")), self.err
        return self.err


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks in cli_nets.py with weights, data that they fit, and files of them in every format."""
    at = tmp_path_factory.mktemp("cli")
    (at / "cli_nets.py").write_text(NETS)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, INPUTS, generator=generator)
    noise = 0.3 * torch.randn(ROWS, CLASSES, generator=generator)
    y = (x[:, :CLASSES] + noise).argmax(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        classifier = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        regressor = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        wide = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    for net, loss in (
        (classifier, lambda f: nn.functional.cross_entropy(f, y)),
        (wide, lambda f: nn.functional.cross_entropy(f, y)),
        (regressor, lambda f: (f[:, 0] - x[:, 0]).square().mean()),
    ):
        for _ in range(100):
            gradients = torch.autograd.grad(loss(net(x)), list(net.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                    parameter -= 0.2 * gradient
    torch.save(classifier.state_dict(), at / "classifier.pt")
    torch.save(wide.state_dict(), at / "wide.pt")
    torch.save(regressor.state_dict(), at / "regressor.pt")
    np.savez(at / "train.npz", x=x[:40].numpy(), y=y[:40].numpy())
    np.savez(at / "test.npz", x=x[40:].numpy(), y=y[40:].numpy())
    np.savez(at / "numbers.npz", x=x.numpy(), y=x[:, 0].numpy())
    kinds = ("bird", "cat", "dog")
    for name, rows in (("train", slice(40)), ("test", slice(40, None))):
        with (at / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "a", "b", "c", "d", "kind"])
            each = zip(x[rows].tolist(), y[rows].tolist(), strict=True)
            writer.writerows([f"row {i}", *row, kinds[kind]] for i, (row, kind) in enumerate(each))
    return at


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command, given as words with spaces between them, in the folder."""
    monkeypatch.chdir(folder)

    def ran(words: str, *more: str) -> Ran:
        capsys.readouterr()
        code = main([*words.split(), *more])
        return Ran(code, *capsys.readouterr())

    return ran


FITTED = "cli_nets:classifier --weights classifier.pt"


@pytest.fixture(scope="session")
def posterior(folder: Path) -> Path:
    """The posterior of the classifier, fitted once by the command."""
    return _fitted(folder, f"{FITTED} --data train.npz --likelihood classification --out classifier.lapwing")


@pytest.fixture(scope="session")
def regression(folder: Path) -> Path:
    """The posterior of the regression, fitted once by the command."""
    options = "--data numbers.npz --likelihood regression --method kron --prior 2 --out regressor.lapwing"
    return _fitted(folder, f"cli_nets:regressor --weights regressor.pt {options}")


@pytest.fixture(scope="session")
def other(folder: Path) -> Path:
    """The posterior of the wide classifier."""
    options = "--data train.npz --likelihood classification --out wide.lapwing"
    return _fitted(folder, f"cli_nets:wide --weights wide.pt {options}")


def _fitted(folder: Path, words: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["fit", *words.split()]) == 0
    return folder / words.split()[-1]
