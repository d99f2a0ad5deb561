"""Tables in parquet files."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lapwing.cli.data import ParquetFile
from lapwing.errors import DataError, FileError, UnsupportedError

COLUMNS = {
    "a": pa.array([0.5, 1.5, -2.0, 4.0, 0.25]),
    "b": pa.array([1, 2, 3, 4, 5], pa.int32()),
    "flag": pa.array([True, False, True, True, False]),
    "kind": pa.array(["cat", "dog", "cat", "bird", "cat"]),
    "coded": pa.array(["x", "y", "x", "x", "y"]).dictionary_encode(),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pq.write_table(pa.table(COLUMNS), tmp_path / "table.parquet", row_group_size=3)
    return tmp_path / "table.parquet"


def test_blocks_hold_the_chosen_columns_in_order(path: Path) -> None:
    assert ParquetFile.names_in(path) == tuple(COLUMNS)
    file = ParquetFile(path, ("b", "kind", "a", "coded", "flag"))
    assert file.rows == 5
    for _ in range(2):
        blocks = list(file.blocks(2))
        assert max(len(block["kind"]) for block in blocks) == 2
        assert [kind for block in blocks for kind in block["kind"]] == COLUMNS["kind"].to_pylist()
        assert [code for block in blocks for code in block["coded"]] == ["x", "y", "x", "x", "y"]
        assert torch.cat([block["a"] for block in blocks]).tolist() == COLUMNS["a"].to_pylist()
        assert torch.cat([block["b"] for block in blocks]).tolist() == [1, 2, 3, 4, 5]
        assert torch.cat([block["flag"] for block in blocks]).tolist() == COLUMNS["flag"].to_pylist()


def test_a_missing_value_is_named_by_row_and_column(tmp_path: Path) -> None:
    path = tmp_path / "gaps.parquet"
    pq.write_table(pa.table({"a": pa.array([1.0, 2.0, 3.0, None, None])}), path)
    with pytest.raises(DataError, match=r"gaps.parquet, row 4, column 'a' is missing"):
        list(ParquetFile(path, ("a",)).blocks(2))


def test_columns_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "days.parquet"
    pq.write_table(pa.table({"day": pa.array([datetime.date(2024, 1, 1)])}), path)
    with pytest.raises(
        DataError, match=r"the column 'day' of .* holds date32.*; expected numbers. Leave it out: --drop day"
    ):
        list(ParquetFile(path, ("day",)).blocks(2))


def test_empty_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"a": pa.array([], pa.float64())}), path)
    with pytest.raises(DataError, match=r"has no rows"):
        _ = ParquetFile(path, ("a",)).rows
    for content in (b"", b"PAR1 no table"):
        path.write_bytes(content)
        with pytest.raises(FileError, match=r"no parquet file, or damaged"):
            ParquetFile.names_in(path)


def test_a_damaged_page_is_refused(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(60) + content[64:])  # the first page; the list of columns is at the end
    assert ParquetFile.names_in(path) == tuple(COLUMNS)
    with pytest.raises(FileError, match=r"no parquet file, or damaged: "):
        list(ParquetFile(path, tuple(COLUMNS)).blocks(2))


def test_the_extra_is_named_where_it_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UnsupportedError, match=r"needs pyarrow; use pip install 'lapwing\[parquet\]'"):
        ParquetFile.names_in(path)
