"""Results as aligned plain text."""

from __future__ import annotations

from collections.abc import Sequence

from lapwing.demo.result import Result


def table(result: Result) -> str:
    """Return the title, a line for each row, and the notes; a score that a row lacks stays blank."""
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
    """Return lines with columns of equal width, the first ``left`` columns flush left.

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
    """Return the number with three decimals, fewer if it is large, as a power of ten if it is tiny.

    >>> number(0.12345), number(123.456), number(0.000123), number(0.0)
    ('0.123', '123.5', '1.23e-04', '0.000')
    """
    size = abs(value)
    if 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.3f}" if size < 10 else f"{value:.2f}" if size < 100 else f"{value:.1f}"
