"""The data of a command: tables in files, or a loader by its import path; which columns are inputs and targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.cli.files import READERS, Block, DataFile, quote_names
from lapwing.cli.models import call_factory, dtype_of, import_object, takes_indices
from lapwing.data.batches import TARGET_KEYS
from lapwing.errors import DataError, FileError, UnsupportedError
from lapwing.runtime.settings import describe, is_data, nearest

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

    def choose(self, names: Sequence[str], what: str, has_columns: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of inputs and targets among those of a file, ``what`` in messages; targets may be none.

        Raises:
            DataError: If a name does not exist, or it is not clear which are the inputs.

        >>> Roles(dropped=("id",)).choose(["id", "age", "size", "label"], "the file", has_columns=True)
        (('age', 'size'), ('label',))
        """
        for name in (*self.inputs, *self.targets, *self.dropped):
            if name not in names:
                raise DataError(f"{what} has no {name!r}; it has {quote_names(names)}.{nearest(name, names)}")
        targets = self.targets or _names_among(
            TARGET_KEYS, [n for n in names if n not in (*self.inputs, *self.dropped)]
        )
        if len(targets) > 1 and not self.targets:
            raise DataError(f"{what} has the targets {quote_names(targets)}; expected one. Say which: --target NAME.")
        rest = tuple(name for name in names if name not in (*targets, *self.dropped))
        inputs = self.inputs or (rest if has_columns or len(rest) == 1 else _names_among(INPUT_KEYS, rest))
        if not inputs or (not has_columns and len(inputs) > 1):
            raise DataError(
                f"{what} has {quote_names(rest) or 'nothing'} besides its targets; expected inputs, "
                f"{'one column or more' if has_columns else 'one array'}. Say which: --inputs NAME."
            )
        return inputs, targets


def _names_among(keys: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
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

    source: DataFile
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

    def describe(self) -> str:
        """Return what the table holds, in a line."""
        width = f"{len(self.inputs)} inputs" if self.source.has_columns else f"inputs {self.inputs[0]!r}"
        target = f", target {', '.join(self.targets)}" if self.targets else ""
        classes = ", ".join(f"{number} = {name}" for number, name in enumerate(self.classes)) if self.texts else ""
        return f"{self.source.path}: {self.rows} rows, {width}{target}{f' ({classes})' if classes else ''}"

    def _inputs(self, block: Block, row: int) -> Tensor:
        columns = self._columns(block, self.inputs, row, self.form.keeps_whole)
        return torch.stack(columns, 1) if self.source.has_columns else columns[0]

    def _targets(self, block: Block, row: int) -> Tensor:
        first = block[self.targets[0]]
        if len(self.targets) == 1 and isinstance(first, list):
            return self._class_numbers(first, row)
        columns = self._columns(block, self.targets, row, len(self.targets) == 1, self.form.labels)
        return columns[0] if len(columns) == 1 else torch.stack(columns, 1)

    def _columns(
        self, block: Block, names: tuple[str, ...], row: int, may_be_whole: bool, labels: bool = False
    ) -> list[Tensor]:
        """Return columns of numbers: as int64 if they may be whole and all are, by dtype or as labels by value."""
        columns = [self._numbers(block, name) for name in names]
        is_whole = lambda column: not column.is_floating_point() or (labels and bool((column == column.round()).all()))
        whole = may_be_whole and all(map(is_whole, columns))
        columns = [column.long() if whole else column.to(self.form.dtype) for column in columns]
        for name, column in zip(names, columns, strict=True):
            self._refuse_not_finite(column, name, row)
        return columns

    def _numbers(self, block: Block, name: str) -> Tensor:
        column = block[name]
        if isinstance(column, list):
            raise DataError(
                f"the column {name!r} of {self.source.path} is text, {column[0]!r:.40} in its first row; expected "
                f"numbers. Leave it out (--drop {name!r}), or write it as numbers."
            )
        return column

    def _class_numbers(self, texts: list[str], row: int) -> Tensor:
        numbers = {name: number for number, name in enumerate(self.classes)}
        for at, text in enumerate(texts):
            if text not in numbers:
                raise DataError(
                    f"{self.source.path}, row {row + at}, {self.targets[0]!r} is {text!r}; expected one of "
                    f"{quote_names(self.classes)}. Check --classes.{nearest(text, self.classes)}"
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


PROBED = 2  # rows on which the network is tried


@dataclass(frozen=True, eq=False)
class Given:
    """Data as batches, with what is known of them: ``rows`` where they can be counted, and the names of classes."""

    batches: Iterable[object]
    described: str
    rows: int | None = None
    classes: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, object]:
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
        if path.suffix.lower() in READERS:
            return self._table(path, option)
        if ":" not in given:
            raise UnsupportedError(
                f"{option} is {given!r}; expected a file ({', '.join(READERS)}), or the import path of a loader "
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

    def columns(self, given: str, names: tuple[str, ...]) -> dict[str, list[object]]:
        """Return whole columns of a table, as they are in its file.

        Raises:
            DataError: If the data are not a table, or it lacks one of the columns.
        """
        path = Path(given)
        kind = READERS.get(path.suffix.lower())
        if kind is None or not kind.has_columns:
            raise DataError(f"{given} has no columns to keep; expected a .csv or .parquet file. Leave out --keep.")
        whole: dict[str, list[object]] = {name: [] for name in names}
        for block in kind(path, names).blocks(self.size):
            for name, column in whole.items():
                part = block[name]
                column.extend(part.tolist() if isinstance(part, Tensor) else part)
        return whole

    def _table(self, path: Path, option: str) -> Given:
        if not path.is_file():
            raise FileError(f"there is no file {path}; expected data. Check {option}.")
        kind = READERS[path.suffix.lower()]
        names = kind.names_in(path)
        inputs, targets = self.roles.beside(self.known, names).choose(names, str(path), kind.has_columns)
        if self.labelled and not targets:
            raise DataError(f"{path} has {quote_names(inputs)} and no target; expected one. Say which: --target NAME.")
        targets = targets if self.labelled else ()
        form = Form(self.size, dtype_of(self.model), takes_indices(self.model), self.labels)
        table = Table(kind(path, (*inputs, *targets)), inputs, targets, form, self.classes)
        self._refuse_unfit(table)
        return Given(table, table.describe(), table.rows, table.classes)

    def _refuse_unfit(self, table: Table) -> None:
        """Raise unless the network takes the first rows, and has an output for each class that is a text."""
        first = table._inputs(next(table.source.blocks(PROBED)), 1)
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        try:
            with torch.no_grad():
                outputs = self.model(first.to(device))
        except Exception as error:
            raise DataError(
                f"the network does not take the inputs of {table.source.path}, {quote_names(table.inputs)} of shape "
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
                f"the target {table.targets[0]!r} of {table.source.path} has the classes {quote_names(table.classes)}, "
                f"and the network {count} outputs; expected a class for each. Name all in the order of the outputs: "
                "--classes A,B,C."
            )

    def _loader(self, path: str, option: str) -> Given:
        found = import_object(path, option)
        made: Any = found if is_data(found) or not callable(found) else call_factory(found, path, option)
        if not is_data(made):
            raise UnsupportedError(
                f"{option} is {path!r}, which gives {describe(made)}; expected a DataLoader, a Dataset or a list of "
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
