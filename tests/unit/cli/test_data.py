"""Data of a command: files and loaders, and their refusals as a user meets them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.cli.conftest import FITTED, Ran

Run = Callable[..., Ran]
FIT = f"fit {FITTED} --likelihood classification --prior 1"


@pytest.fixture
def refused(run: Run, tmp_path: Path) -> Callable[..., str]:
    """Return the error of a fit to these data; nothing is written."""

    def error(data: str, options: str = "", fit: str = FIT) -> str:
        message = run(f"{fit} --data {data} --out {tmp_path / 'net.lapwing'} {options}").error
        assert not (tmp_path / "net.lapwing").exists()
        return message

    return error


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("missing.npz", "there is no file missing.npz; expected data. Check --data."),
        (
            "cli_nets.py",
            "--data is 'cli_nets.py'; expected a file (.npz, .csv, .parquet), or the import path of a load",
        ),
        ("cli_nets:nothing", "--data is 'cli_nets:nothing', and cli_nets has no 'nothing'"),
        ("cli_nets:number", "which gives 3; expected a DataLoader, a Dataset or a list of (inputs, targets) batches"),
        ("cli_nets:rows", "which needs the arguments count"),
        ("cli_nets:broken", "cli_nets:broken raised KeyError"),
        (
            "train.csv",
            "train.csv has 'id', 'a', 'b', 'c', 'd', 'kind' and no target; expected one. Say which: --target",
        ),
        ("train.csv --target kind", "the column 'id' of train.csv is text, 'row 0' in its first row; expected numbers"),
        ("train.csv --target kind --drop id,a", "does not take the inputs of train.csv, 'b', 'c', 'd' of shape (3,)"),
        (
            "train.csv --target kind --drop id --classes cat,dog,fish",
            "'bird'; expected one of 'cat', 'dog', 'fish'. Check --classes.",
        ),
        ("train.csv --target kind --drop ids", "train.csv has no 'ids'"),
        ("numbers.npz", "expected whole class numbers"),
    ],
)
def test_unusable_data_are_refused_in_a_line(data: str, message: str, refused: Callable[..., str]) -> None:
    assert message in refused(data)


def test_validation_data_are_named(refused: Callable[..., str]) -> None:
    error = refused("train.npz", "--validation held.npz", FIT.replace(" --prior 1", ""))
    assert "there is no file held.npz; expected data. Check --validation." in error


def test_validation_data_with_other_classes_are_refused(refused: Callable[..., str], folder: Path) -> None:
    """Three texts each, of which one differs: sorted by themselves, they would have the same numbers."""
    (folder / "three.csv").write_text("a,b,c,d,y\n1,2,3,4,dog\n1,2,3,5,cat\n1,2,3,6,cow\n")
    (folder / "held.csv").write_text("a,b,c,d,y\n1,2,3,4,dog\n1,2,3,5,cat\n1,2,3,6,bird\n")
    error = refused("three.csv", "--validation held.csv", FIT.replace(" --prior 1", ""))
    assert "held.csv, row 3, 'y' is 'bird'; expected one of 'cat', 'cow', 'dog'." in error


def test_a_file_with_too_few_classes_is_refused(refused: Callable[..., str], folder: Path) -> None:
    """Sorted texts would otherwise get other numbers than in the training."""
    (folder / "two.csv").write_text("a,b,c,d,y\n1,2,3,4,dog\n1,2,3,5,cat\n")
    error = refused("two.csv")
    assert "the target 'y' of two.csv has the classes 'cat', 'dog', and the network 3 outputs" in error
    assert "--classes A,B,C" in error


def test_text_for_a_regression_is_refused(refused: Callable[..., str]) -> None:
    fit = "fit cli_nets:regressor --weights regressor.pt --likelihood regression --prior 1"
    error = refused("train.csv", "--target kind --drop id", fit)
    assert "the target 'kind' of train.csv is text, 'bird'; expected numbers, since the likelihood is not one" in error


def test_nan_is_named_by_its_row(refused: Callable[..., str], folder: Path) -> None:
    x = np.zeros((6, 4))
    x[4, 2] = np.nan
    np.savez(folder / "nan.npz", x=x, y=np.arange(6) % 3)
    assert "nan.npz, row 5, 'x' is NaN or infinite" in refused("nan.npz")


def test_classes_beyond_the_outputs_are_refused(refused: Callable[..., str], folder: Path) -> None:
    np.savez(folder / "four.npz", x=np.random.default_rng(0).normal(size=(8, 4)), y=np.arange(8) % 4)
    assert "targets run from 0 to 3; expected 0..2" in refused("four.npz")


def test_the_same_data_in_every_form_give_the_same_posterior(run: Run, folder: Path, tmp_path: Path) -> None:
    """The evidence shows it, which depends on all inputs and targets."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = np.load(folder / "train.npz")
    kinds = np.array(["bird", "cat", "dog"])[arrays["y"]]
    columns = {name: arrays["x"][:, at] for at, name in enumerate("abcd")}
    pq.write_table(pa.table({**columns, "label": kinds}), folder / "train.parquet")
    np.savez_compressed(folder / "texts.npz", inputs=arrays["x"].astype(np.float64), labels=kinds)
    evidences = []
    for number, data in enumerate(
        ["train.npz", "train.csv --target kind --drop id", "train.parquet", "texts.npz", "train.npz --batch-size 7"]
    ):
        out = tmp_path / f"{number}.lapwing"
        ran = run(f"{FIT} --data {data} --out {out} --json")
        assert ran.facts["data"]["rows"] == 40
        candidates = run(f"compare {FITTED} --posterior {out} --json").facts["candidates"]
        evidences.append(candidates[0]["log_evidence"])
    np.testing.assert_allclose(evidences, evidences[0], rtol=1e-5)  # float32, in batches of other sizes


