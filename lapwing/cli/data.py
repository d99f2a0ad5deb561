"""The data of a command: csv, npz and parquet files read in blocks of rows, or a loader by its import path."""

from __future__ import annotations

import csv
import math
import re
import zipfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from lapwing.cli.models import called, dtype_of, imported, takes_indices
from lapwing.data.samples import TARGET_KEYS
from lapwing.errors import DataError, FileError, LapwingError, UnsupportedError
from lapwing.runtime.settings import is_data, nearest, seen

Block = Mapping[str, Tensor | list[str]]  # by name: numbers, with the rows first, or the texts of a column


class Source(Protocol):
    """Some columns or arrays of a file, chosen by name.

    ``has_columns`` says whether the file is a table, in which a row has one number in each column, or has arrays.
    """

    has_columns: ClassVar[bool]

    def __init__(self, path: Path, names: tuple[str, ...]) -> None: ...

    @staticmethod
    def names_in(path: Path) -> tuple[str, ...]:
        """Return the names of all columns or arrays of a file; raise ``FileError`` if it cannot be read."""
        ...

    @property
    def path(self) -> Path: ...

    @property
    def rows(self) -> int:
        """The number of rows."""
        ...

    def blocks(self, size: int) -> Iterator[Block]:
        """Yield the chosen columns in blocks of at most ``size`` rows, in order."""
        ...


