"""The data of a command: a file, or a loader of the user by its import path."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.cli.imports import called, imported
from lapwing.cli.models import dtype_of, takes_indices
from lapwing.cli.read_csv import CsvFile
from lapwing.cli.read_npz import NpzFile
from lapwing.cli.read_parquet import ParquetFile
from lapwing.cli.sources import Source, listed
from lapwing.cli.tables import Form, Roles, Table
from lapwing.core.settings import is_data, seen
from lapwing.errors import DataError, FileError, UnsupportedError

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