def test_whole_numbers_are_indices_for_an_embedding_and_numbers_otherwise(run: Run, folder: Path) -> None:
    whole = np.random.default_rng(0).integers(0, 9, size=(12, 3))
    np.savez(folder / "words.npz", x=whole, y=whole[:, 0] % 3)
    assert run("check cli_nets:words --data words.npz --json").facts["weights"] == 9 * 2 + 6 * 3 + 3
    np.savez(folder / "whole.npz", x=np.random.default_rng(1).integers(0, 9, size=(12, 4)), y=np.arange(12) % 3)
    assert run("check cli_nets:classifier --data whole.npz").code == 0


def test_loaders_by_import_path(run: Run, folder: Path, tmp_path: Path) -> None:
    ran = run(f"{FIT} --data cli_nets:make_loader --out {tmp_path / 'a.lapwing'} --json")
    assert ran.facts["data"] == {"described": "cli_nets:make_loader: 30 rows", "rows": 30, "classes": None}
    state = torch.load(folder / "classifier.pt", weights_only=True)
    torch.save({f"net.{name}": tensor for name, tensor in state.items()}, folder / "keyed.pt")
    keyed = "fit cli_nets:Keyed --weights keyed.pt --data cli_nets:make_dicts"
    words = f"{keyed} --likelihood classification --prior 1"
    error = run(f"{words} --out {tmp_path / 'b.lapwing'}").error
    assert "has no target; pass --target NAME" in error
    assert run(f"{words} --out {tmp_path / 'b.lapwing'} --target kind").code == 0
    predict = f"{keyed.replace('fit', 'predict')} --posterior {tmp_path / 'b.lapwing'} --target kind"
    assert run(f"{predict} --out {tmp_path / 'p.csv'} --json").facts["rows"] == 30
    evaluate = predict.replace("predict", "evaluate")
    assert run(f"{evaluate} --json").facts["evaluation"]["inputs"] == 30
