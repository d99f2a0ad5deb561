"""The result of an experiment (scores, the numbers behind its pictures, settings, seed), as a table and as files.

Parts that pictures of several axes share are here too. Colours are those of ``lw.plots``.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import lapwing
from lapwing.decisions.evaluation import align_columns

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Versions of everything that could change the numbers.
VERSIONS = {"python": platform.python_version(), "torch": str(torch.__version__), "lapwing": lapwing.__version__}


@dataclass(frozen=True)
class Row:
    """The scores of one method; ``group`` names the data set where there are several."""

    name: str
    scores: dict[str, float]
    group: str = ""


@dataclass(frozen=True)
class Result:
    """The result of an experiment. It holds plain numbers only, so that it goes to JSON and comes back equal."""

    experiment: str
    settings: dict[str, Any]
    seed: int
    rows: tuple[Row, ...]
    seconds: dict[str, float]
    arrays: dict[str, list[float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=lambda: dict(VERSIONS))

    def to_json(self) -> str:
        """Return the result as JSON. Raise ValueError if a number is not finite, since JSON has no such numbers."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Return the result that ``to_json`` wrote."""
        fields: dict[str, Any] = json.loads(text)
        rows = tuple(Row(**row) for row in fields.pop("rows"))
        return cls(rows=rows, notes=tuple(fields.pop("notes")), **fields)


def plain(settings: DataclassInstance) -> dict[str, Any]:
    """Return a settings dataclass as JSON would give it back: tuples become lists, paths become text."""
    return json.loads(json.dumps(asdict(settings), default=str))


def mean_scores(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every score over repetitions.

    >>> mean_scores([{"RMSE": 1.0}, {"RMSE": 2.0}])
    {'RMSE': 1.5}
    """
    return {name: sum(s[name] for s in scores) / len(scores) for name in scores[0]}


def table(result: Result) -> str:
    """Return the title, a line for each row, and the notes; a score that a row lacks stays blank."""
    columns = list(dict.fromkeys(score for row in result.rows for score in row.scores))
    grouped = any(row.group for row in result.rows)
    lines, last = [["", "", *columns]], None
    for row in result.rows:
        numbers = (number(row.scores[column]) if column in row.scores else "" for column in columns)
        lines.append([row.group if row.group != last else "", row.name, *numbers])
        last = row.group
    text = align_columns(lines, left=2) if grouped else align_columns([line[1:] for line in lines], left=1)
    return "\n".join([result.experiment, *text, *(f"  {note}" for note in result.notes)])


def number(value: float) -> str:
    """Return the number with three decimals, fewer if it is large, as a power of ten if it is tiny.

    >>> number(0.12345), number(123.456), number(0.000123), number(0.0)
    ('0.123', '123.5', '1.23e-04', '0.000')
    """
    size = abs(value)
    if 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.3f}" if size < 10 else f"{value:.2f}" if size < 100 else f"{value:.1f}"


Picture = Callable[[Result, Path], None]


@dataclass(frozen=True)
class ExperimentReport:
    """Results, the JSON file for their numbers, and their pictures by file name: the first shows the first result."""

    path: Path
    results: tuple[Result, ...]
    pictures: Mapping[str, Picture] = field(default_factory=dict)

    def write(self) -> list[Path]:
        """Draw the pictures beside the JSON file, write that file, and return the paths of all of them."""
        drawn = [self.path.with_name(name) for name in self.pictures]
        for path, draw, result in zip(drawn, self.pictures.values(), self.results, strict=False):
            draw(result, path)
        documents = {result.experiment: json.loads(result.to_json()) for result in self.results}
        self.path.write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")
        return [*drawn, self.path]


def save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG file of few colours."""
    figure.savefig(path, dpi=150)
    reduce_colours(path)


def reduce_colours(path: Path) -> None:
    """Write a PNG file again with 256 colours, which take a quarter of the bytes of all colours."""
    from PIL import Image

    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, format="png", optimize=True)


def share_vertical_range(axes: Sequence[Axes]) -> None:
    """Give all axes the same vertical range."""
    limits = [axis.get_ylim() for axis in axes]
    for axis in axes:
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
