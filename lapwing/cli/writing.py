"""Files of predictions: csv, npz and parquet, written whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapwing.cli.data import optional
from lapwing.errors import UnsupportedError
from lapwing.runtime.files import write_atomically

Values = Tensor | list[Any]  # numbers with the rows first, or a column of any values
ROWS = 4096  # of a csv file in one piece


def write_arrays(path: Path, arrays: Mapping[str, Values], classes: Sequence[str] = ()) -> list[str]:
    """Write arrays (N, ...) by name in the format of the suffix, and return the names of columns or arrays.

    Args:
        path: A .csv, .npz or .parquet file. The first and the last have a column for each output.
        arrays: The predictions; "class" has the numbers of classes.
        classes: The names of the classes, for names of columns and in place of numbers.
    """
    return FORMATS[path.suffix.lower()](path, arrays, tuple(classes))


def _npz(path: Path, arrays: Mapping[str, Values], classes: tuple[str, ...]) -> list[str]:
    numpy = optional("numpy", path, "numpy")
    content = {name: numpy.asarray(values) for name, values in arrays.items()}
    content |= {"classes": numpy.array(classes)} if classes else {}
    buffer = io.BytesIO()
    numpy.savez(buffer, **content)
    write_atomically(path, [buffer.getbuffer()])
    return list(content)


def _csv(path: Path, arrays: Mapping[str, Values], classes: tuple[str, ...]) -> list[str]:
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


def _parquet(path: Path, arrays: Mapping[str, Values], classes: tuple[str, ...]) -> list[str]:
    arrow = optional("pyarrow", path, "'lapwing[parquet]'")
    parquet = optional("pyarrow.parquet", path, "'lapwing[parquet]'")
    columns = columns_of(arrays, classes, path)
    content: dict[str, Any] = {n: v if isinstance(v, list) else v.contiguous().numpy() for n, v in columns.items()}
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


FORMATS: Mapping[str, Callable[[Path, Mapping[str, Values], tuple[str, ...]], list[str]]] = {
    ".csv": _csv, ".npz": _npz, ".parquet": _parquet,
}  # fmt: skip
