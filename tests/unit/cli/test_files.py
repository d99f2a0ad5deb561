"""Files of a command: csv, npz and parquet, read and written."""

from __future__ import annotations

import csv
import datetime
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lapwing.cli.files import CsvFile, NpzFile, ParquetFile, write_arrays
from lapwing.errors import DataError, FileError, UnsupportedError

# Tables in csv files, and their refusals with row and column.

GOOD = "a,b,kind\n1,0.5,cat\n2,-1e-3,dog\n\n3,2,cat\n"


def written(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "table.csv"
    path.write_text(text, encoding=encoding)
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_columns_are_whole_numbers_numbers_or_text(tmp_path: Path, encoding: str) -> None:
    path = written(tmp_path, GOOD, encoding)
    assert CsvFile.names_in(path) == ("a", "b", "kind")
    table = CsvFile(path, ("b", "kind", "a"))
    assert table.rows == 3
    assert table.columns["kind"] == ["cat", "dog", "cat"]
    torch.testing.assert_close(table.columns["b"], torch.tensor([0.5, -1e-3, 2], dtype=torch.float64), rtol=0, atol=0)
    assert torch.equal(table.columns["a"], torch.tensor([1, 2, 3]))
    assert table.columns["a"].dtype == torch.int64


def test_blocks_hold_all_rows_in_order(tmp_path: Path) -> None:
    table = CsvFile(written(tmp_path, GOOD), ("a", "kind"))
    assert [len(block["kind"]) for block in table.blocks(2)] == [2, 1]
    for _ in range(2):
        assert torch.cat([block["a"] for block in table.blocks(2)]).tolist() == [1, 2, 3]


def test_numbers_that_float64_does_not_hold_stay_numbers(tmp_path: Path) -> None:
    assert CsvFile(written(tmp_path, "a\n1e300\n2\n"), ("a",)).columns["a"].dtype == torch.float64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; expected a line with the names"),
        ("1,2,3\n4,5,6\n", "has numbers, 1, 2, 3, ...; expected the names of the columns"),
        ("a;b;c\n1;2;3\n", "is 'a;b;c'; expected columns separated by commas"),
        ("a,b,a\n1,2,3\n", "has the column 'a' twice or without a name"),
        ("a,,b\n1,2,3\n", "has the column '' twice or without a name"),
    ],
)
def test_a_file_without_a_header_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"table.csv") as refused:
        CsvFile.names_in(written(tmp_path, text))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "has a header and no rows; expected at least one row."),
        ("a,b\n1,2\n3\n", "line 3 has 1 cells; expected 2, as above."),
        ("a,b\n1,2\n3,4,5\n", "line 3 has 3 cells; expected 2, as above."),
        ("a,b\n1,2\n\n3,four\n", "row 2 (line 4), column 'b' is 'four'; expected a finite number."),
        ("a,b\n1,2\n,4\n", "row 2 (line 3), column 'a' is empty; expected a finite number."),
        ("a,b\n1,2\nnan,4\n", "row 2 (line 3), column 'a' is 'nan'; expected a finite number."),
        ("a,b\n1,2\n3,-inf\n", "row 2 (line 3), column 'b' is '-inf'; expected a finite number."),
        ("a,b\n1,cat\n3, \n", "row 2 (line 3), column 'b' is empty; expected a value."),
    ],
)
def test_the_first_bad_row_and_column_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"table.csv") as refused:
        _ = CsvFile(written(tmp_path, text), ("a", "b")).columns
    assert message in str(refused.value)


def test_only_the_chosen_columns_are_read(tmp_path: Path) -> None:
    table = CsvFile(written(tmp_path, "a,b\n1,2\n3,four\n"), ("a",))
    assert table.columns["a"].tolist() == [1, 3]


def test_another_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"not a csv file in UTF-8"):
        CsvFile.names_in(written(tmp_path, "größe,b\n1,2\n", "latin-1"))


