"""Tables of a user's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.own_tables import OwnTable, own_tables
from lapwing.errors import DataError


def written(folder: Path, name: str, **arrays: object) -> Path:
    np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    return folder / f"{name}.npz"


def test_tables_are_read_and_split_into_standardised_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([5 + 3 * rng.normal(size=(50, 2)), np.full((50, 1), 7.0)], 1)
    classes = written(tmp_path, "colours", X=x, y=np.array([2, 5] * 25), kind="classification")
    numbers = written(tmp_path, "sizes", X=x, y=100 * x[:, 0], kind="regression")
    written(tmp_path, "other", x_train=x)
    assert (own_tables(tmp_path, "classification"), own_tables(tmp_path, "regression")) == ((classes,), (numbers,))
    table = OwnTable.read(classes)
    assert (table.name, table.classes, table.y.unique().tolist()) == ("colours", 2, [0, 1])
    few, many = table.parts(0, 4), table.parts(0, 200)
    assert [len(part[0]) for part in few] == [25, 4, 15]
    assert [len(part[0]) for part in many] == [25, 10, 15]
    assert torch.equal(few[2][0], many[2][0])
    assert torch.equal(few[1][0], many[1][0][:4])
    train, _, _ = OwnTable.read(numbers).parts(1, 10)
    assert train[0].mean(0).abs().max() < 1e-5
    assert abs(float(train[1].std()) - 1) < 1e-5
    assert bool(torch.isfinite(train[0]).all())  # also of the constant column


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lacks kind"):
        OwnTable.read(written(tmp_path, "a", X=np.zeros((3, 2)), y=np.zeros(3)))
    with pytest.raises(DataError, match="expected X"):
        OwnTable.read(written(tmp_path, "b", X=np.zeros((3, 2)), y=np.zeros(2), kind="regression"))
    with pytest.raises(DataError, match=r"no \.npz file with a classification table"):
        own_tables(tmp_path, "classification")
