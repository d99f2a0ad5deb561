"""Files of a command: csv, npz and parquet, read in blocks of rows, and written whole or not at all."""

from __future__ import annotations

import csv
import io
import math
import re
import zipfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lapwing.cli.models import list_names
from lapwing.errors import DataError, FileError, LapwingError, UnsupportedError
from lapwing.runtime.files import write_atomically

T = TypeVar("T")
Block = Mapping[str, Tensor | list[str]]  # by name: numbers, with the rows first, or the texts of a column


@dataclass(frozen=True, eq=False)
class DataFile:
    """Some columns or arrays of a file, chosen by name.

    ``has_columns`` says whether the file is a table, in which a row has one number in each column, or has arrays.
    """

    path: Path
    names: tuple[str, ...]
    has_columns: ClassVar[bool] = True

    @staticmethod
    def names_in(path: Path) -> tuple[str, ...]:
        """Return the names of all columns or arrays of a file; raise ``FileError`` if it cannot be read."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """The number of rows."""
        raise NotImplementedError

    def blocks(self, size: int) -> Iterator[Block]:
        """Yield the chosen columns in blocks of at most ``size`` rows, in order."""
        raise NotImplementedError


def optional(module: str, path: Path, install: str) -> ModuleType:
    """Return a module that some files need; raise with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UnsupportedError(f"{path} needs {module.split('.')[0]}; use pip install {install}.") from error


def quote_names(names: Sequence[str]) -> str:
    """Return the first names in quotes, and how many more there are."""
    return list_names(list(map(repr, names)), shown=20)


WHOLE = 2.0**53  # up to here float64 has every whole number
PLAIN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, eq=False)
class CsvFile(DataFile):
    """Columns of a csv file whose first line has their names. The first row says which columns are text."""

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
        raise FileError(f"{path} is not a csv file in UTF-8: {error}. Save it in this form.") from error


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


NPZ_REMEDY = "Save arrays of numbers by numpy.savez(path, x=..., y=...)."


@dataclass(frozen=True)
class Header:
    """The beginning of an array in the archive: its shape, dtype and order."""

    shape: tuple[int, ...]
    by_columns: bool  # Fortran's order
    dtype: Any


@dataclass(frozen=True, eq=False)
class NpzFile(DataFile):
    """Arrays of an npz file, with the rows first."""

    has_columns: ClassVar[bool] = False

    @staticmethod
    def names_in(path: Path) -> tuple[str, ...]:
        with open_npz(path) as archive:
            members = archive.namelist()
        names = tuple(member.removesuffix(".npy") for member in members if member.endswith(".npy"))
        if not names:
            raise FileError(f"{path} holds no arrays; expected inputs and targets. {NPZ_REMEDY}")
        return names

    @property
    def rows(self) -> int:
        return next(iter(self.headers.values())).shape[0]

    @cached_property
    def headers(self) -> dict[str, Header]:
        """The headers of the chosen arrays, which have the same number of rows."""
        headers = {}
        with open_npz(self.path) as archive:
            for name in self.names:
                with archive.open(f"{name}.npy") as member:
                    headers[name] = self._header(member, name)
        rows = {name: header.shape[0] for name, header in headers.items()}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{count} in {name!r}" for name, count in rows.items())
            raise DataError(f"{self.path} has different numbers of rows: {counts}; expected as many in each.")
        if not min(rows.values()):
            raise DataError(f"the arrays {quote_names(self.names)} of {self.path} have no rows; expected at least one.")
        return headers

    def _header(self, member: IO[bytes], name: str) -> Header:
        """Read the header of an array, and leave the member where its numbers begin."""
        formats = optional("numpy.lib.format", self.path, "numpy")
        readers = {(1, 0): formats.read_array_header_1_0, (2, 0): formats.read_array_header_2_0}
        header = Header(*readers[formats.read_magic(member)](member))
        if header.dtype.hasobject or header.dtype.kind not in "biufcUS":
            raise DataError(f"the array {name!r} of {self.path} holds {header.dtype}; expected numbers. {NPZ_REMEDY}")
        if not header.shape:
            raise DataError(f"the array {name!r} of {self.path} is a single number; expected a row for each datum.")
        return header

    def blocks(self, size: int) -> Iterator[Block]:
        with open_npz(self.path) as archive, ExitStack() as stack:
            members = {name: stack.enter_context(archive.open(f"{name}.npy")) for name in self.names}
            headers = {name: self._header(member, name) for name, member in members.items()}
            whole = {n: self._read(members[n], h, n, h.shape[0]) for n, h in headers.items() if h.by_columns}
            for start in range(0, self.rows, size):
                count = min(size, self.rows - start)
                yield {
                    name: whole[name][start : start + count]
                    if name in whole
                    else self._read(members[name], header, name, count)
                    for name, header in headers.items()
                }

    def _read(self, member: IO[bytes], header: Header, name: str, count: int) -> Tensor | list[str]:
        """Return the next rows of an array."""
        numpy = optional("numpy", self.path, "numpy")
        shape = (count, *header.shape[1:])
        wanted = header.dtype.itemsize * torch.Size(shape).numel()
        content = member.read(wanted)
        if len(content) < wanted:
            raise FileError(f"the array {name!r} of {self.path} ends before its last row. {NPZ_REMEDY}")
        values = numpy.frombuffer(bytearray(content), dtype=header.dtype)
        return tensor_of(values.reshape(shape[::-1]).T if header.by_columns else values.reshape(shape))


