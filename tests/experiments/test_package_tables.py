"""Tables made from packages of data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments import package_tables
from lapwing.errors import DataError


def test_a_missing_package_is_named_with_what_to_install() -> None:
    with pytest.raises(DataError, match="pip install pandas"):
        package_tables._package("a_package_that_does_not_exist")


def test_rows_with_unknown_values_and_rare_classes_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    folders = [tmp_path / "data" / part / "raw" for part in ("balanced", "imbalanced")]
    rows = [f"{i}, {'red' if i % 3 else 'blue'}, 7, {'yes' if i < 10 else 'no'}" for i in range(500)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "a-b.dat").write_text("\n".join(["@relation a", *rows, "?, red, 7, no"]))
    ((name, X, y, kind),) = package_tables.class_tables(tmp_path)  # the imbalanced one has ten rows of a class
    assert (name, kind, X.shape, np.bincount(y).tolist()) == ("c_a_b", "classification", (500, 2), [490, 10])
    assert X[:, 1].tolist() == [float(i % 3 > 0) for i in range(500)]
