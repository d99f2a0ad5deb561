"""Tables of scores as text, and results as files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lapwing.core.atomic import write_atomically
from lapwing.core.settings import PATH
from lapwing.metrics.resampling import ScoreInterval


def interval_text(each: ScoreInterval) -> str:
    """Return a score with its interval as text.

    >>> interval_text(ScoreInterval(0.12345, 0.1, 0.15, 0.01))
    '0.1235 [0.1, 0.15]'
    """
    return f"{each.value:.4g} [{each.low:.3g}, {each.high:.3g}]"


def aligned(table: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the rows of a table as lines: the first column on the left, the others on the right.

    >>> aligned([("score", "value"), ("nll", "0.5")])
    ['score  value', 'nll      0.5']
    """
    rows = list(table)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    pad = lambda i, cell: cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i])
    return ["  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows]


def write_json(value: Any, path: str | Path) -> None:
    """Write plain values as JSON, whole or not at all.

    Raises:
        FileError: If the file cannot be written.
    """
    PATH.check("path", path)
    write_atomically(path, [json.dumps(value, indent=1, allow_nan=False).encode()])