def open_npz(path: Path) -> AbstractContextManager[zipfile.ZipFile]:
    """Open the archive."""
    return opened(zipfile.ZipFile, path, "an npz file", NPZ_REMEDY)


@contextmanager
def opened(reader: Callable[[Path], AbstractContextManager[T]], path: Path, kind: str, remedy: str) -> Iterator[T]:
    """Open a file; whatever is raised while it is read, by its reader, zlib or NumPy, means that it is damaged."""
    try:
        with reader(path) as content:
            yield content
    except LapwingError:
        raise
    except Exception as error:
        raise FileError(f"{path} is not {kind}, or is damaged: {error}. {remedy}") from error


def tensor_of(values: Any) -> Tensor | list[str]:
    """Return a NumPy array as a tensor of a dtype that torch has, or its texts as a list."""
    if values.dtype.kind in "US":
        return [str(text) for text in values.astype(str).reshape(len(values), -1)[:, 0]]
    wide = {"u": "int64" if values.dtype.itemsize > 1 else "uint8", "f": "float64", "i": "int64"}
    kind = values.dtype.kind
    native = values.astype(wide[kind] if kind in "ui" or values.dtype.itemsize > 8 else values.dtype.newbyteorder("="))
    return torch.from_numpy(native.copy())


PARQUET = "'lapwing[parquet]'"


@dataclass(frozen=True, eq=False)
class ParquetFile(DataFile):
    """Columns of a parquet file."""

    @staticmethod
    def names_in(path: Path) -> tuple[str, ...]:
        with _open_parquet(path) as file:
            return tuple(file.schema_arrow.names)

    @property
    def rows(self) -> int:
        with _open_parquet(self.path) as file:
            if not file.metadata.num_rows:
                raise DataError(f"{self.path} has no rows; expected at least one.")
            return int(file.metadata.num_rows)

    def blocks(self, size: int) -> Iterator[Block]:
        row = 1
        with _open_parquet(self.path) as file:
            for batch in file.iter_batches(batch_size=size, columns=list(self.names)):
                yield {name: self._column(name, batch.column(name), row) for name in self.names}
                row += batch.num_rows

    def _column(self, name: str, column: Any, row: int) -> Tensor | list[str]:
        """Return a column of a block that begins at this row, from 1."""
        types = optional("pyarrow.types", self.path, PARQUET)
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if column.null_count:
            first = row + column.is_null().to_pylist().index(True)
            raise DataError(
                f"{self.path}, row {first}, column {name!r} is missing; expected a value. Fill it in, remove the row, "
                "or --drop the column."
            )
        if types.is_string(column.type) or types.is_large_string(column.type):
            return column.to_pylist()
        if not any(test(column.type) for test in (types.is_integer, types.is_floating, types.is_boolean)):
            raise DataError(
                f"the column {name!r} of {self.path} holds {column.type}; expected numbers. Leave it out: "
                f"--drop {name}."
            )
        optional("numpy", self.path, "numpy")
        return tensor_of(column.to_numpy(zero_copy_only=False))


def _open_parquet(path: Path) -> AbstractContextManager[Any]:
    """Open the file."""
    return opened(optional("pyarrow.parquet", path, PARQUET).ParquetFile, path, "a parquet file", "Write it again.")


