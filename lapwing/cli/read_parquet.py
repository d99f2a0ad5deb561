"""Tables in parquet files, read in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from lapwing.cli.read_npz import tensor_of
from lapwing.cli.sources import Block, optional
from lapwing.errors import DataError, FileError, LapwingError

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
