"""Tables in csv files. A file is read once and held in memory; larger tables belong in parquet or npz files."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.cli.sources import Block
from lapwing.errors import DataError, FileError

WHOLE = 2.0**53  # up to here float64 has every whole number
PLAIN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, eq=False)
class CsvFile:
    """Columns of a csv file whose first line has their names. The first row says which columns are text."""

    path: Path
    names: tuple[str, ...]
    has_columns: ClassVar[bool] = True

    @staticmethod
    def names_in(path: Path) -> tuple[str, ...]:
        header = next(_lines(path), (0, []))[1]
        if not header:
            raise FileError(f"{path} is empty; expected a line with the names of the columns, and rows below it.")
        if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
            raise FileError(f"the first line of {path} is {header[0]!r:.60}; expected columns separated by commas.")
        if all(_number(cell) is not None for cell in header):
            raise FileError(
                f"the first line of {path} has numbers, {', '.join(header[:3])}, ...; expected the names of the "
                "columns. Add a line with names."
            )
        names = tuple(name.strip() for name in header)
        twice = [name for name in names if names.count(name) > 1 or not name]
        if twice:
            raise FileError(f"{path} has the column {twice[0]!r} twice or without a name; expected different names.")
        return names

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))

    @cached_property
    def columns(self) -> dict[str, Tensor | list[str]]:
        """All rows of the chosen columns: whole numbers, other numbers or texts."""
        header = self.names_in(self.path)
        places = {name: header.index(name) for name in self.names}
        numbers: dict[str, array[float]] = {}
        texts: dict[str, list[str]] = {}
        for place, (line, cells) in enumerate(_lines(self.path)):
            if place == 0 or not cells:
                continue
            if len(cells) != len(header):
                raise DataError(f"{self.path}, line {line} has {len(cells)} cells; expected {len(header)}, as above.")
            if not numbers and not texts:
                for name, at in places.items():  # before a column of numbers is taken for one of texts
                    if _is_odd(cells[at]):
                        self._finite(cells[at], name, line, 1)
                numbers = {n: array("d") for n, at in places.items() if _number(cells[at]) is not None}
                texts = {n: [] for n in self.names if n not in numbers}
            for name, column in numbers.items():
                column.append(self._finite(cells[places[name]], name, line, len(column) + 1))
            for name, labels in texts.items():
                labels.append(cells[places[name]].strip())
                if not labels[-1]:
                    raise DataError(self._refusal(name, line, len(labels), "is empty; expected a value. Fill it in"))
        if not numbers and not texts:
            raise DataError(f"{self.path} has a header and no rows; expected at least one row.")
        return {name: _tensor(numbers[name]) if name in numbers else texts[name] for name in self.names}

    def _finite(self, cell: str, name: str, line: int, row: int) -> float:
        value = _number(cell)
        if value is None or not math.isfinite(value):
            odd = _is_odd(cell) and math.isfinite(float(cell))
            wanted = "number in plain digits, such as -1.5e3" if odd else "finite number"
            seen = f"is {cell.strip()!r:.40}" if cell.strip() else "is empty"
            raise DataError(self._refusal(name, line, row, f"{seen}; expected a {wanted}. Correct it"))
        return value

    def _refusal(self, name: str, line: int, row: int, what: str) -> str:
        return f"{self.path}, row {row} (line {line}), column {name!r} {what}, remove the row, or --drop the column."

    def blocks(self, size: int) -> Iterator[Block]:
        for start in range(0, self.rows, size):
            yield {name: column[start : start + size] for name, column in self.columns.items()}


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line and its cells."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            for cells in reader:
                yield reader.line_num, cells
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path} is no csv file in UTF-8: {error}. Save it as one.") from error


def _number(cell: str) -> float | None:
    """Return the number that a cell has in plain digits; None for anything else.

    >>> _number(" -1.5e3 "), _number("1_0"), _number("nan"), _number("0x10"), _number("１")
    (-1500.0, None, None, None, None)
    """
    text = cell.strip(" ")
    return float(text) if PLAIN.fullmatch(text) else None


def _is_odd(cell: str) -> bool:
    """Return whether a cell is a number to Python and none in plain digits, such as 1_0, nan and full-width digits."""
    try:
        float(cell)
    except ValueError:
        return False
    return _number(cell) is None


def _tensor(values: array[float]) -> Tensor:
    """Return the numbers as int64 if all are whole, otherwise as float64."""
    column = torch.frombuffer(values, dtype=torch.float64).clone()
    whole = bool(((column == column.round()) & (column.abs() < WHOLE)).all())
    return column.long() if whole else column
