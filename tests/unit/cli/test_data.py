"""Data of a command: which columns are inputs and targets, batches, loaders, and their refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lapwing.cli.data import Form, Roles, Table
from lapwing.cli.files import CsvFile, NpzFile
from lapwing.errors import DataError
from tests.unit.cli.conftest import FITTED, Ran

# Data of a command: files and loaders, and their refusals as a user meets them.

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


# Which columns and arrays are inputs and targets, and the batches of a table.

NAMES = ("id", "age", "size", "label")
FORM = Form(2, torch.float32)


@pytest.mark.parametrize(
    ("roles", "names", "columns", "inputs", "targets"),
    [
        (Roles(), ("a", "b", "y"), True, ("a", "b"), ("y",)),
        (Roles(), ("Label", "b"), True, ("b",), ("Label",)),
        (Roles(), ("a", "b"), True, ("a", "b"), ()),
        (Roles(dropped=("id",)), NAMES, True, ("age", "size"), ("label",)),
        (Roles(targets=("size",)), NAMES, True, ("id", "age", "label"), ("size",)),
        (Roles(targets=("size", "age")), NAMES, True, ("id", "label"), ("size", "age")),
        (Roles(inputs=("size", "age")), NAMES, True, ("size", "age"), ("label",)),
        (Roles(inputs=("label",)), NAMES, True, ("label",), ()),
        (Roles(), ("X", "y"), False, ("X",), ("y",)),
        (Roles(), ("inputs", "extra", "targets"), False, ("inputs",), ("targets",)),
        (Roles(inputs=("b",)), ("a", "b", "y"), False, ("b",), ("y",)),
    ],
)
def test_roles_are_found_or_given(
    roles: Roles, names: tuple[str, ...], columns: bool, inputs: tuple[str, ...], targets: tuple[str, ...]
) -> None:
    assert roles.choose(names, "the file", columns) == (inputs, targets)


@pytest.mark.parametrize(
    ("roles", "names", "columns", "message"),
    [
        (Roles(targets=("lable",)), NAMES, True, "the file has no 'lable'; .* Did you mean 'label'?"),
        (Roles(inputs=("Size",)), NAMES, True, "the file has no 'Size'; it has 'id', 'age'"),
        (Roles(), ("a", "y", "label"), True, "has the targets 'y', 'label'; expected one. Say which: --target NAME"),
        (Roles(), ("y",), True, "has nothing besides its targets; expected inputs, one column or more"),
        (Roles(), ("a", "b", "y"), False, "has 'a', 'b' besides its targets; expected inputs, one array"),
    ],
)
def test_names_that_are_not_clear_are_refused(
    roles: Roles, names: tuple[str, ...], columns: bool, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        roles.choose(names, "the file", columns)


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text("a,b,n,kind,name\n1,0.5,3,dog,Ann\n2,1.5,0,cat,Bob\n3,2.5,1,dog,Cid\n")
    return path


def test_columns_become_batches_in_the_dtype_of_the_model(csv_file: Path) -> None:
    source = CsvFile(csv_file, ("b", "a", "n"))
    table = Table(source, ("b", "a"), ("n",), Form(2, torch.float64))
    assert (len(table), table.rows) == (2, 3)
    for _ in range(2):
        (x, y), (rest, last) = table
        assert x.dtype == torch.float64
        assert torch.cat([x, rest]).tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
        assert torch.cat([y, last]).tolist() == [3, 0, 1]
        assert y.dtype == torch.int64
    assert [x.shape for x in Table(source, ("b", "a"), (), FORM)] == [(2, 2), (1, 2)]


def test_several_targets_and_whole_inputs(csv_file: Path) -> None:
    source = CsvFile(csv_file, ("a", "n", "b"))
    _, y = next(iter(Table(source, ("a",), ("n", "b"), FORM)))
    assert y.tolist() == [[3, 0.5], [0, 1.5]]
    keeps = Form(2, torch.float32, keeps_whole=True)
    assert next(iter(Table(source, ("a", "n"), (), keeps))).dtype == torch.int64
    assert next(iter(Table(source, ("a", "b"), (), keeps))).dtype == torch.float32


def test_labels_that_are_whole_become_whole(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 2)), y=np.array([0.0, 2.0, 1.0, 1.5]))
    source = NpzFile(tmp_path / "d.npz", ("x", "y"))
    labels, numbers = (Table(source, ("x",), ("y",), Form(3, torch.float32, labels=flag)) for flag in (True, False))
    assert [y.dtype for _, y in labels] == [torch.int64, torch.float32]
    assert [y.dtype for _, y in numbers] == [torch.float32, torch.float32]


def test_texts_are_numbered_in_sorted_order_and_this_is_said(csv_file: Path) -> None:
    table = Table(CsvFile(csv_file, ("a", "kind")), ("a",), ("kind",), FORM)
    assert table.classes == ("cat", "dog")
    assert torch.cat([y for _, y in table]).tolist() == [1, 0, 1]
    assert table.describe().endswith("t.csv: 3 rows, 1 inputs, target kind (0 = cat, 1 = dog)")
    given = Table(CsvFile(csv_file, ("a", "kind")), ("a",), ("kind",), FORM, ("dog", "bird", "cat"))
    assert torch.cat([y for _, y in given]).tolist() == [0, 2, 0]
    wrong = Table(CsvFile(csv_file, ("a", "kind")), ("a",), ("kind",), FORM, ("dogs", "cat"))
    with pytest.raises(DataError, match=r"row 1, 'kind' is 'dog'; expected one of 'dogs', 'cat'. Check --classes. Did"):
        list(wrong)


def test_text_among_the_inputs_is_refused(csv_file: Path) -> None:
    with pytest.raises(DataError, match=r"the column 'name' of .* is text, 'Ann' in its first row; .*--drop 'name'"):
        list(Table(CsvFile(csv_file, ("a", "name")), ("a", "name"), (), FORM))
    with pytest.raises(DataError, match=r"the column 'kind' of .* is text"):
        list(Table(CsvFile(csv_file, ("a", "n", "kind")), ("a",), ("n", "kind"), FORM))


def test_arrays_keep_their_shape(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(5, 3, 4)), np.arange(10.0).reshape(5, 2)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    batches = list(Table(NpzFile(tmp_path / "d.npz", ("x", "y")), ("x",), ("y",), FORM))
    np.testing.assert_array_equal(torch.cat([a for a, _ in batches]).numpy(), x.astype(np.float32))
    np.testing.assert_array_equal(torch.cat([b for _, b in batches]).numpy(), y.astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("name", ["x", "y"])
def test_numbers_that_are_not_finite_are_named_by_row(bad: float, name: str, tmp_path: Path) -> None:
    """1e300 is finite in the file, and infinite in the dtype of the model."""
    arrays = {"x": np.zeros((5, 3, 2)), "y": np.zeros(5)}
    arrays[name].reshape(5, -1)[3, -1] = bad
    np.savez(tmp_path / "d.npz", **arrays)
    table = Table(NpzFile(tmp_path / "d.npz", ("x", "y")), ("x",), ("y",), FORM)
    with pytest.raises(DataError, match=f"d.npz, row 4, '{name}' is NaN or infinite in torch.float"):
        list(table)
