"""The contract of a file of data: chosen columns or arrays, read in blocks of rows, as often as they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from lapwing.errors import UnsupportedError

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