@pytest.mark.parametrize("cell", ["1_0", "１０", "1e1_0"])
@pytest.mark.parametrize("row", [1, 2])
def test_numbers_are_plain_digits(cell: str, row: int, tmp_path: Path) -> None:
    """What Python alone takes for a number is neither a number nor a class."""
    rows = ["3,4", "5,6"]
    rows.insert(row - 1, f"2,{cell}")
    path = written(tmp_path, "a,b\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r"table\.csv") as refused:
        _ = CsvFile(path, ("a", "b")).columns
    assert f"row {row} (line {row + 1}), column 'b' is {cell!r}; expected a number in plain digits" in str(
        refused.value
    )


@pytest.mark.parametrize("cell", ["nan", "Infinity", "-inf", "1e999"])
def test_a_number_that_is_not_finite_is_not_a_class(cell: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"a,b\n1,{cell}\n2,3\n")
    with pytest.raises(DataError, match=rf"row 1 \(line 2\), column 'b' is '{cell}'; expected a finite number"):
        _ = CsvFile(path, ("a", "b")).columns


def test_plain_numbers_in_all_their_spellings(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b\n 1,+.5\n-2 ,1.\n3e2,1.5E-3\n0x10,1\n".replace("0x10", "007"))
    columns = CsvFile(path, ("a", "b")).columns
    assert columns["a"].tolist() == [1, -2, 300, 7]  # type: ignore[union-attr]
    assert columns["b"].tolist() == [0.5, 1.0, 0.0015, 1.0]  # type: ignore[union-attr]
    assert CsvFile(written(tmp_path, "a\n0x10\n"), ("a",)).columns["a"] == ["0x10"]


# Arrays in npz files, against NumPy's own reader.

ARRAYS = {
    "x": np.arange(70, dtype=np.float32).reshape(7, 2, 5),
    "columns": np.asfortranarray(np.arange(21, dtype=np.float64).reshape(7, 3)),
    "big": np.arange(7, dtype=">f8"),
    "y": np.arange(7, dtype=np.uint16),
    "pixels": np.arange(7, dtype=np.uint8),
    "flags": np.arange(7) % 2 == 0,
    "long": np.arange(7, dtype=np.longdouble),
    "half": np.arange(7, dtype=np.float16),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_blocks_are_the_rows_that_numpy_reads(save: object, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    save(path, **ARRAYS, kind=np.array(list("aabbcab")))
    assert set(NpzFile.names_in(path)) == {*ARRAYS, "kind"}
    file = NpzFile(path, (*ARRAYS, "kind"))
    assert file.rows == 7
    for _ in range(2):
        blocks = list(file.blocks(3))
        assert [len(block["x"]) for block in blocks] == [3, 3, 1]
        assert [kind for block in blocks for kind in block["kind"]] == list("aabbcab")
        for name, values in ARRAYS.items():
            joined = torch.cat([block[name] for block in blocks])
            assert joined.shape == values.shape
            np.testing.assert_array_equal(joined.numpy(), values)
    assert blocks[0]["y"].dtype == torch.int64
    assert blocks[0]["long"].dtype == torch.float64


def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    """Of rows that are read one by one, the archive is read no further than the rows."""
    import zipfile

    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((4000, 50)))
    read = []
    whole = zipfile.ZipExtFile.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zipfile.ZipExtFile, "read", lambda self, n=-1: read.append(n) or whole(self, n))
        next(NpzFile(path, ("x",)).blocks(10))
    assert max(read) == 10 * 50 * 8
    assert min(read) > 0


def test_python_objects_are_refused_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.array([{"a": 1}, None], dtype=object))
    with pytest.raises(DataError, match=r"the array 'x' of .* holds object; expected numbers"):
        _ = NpzFile(path, ("x",)).headers


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, "different numbers of rows: 3 in 'x', 4 in 'y'"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "have no rows"),
        ({"x": np.zeros((3, 2)), "y": np.array(1.0)}, "'y' of .* is a single number"),
        ({"x": np.zeros(3, dtype="datetime64[s]"), "y": np.zeros(3)}, "'x' of .* holds datetime64"),
    ],
)
def test_arrays_without_numbers_are_refused_as_data(
    arrays: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=message):
        _ = NpzFile(path, ("x", "y")).headers


def test_other_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.arange(4000.0))
    content = path.read_bytes()
    for bad in (b"", b"no archive", content[:200], content[:-40]):
        path.write_bytes(bad)
        with pytest.raises(FileError, match=r"numpy.savez"):
            NpzFile.names_in(path)
    path.write_bytes(content[:2000] + bytes(500) + content[2500:])  # the checksum of the archive no longer holds
    with pytest.raises(FileError, match=r"data.npz is not an npz file, or is damaged: Bad CRC-32 for file 'x.npy'"):
        list(NpzFile(path, ("x",)).blocks(5000))
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(FileError, match=r"holds no arrays"):
        NpzFile.names_in(path)


# Tables in parquet files.

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


def test_columns_without_numbers_are_refused(tmp_path: Path) -> None:
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
        with pytest.raises(FileError, match=r"not a parquet file, or is damaged"):
            ParquetFile.names_in(path)


def test_a_damaged_page_is_refused(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(60) + content[64:])  # the first page; the list of columns is at the end
    assert ParquetFile.names_in(path) == tuple(COLUMNS)
    with pytest.raises(FileError, match=r"not a parquet file, or is damaged: "):
        list(ParquetFile(path, tuple(COLUMNS)).blocks(2))


def test_the_extra_is_named_where_it_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UnsupportedError, match=r"needs pyarrow; use pip install 'lapwing\[parquet\]'"):
        ParquetFile.names_in(path)


# Files of predictions.


def test_csv_keeps_every_digit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    arrays = {
        "single": torch.randn(5000, generator=generator),
        "double": torch.randn(5000, 2, dtype=torch.float64, generator=generator),
        "whole": torch.arange(5000),
    }
    assert write_arrays(tmp_path / "p.csv", arrays) == ["single", "double_0", "double_1", "whole"]
    with (tmp_path / "p.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    values = [[float(row[at]) for row in rows] for at in range(len(header))]
    assert torch.equal(torch.tensor(values[0], dtype=torch.float32), arrays["single"])
    assert torch.equal(torch.tensor(values[1:3], dtype=torch.float64).T, arrays["double"])
    assert values[3] == list(range(5000))


def test_images_go_to_npz_alone(tmp_path: Path) -> None:
    arrays = {"probability": torch.zeros(2, 3, 4, 5)}
    with pytest.raises(UnsupportedError, match=r"shape \(3, 4, 5\) for each input, and .csv files have columns"):
        write_arrays(tmp_path / "p.csv", arrays)
    assert write_arrays(tmp_path / "p.npz", arrays) == ["probability"]


def test_the_extra_is_named_where_parquet_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=r"needs pyarrow; use pip install 'lapwing\[parquet\]'"):
        write_arrays(tmp_path / "p.parquet", {"mean": torch.zeros(3)})
