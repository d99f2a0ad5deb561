"""Results as aligned plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Scored(Protocol):
    """A row: one method and its scores, for one group (a data set) where there are several."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def scores(self) -> Mapping[str, float]: ...


class Tabulated(Protocol):
    """What a table reads of a Result."""

    @property
    def experiment(self) -> str: ...
    @property
    def rows(self) -> Sequence[Scored]: ...
    @property
    def notes(self) -> Sequence[str]: ...


def table(result: Tabulated) -> str:
    """The title, a line for each row and the notes; a score that a row lacks stays blank."""
    columns = list(dict.fromkeys(score for row in result.rows for score in row.scores))
    grouped = any(row.group for row in result.rows)
    lines = [[*([""] if grouped else []), "", *columns]]
    last = None
    for row in result.rows:
        first = [row.group if row.group != last else ""] if grouped else []
        last = row.group
        lines.append([*first, row.name, *(number(row.scores[c]) if c in row.scores else "" for c in columns)])
    text = aligned(lines, left=2 if grouped else 1)
    return "\n".join([result.experiment, *text, *(f"  {note}" for note in result.notes)])


def aligned(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns of equal width, the first ``left`` of them flush left.

    >>> aligned([["", "NLL"], ["plain", "1.2"]], left=1)
    ['       NLL', 'plain  1.2']
    """
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    ]


def number(value: float) -> str:
    """Three decimals, fewer for large numbers, powers of ten for tiny ones.

    >>> number(0.12345), number(123.456), number(0.000123), number(0.0)
    ('0.123', '123.5', '1.23e-04', '0.000')
    """
    size = abs(value)
    if 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.3f}" if size < 10 else f"{value:.2f}" if size < 100 else f"{value:.1f}"