def optional(module: str, path: Path, install: str) -> Any:
    """Return a module that some files need; raise with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UnsupportedError(f"{path} needs {module.split('.')[0]}; use pip install {install}.") from error


def listed(names: Sequence[str], shown: int = 20) -> str:
    """Return the first names and how many more there are.

    >>> listed(["a", "b", "c"], shown=2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + more


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


REMEDY = "Save arrays of numbers by numpy.savez(path, x=..., y=...)."


@dataclass(frozen=True)
class Header:
    """The beginning of an array in the archive: its shape, dtype and order."""

    shape: tuple[int, ...]
    by_columns: bool  # Fortran's order
    dtype: Any


@dataclass(frozen=True, eq=False)
class NpzFile:
    """Arrays of an npz file, with the rows first."""

    path: Path
    names: tuple[str, ...]
    has_columns: ClassVar[bool] = False

    @staticmethod
    def names_in(path: Path) -> tuple[str, ...]:
        with opened(path) as archive:
            members = archive.namelist()
        names = tuple(member.removesuffix(".npy") for member in members if member.endswith(".npy"))
        if not names:
            raise FileError(f"{path} holds no arrays; expected inputs and targets. {REMEDY}")
        return names

    @property
    def rows(self) -> int:
        return next(iter(self.headers.values())).shape[0]

    @cached_property
    def headers(self) -> dict[str, Header]:
        """The headers of the chosen arrays, which have the same number of rows."""
        headers = {}
        with opened(self.path) as archive:
            for name in self.names:
                with archive.open(f"{name}.npy") as member:
                    headers[name] = self._header(member, name)
        rows = {name: header.shape[0] for name, header in headers.items()}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{count} in {name!r}" for name, count in rows.items())
            raise DataError(f"{self.path} has different numbers of rows: {counts}; expected as many in each.")
        if not min(rows.values()):
            raise DataError(f"the arrays {listed(self.names)} of {self.path} have no rows; expected at least one.")
        return headers

    def _header(self, member: IO[bytes], name: str) -> Header:
        """Read the header of an array, and leave the member where its numbers begin."""
        formats = optional("numpy.lib.format", self.path, "numpy")
        readers = {(1, 0): formats.read_array_header_1_0, (2, 0): formats.read_array_header_2_0}
        header = Header(*readers[formats.read_magic(member)](member))
        if header.dtype.hasobject or header.dtype.kind not in "biufcUS":
            raise DataError(f"the array {name!r} of {self.path} holds {header.dtype}; expected numbers. {REMEDY}")
        if not header.shape:
            raise DataError(f"the array {name!r} of {self.path} is a single number; expected a row for each datum.")
        return header

    def blocks(self, size: int) -> Iterator[Block]:
        with opened(self.path) as archive, ExitStack() as stack:
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
            raise FileError(f"the array {name!r} of {self.path} ends before its last row. {REMEDY}")
        values = numpy.frombuffer(bytearray(content), dtype=header.dtype)
        return tensor_of(values.reshape(shape[::-1]).T if header.by_columns else values.reshape(shape))


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the archive; whatever its parts raise while it is read means that it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except LapwingError:
        raise
    except Exception as error:  # of zipfile, of zlib, or of NumPy's headers
        raise FileError(f"{path} is no npz file, or damaged: {error}. {REMEDY}") from error


def tensor_of(values: Any) -> Tensor | list[str]:
    """Return a NumPy array as a tensor of a dtype that torch has, or its texts as a list."""
    if values.dtype.kind in "US":
        return [str(text) for text in values.astype(str).reshape(len(values), -1)[:, 0]]
    wide = {"u": "int64" if values.dtype.itemsize > 1 else "uint8", "f": "float64", "i": "int64"}
    kind = values.dtype.kind
    native = values.astype(wide[kind] if kind in "ui" or values.dtype.itemsize > 8 else values.dtype.newbyteorder("="))
    return torch.from_numpy(native.copy())


EXTRA = "'lapwing[parquet]'"


@dataclass(frozen=True, eq=False)
class ParquetFile:
    """Columns of a parquet file."""

    path: Path
    names: tuple[str, ...]
    has_columns: ClassVar[bool] = True

    @staticmethod
    def names_in(path: Path) -> tuple[str, ...]:
        with _opened(path) as file:
            return tuple(file.schema_arrow.names)

    @property
    def rows(self) -> int:
        with _opened(self.path) as file:
            if not file.metadata.num_rows:
                raise DataError(f"{self.path} has no rows; expected at least one.")
            return int(file.metadata.num_rows)

    def blocks(self, size: int) -> Iterator[Block]:
        row = 1
        with _opened(self.path) as file:
            for batch in file.iter_batches(batch_size=size, columns=list(self.names)):
                yield {name: self._column(name, batch.column(name), row) for name in self.names}
                row += batch.num_rows

    def _column(self, name: str, column: Any, row: int) -> Tensor | list[str]:
        """Return a column of a block that begins at this row, from 1."""
        types = optional("pyarrow.types", self.path, EXTRA)
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if column.null_count:
            first = row + column.is_null().to_pylist().index(True)
            raise DataError(
                f"{self.path}, row {first}, column {name!r} is missing; expected a value. Fill it in, remove the row, "
                "or --drop the column."
            )
        if types.is_string(column.type) or types.is_large_string(column.type):
            texts: list[str] = column.to_pylist()
            return texts
        if not any(test(column.type) for test in (types.is_integer, types.is_floating, types.is_boolean)):
            raise DataError(
                f"the column {name!r} of {self.path} holds {column.type}; expected numbers. Leave it out: "
                f"--drop {name}."
            )
        optional("numpy", self.path, "numpy")
        return tensor_of(column.to_numpy(zero_copy_only=False))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open the file; whatever is raised while it is read means that it is damaged."""
    parquet = optional("pyarrow.parquet", path, EXTRA)
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except LapwingError:
        raise
    except Exception as error:  # pyarrow has errors of its own
        raise FileError(f"{path} is no parquet file, or damaged: {error}. Write it again.") from error


INPUT_KEYS = ("x", "inputs", "input", "features", "data")  # of arrays, in any case


@dataclass(frozen=True)
class Roles:
    """The names that a user gave for the parts of a table; empty where they are found by themselves."""

    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # the texts of the target, in the order of the network's outputs

    def beside(self, known: Roles, names: Sequence[str]) -> Roles:
        """Return these roles with those of ``known`` that a file with these names has, where these say nothing.

        >>> Roles(dropped=("id",)).beside(Roles(targets=("price",), dropped=("date",)), ["id", "date", "size"])
        Roles(inputs=(), targets=(), dropped=('id', 'date'), classes=())
        """
        present = lambda given: tuple(name for name in given if name in names)
        inputs = self.inputs or (known.inputs if present(known.inputs) else ())
        targets = self.targets or present(known.targets)
        return Roles(inputs, targets, (*self.dropped, *present(known.dropped)), self.classes or known.classes)

    def chosen(self, names: Sequence[str], what: str, has_columns: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of inputs and targets among those of a file, ``what`` in messages; targets may be none.

        Raises:
            DataError: If a name does not exist, or it is not clear which are the inputs.

        >>> Roles(dropped=("id",)).chosen(["id", "age", "size", "label"], "the file", has_columns=True)
        (('age', 'size'), ('label',))
        """
        for name in (*self.inputs, *self.targets, *self.dropped):
            if name not in names:
                raise DataError(f"{what} has no {name!r}; it has {listed(names)}.{nearest(name, names)}")
        targets = self.targets or _found(TARGET_KEYS, [n for n in names if n not in (*self.inputs, *self.dropped)])
        if len(targets) > 1 and not self.targets:
            raise DataError(f"{what} has the targets {listed(targets)}; expected one. Say which: --target NAME.")
        rest = tuple(name for name in names if name not in (*targets, *self.dropped))
        inputs = self.inputs or (rest if has_columns or len(rest) == 1 else _found(INPUT_KEYS, rest))
        if not inputs or (not has_columns and len(inputs) > 1):
            raise DataError(
                f"{what} has {listed(rest) or 'nothing'} besides its targets; expected inputs, "
                f"{'one column or more' if has_columns else 'one array'}. Say which: --inputs NAME."
            )
        return inputs, targets


def _found(keys: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.lower() in keys)


@dataclass(frozen=True)
class Form:
    """The form of the batches: their size, and the dtype of numbers.

    Whole inputs may stay whole, as indices. Where targets are labels, those that are whole become int64.
    """

    size: int
    dtype: torch.dtype
    keeps_whole: bool = False
    labels: bool = False


@dataclass(frozen=True, eq=False)
class Table:
    """Batches of a file: ``(inputs, targets)``, or inputs where there are no targets. It can be read many times."""

    source: Source
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    form: Form
    given_classes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        row = 1
        for block in self.source.blocks(self.form.size):
            inputs = self._inputs(block, row)
            yield (inputs, self._targets(block, row)) if self.targets else inputs
            row += len(inputs)

    def __len__(self) -> int:
        return -(-self.rows // self.form.size)

    def first_inputs(self, rows: int) -> Tensor:
        """Return the inputs of the first rows."""
        return self._inputs(next(self.source.blocks(rows)), 1)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.source.rows

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The texts of a target that is text, sorted; nothing if targets are numbers."""
        found: set[str] = set()
        for block in self.source.blocks(self.form.size) if len(self.targets) == 1 else ():
            labels = block[self.targets[0]]
            if isinstance(labels, Tensor):
                return ()
            found.update(labels)
        return tuple(sorted(found))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in the order of their numbers; nothing if they have none."""
        return self.given_classes or self.texts

    def described(self) -> str:
        """Return what the table holds, in a line."""
        width = f"{len(self.inputs)} inputs" if self.source.has_columns else f"inputs {self.inputs[0]!r}"
        target = f", target {', '.join(self.targets)}" if self.targets else ""
        classes = ", ".join(f"{number} = {name}" for number, name in enumerate(self.classes)) if self.texts else ""
        return f"{self.source.path}: {self.rows} rows, {width}{target}{f' ({classes})' if classes else ''}"

    def _inputs(self, block: Block, row: int) -> Tensor:
        columns = [self._numbers(block, name) for name in self.inputs]
        whole = self.form.keeps_whole and not any(column.is_floating_point() for column in columns)
        columns = [column.long() if whole else column.to(self.form.dtype) for column in columns]
        for name, column in zip(self.inputs, columns, strict=True):
            self._refuse_not_finite(column, name, row)
        return torch.stack(columns, 1) if self.source.has_columns else columns[0]

    def _targets(self, block: Block, row: int) -> Tensor:
        first = block[self.targets[0]]
        if len(self.targets) == 1 and isinstance(first, list):
            return self._numbered(first, row)
        columns = [self._numbers(block, name) for name in self.targets]
        whole = len(columns) == 1 and self._is_whole(columns[0])
        columns = [column.long() if whole else column.to(self.form.dtype) for column in columns]
        for name, column in zip(self.targets, columns, strict=True):
            self._refuse_not_finite(column, name, row)
        return columns[0] if len(columns) == 1 else torch.stack(columns, 1)

    def _is_whole(self, column: Tensor) -> bool:
        """Return whether a target is given as int64: its dtype is whole, or its values are and are labels."""
        if not column.is_floating_point():
            return True
        return self.form.labels and bool((column == column.round()).all())

    def _numbers(self, block: Block, name: str) -> Tensor:
        column = block[name]
        if isinstance(column, list):
            raise DataError(
                f"the column {name!r} of {self.source.path} is text, {column[0]!r:.40} in its first row; expected "
                f"numbers. Leave it out (--drop {name!r}), or write it as numbers."
            )
        return column

    def _numbered(self, texts: list[str], row: int) -> Tensor:
        numbers = {name: number for number, name in enumerate(self.classes)}
        for at, text in enumerate(texts):
            if text not in numbers:
                raise DataError(
                    f"{self.source.path}, row {row + at}, {self.targets[0]!r} is {text!r}; expected one of "
                    f"{listed(self.classes)}. Check --classes.{nearest(text, self.classes)}"
                )
        return torch.tensor([numbers[text] for text in texts])

    def _refuse_not_finite(self, column: Tensor, name: str, row: int) -> None:
        bad = ~torch.isfinite(column.reshape(len(column), -1)).all(1)
        if bool(bad.any()):
            first = int(bad.nonzero()[0, 0])
            raise DataError(
                f"{self.source.path}, row {row + first}, {name!r} is NaN or infinite in {column.dtype}; expected "
                "finite numbers. Fill the gap, or remove the row."
            )


FORMATS: dict[str, type[Source]] = {".npz": NpzFile, ".csv": CsvFile, ".parquet": ParquetFile}
PROBED = 2  # rows on which the network is tried


@dataclass(frozen=True, eq=False)
class Given:
    """Data as batches, with what is known of them: ``rows`` where they can be counted, and the names of classes."""

    batches: Iterable[Any]
    described: str
    rows: int | None = None
    classes: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"described": self.described, "rows": self.rows, "classes": list(self.classes) or None}


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads data for one model.

    Args:
        model: The network.
        roles: The names of inputs and targets that the user gave.
        size: The number of rows of a batch.
        labelled: Whether targets are needed; otherwise those of a file are left out.
        labels: Whether targets are classes, so that they may be texts.
        known: The names that the posterior was fitted with. They count where the user gave none and the data have them.
    """

    model: nn.Module
    roles: Roles
    size: int = 256
    labelled: bool = True
    labels: bool = True
    known: Roles = Roles()

    def read(self, given: str, option: str = "--data") -> Given:
        """Return the data in a file, or those of the loader at an import path.

        Raises:
            FileError: If there is no such file, or it cannot be read.
            DataError: If it does not hold numbers that the network takes, or no targets where they are needed.
            UnsupportedError: If it is neither a file of a known kind nor an import path.
        """
        path = Path(given)
        if path.suffix.lower() in FORMATS:
            return self._table(path, option)
        if ":" not in given:
            raise UnsupportedError(
                f"{option} is {given!r}; expected a file ({', '.join(FORMATS)}), or the import path of a loader "
                "such as package.module:make_loader."
            )
        return self._loader(given, option)

    def beside(self, data: Given) -> Reader:
        """Return the reader of other data with the classes of these, so that equal texts have equal numbers."""
        return replace(self, roles=replace(self.roles, classes=data.classes))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes that were given, now or for the fit."""
        return self.roles.classes or self.known.classes

    def columns(self, given: str, names: tuple[str, ...]) -> dict[str, list[Any]]:
        """Return whole columns of a table, as they are in its file.

        Raises:
            DataError: If the data are no table, or it has no such column.
        """
        path = Path(given)
        kind = FORMATS.get(path.suffix.lower())
        if kind is None or not kind.has_columns:
            raise DataError(f"{given} has no columns to keep; expected a .csv or .parquet file. Leave out --keep.")
        whole: dict[str, list[Any]] = {name: [] for name in names}
        for block in kind(path, names).blocks(self.size):
            for name, column in whole.items():
                part = block[name]
                column.extend(part.tolist() if isinstance(part, Tensor) else part)
        return whole

    def _table(self, path: Path, option: str) -> Given:
        if not path.is_file():
            raise FileError(f"there is no file {path}; expected data. Check {option}.")
        kind = FORMATS[path.suffix.lower()]
        names = kind.names_in(path)
        inputs, targets = self.roles.beside(self.known, names).chosen(names, str(path), kind.has_columns)
        if self.labelled and not targets:
            raise DataError(f"{path} has {listed(inputs)} and no target; expected one. Say which: --target NAME.")
        targets = targets if self.labelled else ()
        form = Form(self.size, dtype_of(self.model), takes_indices(self.model), self.labels)
        table = Table(kind(path, (*inputs, *targets)), inputs, targets, form, self.classes)
        self._refuse_unfit(table)
        return Given(table, table.described(), table.rows, table.classes)

    def _refuse_unfit(self, table: Table) -> None:
        """Raise unless the network takes the first rows, and has an output for each class that is a text."""
        first = table.first_inputs(PROBED)
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        try:
            with torch.no_grad():
                outputs = self.model(first.to(device))
        except Exception as error:
            raise DataError(
                f"the network does not take the inputs of {table.source.path}, {listed(table.inputs)} of shape "
                f"{tuple(first.shape[1:])}: {type(error).__name__}: {error}. Choose them by --inputs or --drop."
            ) from error
        if not table.texts:
            return
        if not self.labels:
            raise DataError(
                f"the target {table.targets[0]!r} of {table.source.path} is text, {table.texts[0]!r:.40}; expected "
                "numbers, since the likelihood is not one of classes. Check --target and --likelihood."
            )
        count = outputs.shape[-1] if isinstance(outputs, Tensor) else len(table.classes)
        if len(table.classes) != (2 if count == 1 else count):
            raise DataError(
                f"the target {table.targets[0]!r} of {table.source.path} has the classes {listed(table.classes)}, and "
                f"the network {count} outputs; expected a class for each. Name all in the order of the outputs: "
                "--classes A,B,C."
            )

    def _loader(self, path: str, option: str) -> Given:
        found = imported(path, option)
        made = found if is_data(found) or not callable(found) else called(found, path, option)
        if not is_data(made):
            raise UnsupportedError(
                f"{option} is {path!r}, which gives {seen(made)}; expected a DataLoader, a Dataset or a list of "
                "(inputs, targets) batches, or a function without arguments that returns one."
            )
        rows = _count(made)
        return Given(made, path if rows is None else f"{path}: {rows} rows", rows, self.classes)


def _count(loader: Any) -> int | None:
    """Return the number of data of a loader, if its data set knows it."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None