READERS: dict[str, type[DataFile]] = {".npz": NpzFile, ".csv": CsvFile, ".parquet": ParquetFile}

Values = Tensor | list[object]  # numbers with the rows first, or a column of any values
ROWS = 4096  # of a csv file in one piece


def write_arrays(path: Path, arrays: Mapping[str, Values], classes: Sequence[str] = ()) -> list[str]:
    """Write arrays (N, ...) by name in the format of the suffix, and return the names of columns or arrays.

    Args:
        path: A .csv, .npz or .parquet file. The first and the last have a column for each output.
        arrays: The predictions; "class" has the numbers of classes.
        classes: The names of the classes, for names of columns and in place of numbers.
    """
    return WRITERS[path.suffix.lower()](path, arrays, tuple(classes))


def _write_npz(path: Path, arrays: Mapping[str, Values], classes: tuple[str, ...]) -> list[str]:
    numpy = optional("numpy", path, "numpy")
    content = {name: numpy.asarray(values) for name, values in arrays.items()}
    content |= {"classes": numpy.array(classes)} if classes else {}
    buffer = io.BytesIO()
    numpy.savez(buffer, **content)
    write_atomically(path, [buffer.getbuffer()])
    return list(content)


def _write_csv(path: Path, arrays: Mapping[str, Values], classes: tuple[str, ...]) -> list[str]:
    columns = columns_of(arrays, classes, path)
    write_atomically(path, _csv_pieces(columns))
    return list(columns)


def _csv_pieces(columns: Mapping[str, Values]) -> Iterator[bytes]:
    texts = [_texts(values) for values in columns.values()]
    for start in range(0, len(texts[0]), ROWS):
        piece = io.StringIO(newline="")
        writer = csv.writer(piece, lineterminator="\n")
        if not start:
            writer.writerow(columns)
        writer.writerows(zip(*(column[start : start + ROWS] for column in texts), strict=True))
        yield piece.getvalue().encode()


def _texts(values: Values) -> list[str]:
    """Return numbers with all their digits, as text."""
    if isinstance(values, list):
        return [str(value) for value in values]
    digits = 17 if values.dtype == torch.float64 else 9
    return [f"{value:.{digits}g}" if isinstance(value, float) else str(value) for value in values.tolist()]


def _write_parquet(path: Path, arrays: Mapping[str, Values], classes: tuple[str, ...]) -> list[str]:
    arrow, parquet = optional("pyarrow", path, PARQUET), optional("pyarrow.parquet", path, PARQUET)
    columns = columns_of(arrays, classes, path)
    content = {n: v if isinstance(v, list) else v.contiguous().numpy() for n, v in columns.items()}
    buffer = io.BytesIO()
    parquet.write_table(arrow.table(content), buffer)
    write_atomically(path, [buffer.getbuffer()])
    return list(columns)


def columns_of(arrays: Mapping[str, Values], classes: tuple[str, ...], path: Path) -> dict[str, Values]:
    """Return a column for each output; those of several outputs have the name of the class, or a number.

    Raises:
        UnsupportedError: If a row has more than one dimension, as of images and tokens.

    >>> arrays = {"class": torch.tensor([1]), "probability": torch.tensor([[0.2, 0.8]])}
    >>> list(columns_of(arrays, ("cat", "dog"), Path("out.csv")))
    ['class', 'probability_cat', 'probability_dog']
    """
    columns: dict[str, Values] = {}
    for name, values in arrays.items():
        if isinstance(values, list):
            columns[name] = values
            continue
        if values.ndim > 2:
            raise UnsupportedError(
                f"{name} has the shape {tuple(values.shape[1:])} for each input, and {path.suffix} files have columns; "
                "expected numbers in a row. Write an .npz file: --out predictions.npz."
            )
        if name == "class" and classes:
            columns[name] = [classes[number] for number in values.tolist()]
        elif values.ndim == 1:
            one_of_two = name == "probability" and len(classes) == 2
            columns[f"{name}_{classes[1]}" if one_of_two else name] = values
        else:
            ends = classes if name == "probability" and classes else range(values.shape[1])
            columns |= {f"{name}_{end}": values[:, at] for at, end in enumerate(ends)}
    return columns


WRITERS: Mapping[str, Callable[[Path, Mapping[str, Values], tuple[str, ...]], list[str]]] = {
    ".csv": _write_csv, ".npz": _write_npz, ".parquet": _write_parquet,
}  # fmt: skip
