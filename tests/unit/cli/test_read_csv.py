"""Tables in csv files, and their refusals with row and column."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lapwing.cli.data import CsvFile
from lapwing.errors import DataError, FileError

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
    with pytest.raises(FileError, match=r"no csv file in UTF-8"):
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
def test_a_number_that_is_not_finite_is_no_class(cell: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"a,b\n1,{cell}\n2,3\n")
    with pytest.raises(DataError, match=rf"row 1 \(line 2\), column 'b' is '{cell}'; expected a finite number"):
        _ = CsvFile(path, ("a", "b")).columns


def test_plain_numbers_in_all_their_spellings(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b\n 1,+.5\n-2 ,1.\n3e2,1.5E-3\n0x10,1\n".replace("0x10", "007"))
    columns = CsvFile(path, ("a", "b")).columns
    assert columns["a"].tolist() == [1, -2, 300, 7]  # type: ignore[union-attr]
    assert columns["b"].tolist() == [0.5, 1.0, 0.0015, 1.0]  # type: ignore[union-attr]
    assert CsvFile(written(tmp_path, "a\n0x10\n"), ("a",)).columns["a"] == ["0x10"]
