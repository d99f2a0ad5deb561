"""Printed outputs that are kept as text files: a part of one, records of its lines, and a number from its tables."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from experiments.engine.contract import Record
from lapwing.errors import LapwingError

OPTIONS = ("after", "from", "to")
CELL = re.compile(r"\S+(?: \S+)*")  # columns are separated by two spaces or more

# Progress of an experiment, "seed 2, Kron: {'NLL': 0.2} note", or a line of a benchmark, "Kron {'NLL': 0.2}".
SCORES = re.compile(r"^(?:seed (\d+), )?(.*?):? ?(\{'.*?\})", re.MULTILINE)
NAMELESS = "network"  # the method of lines that name none


def part(text: str, options: Mapping[str, str]) -> list[str]:
    """Return lines of a text.

    They begin with the first line that holds the text ``from``, which is looked for after the first line that holds
    ``after``, and end with the next line that holds ``to``; without ``to`` they end before an empty line. With none of
    the options they are the whole text. Spaces at the ends of lines are dropped.

    Raises:
        LapwingError: If no line holds the text of an option.
    """
    lines = [line.rstrip() for line in text.rstrip().split("\n")]
    if not options:
        return lines
    start = _first(lines, options, "after", 0) + 1 if "after" in options else 0
    while start < len(lines) and not lines[start].strip():
        start += 1
    start = _first(lines, options, "from", start) if "from" in options else start
    if "to" in options:
        end = _first(lines, options, "to", start) + 1
    else:
        end = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
    return lines[start:end]


def records(text: str) -> tuple[Record, ...]:
    """Return a record for each method and seed whose scores are printed as a dictionary, in order of appearance.

    What is not a number is left out. Lines that name no method are about the network.
    >>> records("seed 1, Kron: {'NLL': 0.25, 'fit s': 3.0} precision 7")
    (Record(group='', method='Kron', repeat=1, scores={'NLL': 0.25, 'fit s': 3.0}, seconds=None, peak=None),)

    Raises:
        LapwingError: If there is no such line.
    """
    found: dict[tuple[str, int], dict[str, float]] = {}
    for seed, method, scores in SCORES.findall(text):
        numbers = {
            key: float(value) for key, value in ast.literal_eval(scores).items() if isinstance(value, (int, float))
        }
        found.setdefault((method or NAMELESS, int(seed or 0)), {}).update(numbers)
    if not found:
        raise LapwingError("no line has scores; expected lines such as seed 0, Kron: {'NLL': 0.2}.")
    return tuple(Record("", method, seed, scores) for (method, seed), scores in found.items())


def mean(text: str, method: str, score: str) -> float | None:
    """Return the mean over seeds of a score that lines have as a dictionary, or None if there is none."""
    known = records(text) if SCORES.search(text) else ()
    values = [each.scores[score] for each in known if each.method == method and score in each.scores]
    return sum(values) / len(values) if values else None


def cell(lines: list[str], row: str, column: str) -> str:
    """Return a cell of a printed table, the first that fits.

    Columns are flush right below their names. A row is its name, or ``group/name`` where rows are grouped.

    >>> lines = ["               NLL  test s", "MNIST  plain  0.10     2.5", "       Kron   0.09     3.0"]
    >>> cell(lines, "MNIST/Kron", "NLL")
    '0.09'

    Raises:
        LapwingError: If there is no such cell.
    """
    end, group = None, ""
    for line in lines:
        words = list(CELL.finditer(line))
        ends = [word.end() for word in words if word.group() == column]
        if ends:
            end, group = ends[0], ""
        elif words:
            labels = [word.group() for word in words[:2] if not _is_number(word.group())]
            if words[0].start() == 0:
                group = labels[0] if len(labels) == 2 else ""
            name = "/".join(each for each in (group, labels[-1] if labels else "") if each)
            found = next((word.group() for word in words if word.end() == end), None)
            if name == row and found is not None:
                return found
    raise LapwingError(f"there is no cell {column!r} of a row {row!r}; expected a printed table that has it.")


def _first(lines: list[str], options: Mapping[str, str], key: str, start: int) -> int:
    """Return the number of the first line from ``start`` on that holds the text of an option."""
    for i in range(start, len(lines)):
        if options[key] in lines[i]:
            return i
    raise LapwingError(f"no line holds {key}={options[key]!r}; expected a text of the file.")


def number(text: str) -> float:
    """Return the number of a cell, such as "1,200".

    Raises:
        LapwingError: If the cell holds no number.
    """
    try:
        return float(text.replace(",", ""))
    except ValueError as error:
        raise LapwingError(f"the cell is {text!r}; expected a number, or no format.") from error


def _is_number(text: str) -> bool:
    try:
        number(text)
    except LapwingError:
        return False
    return True
