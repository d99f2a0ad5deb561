"""Arrays in npz files, read row by row from the archive, so that no array is in memory as a whole."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import Tensor

from lapwing.cli.sources import Block, listed, optional
from lapwing.errors import DataError, FileError, LapwingError

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
