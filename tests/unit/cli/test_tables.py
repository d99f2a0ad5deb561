"""Which columns and arrays are inputs and targets, and the batches of a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lapwing.cli.data import CsvFile, Form, NpzFile, Roles, Table
from lapwing.errors import DataError

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
        (Roles(), ("images", "labels"), False, ("images",), ("labels",)),
        (Roles(inputs=("b",)), ("a", "b", "y"), False, ("b",), ("y",)),
    ],
)
def test_roles_are_found_or_given(
    roles: Roles, names: tuple[str, ...], columns: bool, inputs: tuple[str, ...], targets: tuple[str, ...]
) -> None:
    assert roles.chosen(names, "the file", columns) == (inputs, targets)


@pytest.mark.parametrize(
    ("roles", "names", "columns", "message"),
    [
        (Roles(targets=("lable",)), NAMES, True, "the file has no 'lable'; .* Did you mean 'label'?"),
        (Roles(inputs=("Size",)), NAMES, True, "the file has no 'Size'; it has 'id', 'age'"),
        (Roles(dropped=("x",)), NAMES, True, "the file has no 'x'"),
        (Roles(), ("a", "y", "label"), True, "has the targets 'y', 'label'; expected one. Say which: --target NAME"),
        (Roles(), ("y",), True, "has nothing besides its targets; expected inputs, one column or more"),
        (Roles(), ("a", "b", "y"), False, "has 'a', 'b' besides its targets; expected inputs, one array"),
        (Roles(inputs=("a", "b")), ("a", "b", "y"), False, "expected inputs, one array"),
    ],
)
def test_names_that_are_not_clear_are_refused(
    roles: Roles, names: tuple[str, ...], columns: bool, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        roles.chosen(names, "the file", columns)


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
    assert table.described().endswith("t.csv: 3 rows, 1 inputs, target kind (0 = cat, 1 = dog)")
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
