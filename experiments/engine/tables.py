"""Tables of records: means with standard errors over repeats, ranks, and differences paired by repeat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from experiments.engine.contract import Record
from lapwing.decisions.evaluation import align_columns
from lapwing.demo.result import number
from lapwing.errors import LapwingError

EXTRA = ("seconds", "peak")  # of a record, shown like scores where a column asks for them
MEAN = "mean"  # the group of the rows with means over groups
RANK = "mean rank"


@dataclass(frozen=True)
class Cell:
    """A mean over repeats, its standard error (None for one repeat), and the number of repeats.

    >>> str(Cell.of([1.0, 3.0]))
    '2.000 ± 1.000'
    """

    mean: float
    error: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Cell:
        """Return the cell of some values."""
        n = len(values)
        mean = math.fsum(values) / n
        if n < 2:
            return cls(mean, None, n)
        variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
        return cls(mean, math.sqrt(variance / n), n)

    def __str__(self) -> str:
        return self.text(number)

    def text(self, form: Callable[[float], str]) -> str:
        """Return the mean, and the standard error where there is one."""
        return form(self.mean) + ("" if self.error is None else f" ± {form(self.error)}")


Rows = dict[tuple[str, str], dict[str, Cell]]  # by group and method, and by score


@dataclass(frozen=True)
class Summary:
    """Cells by group, method and score; a score that no repeat has is absent."""

    columns: tuple[str, ...]
    rows: Rows = field(default_factory=dict)

    def restricted(
        self, groups: Sequence[str] | None = None, methods: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> Summary:  # fmt: skip
        """Return some groups, methods and scores, in the order given; all of them for None.

        Raises:
            LapwingError: If a name does not exist.
        """
        every = ([group for group, _ in self.rows], [method for _, method in self.rows], list(self.columns))
        kept = [_chosen(given, known) for given, known in zip((groups, methods, columns), every)]
        rows = {(g, m): self.rows[g, m] for g in kept[0] for m in kept[1] if (g, m) in self.rows}
        return Summary(tuple(kept[2]), rows)


def summarised(records: Iterable[Record]) -> Summary:
    """Return the mean and standard error over repeats of every score by group and method, in order of appearance.

    Raises:
        LapwingError: If there are two records of one group, method and repeat.
    """
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    columns: dict[str, None] = {}
    seen = set()
    for record in records:
        name = record.group, record.method, record.repeat
        if name in seen:
            raise LapwingError(f"there are two records of {name}; expected one for each group, method and repeat.")
        seen.add(name)
        row = values.setdefault((record.group, record.method), {})
        for score, value in _numbers(record).items():
            row.setdefault(score, []).append(value)
            columns[score] = None
    names = (*(name for name in columns if name not in EXTRA), *(name for name in EXTRA if name in columns))
    return Summary(names, {key: {n: Cell.of(v) for n, v in row.items()} for key, row in values.items()})


def compared(records: Iterable[Record], baseline: str) -> Summary:
    """Return the differences from a baseline, paired by repeat: their mean and its standard error.

    Raises:
        LapwingError: If no record is of the baseline.
    """
    given = list(records)
    base = {(r.group, r.repeat): _numbers(r) for r in given if r.method == baseline}
    if not base:
        methods = ", ".join(dict.fromkeys(r.method for r in given))
        raise LapwingError(f"the baseline is {baseline!r}; expected one of {methods}.")
    differences = []
    for record in given:
        other = base.get((record.group, record.repeat))
        if record.method != baseline and other is not None:
            scores = {name: value - other[name] for name, value in _numbers(record).items() if name in other}
            differences.append(Record(record.group, record.method, record.repeat, scores))
    return summarised(differences)


def means(summary: Summary) -> Rows:
    """Return a row for each method: the means over groups of its scores, where it has them in all groups."""
    return _over_groups(summary, MEAN, lambda cell, others: cell.mean)


def ranks(summary: Summary) -> Rows:
    """Return a row for each method: its mean rank over groups. The lowest score has rank one; equal ones share."""
    return _over_groups(summary, RANK, _rank)


def grid(summary: Summary, form: Callable[[float], str] = number) -> list[list[str]]:
    """Return the cells of a table as text: group, method, scores, and "n" where rows differ in the number of repeats.

    The column of groups is left out where there is only one group.
    """
    counts = {key: max((cell.n for cell in row.values()), default=0) for key, row in summary.rows.items()}
    uneven, grouped = len(set(counts.values())) > 1, len({group for group, _ in summary.rows}) > 1
    lines, last = [["", "", *summary.columns, *(["n"] if uneven else [])]], None
    for (group, method), row in summary.rows.items():
        cells = (row[name].text(form) if name in row else "" for name in summary.columns)
        count = [str(counts[group, method])] if uneven else []
        lines.append([group if group != last else "", method, *cells, *count])
        last = group
    return lines if grouped else [line[1:] for line in lines]


def pivoted(summary: Summary, score: str, form: Callable[[float], str] = number) -> list[list[str]]:
    """Return the cells of a table of one score as text: a row for each group, a column for each method."""
    groups, methods = (list(dict.fromkeys(names)) for names in zip(*summary.rows))
    cell = lambda group, method: summary.rows.get((group, method), {}).get(score)
    line = lambda group: [group, *("" if (c := cell(group, m)) is None else c.text(form) for m in methods)]
    return [["", *methods], *map(line, groups)]


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """Return the cells as a table of plain text; columns whose header is empty are flush left."""
    return "\n".join(align_columns(lines, left=sum(not cell for cell in lines[0])))


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return the cells as a table of Markdown.

    >>> print(as_markdown([["", "NLL"], ["plain", "1.2"]]))
    |  | NLL |
    |---|---|
    | plain | 1.2 |
    """
    rule = "|" + "---|" * len(lines[0])
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([rows[0], rule, *rows[1:]])


def _numbers(record: Record) -> dict[str, float]:
    extra = {name: value for name in EXTRA if (value := getattr(record, name)) is not None}
    return {**record.scores, **extra}


def _chosen(given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(known))
    if given is None:
        return names
    for name in given:
        if name not in names:
            raise LapwingError(f"{name!r} is not in the table; expected some of {', '.join(names)}.")
    return list(given)


def _over_groups(summary: Summary, name: str, value: Callable[[Cell, list[Cell]], float]) -> Rows:
    """Return rows of means over groups of a value of each cell among the cells of its group."""
    groups, methods = (list(dict.fromkeys(names)) for names in zip(*summary.rows))
    rows: Rows = {}
    for method in methods:
        cells = {}
        for column in summary.columns:
            values = []
            for group in groups:
                others = {m: row[column] for (g, m), row in summary.rows.items() if g == group and column in row}
                if method in others:
                    values.append(value(others[method], list(others.values())))
            if len(values) == len(groups):
                cells[column] = Cell.of(values)
        if cells:
            rows[name, method] = cells
    return rows


def _rank(cell: Cell, others: list[Cell]) -> float:
    below = sum(other.mean < cell.mean for other in others)
    equal = sum(other.mean == cell.mean for other in others)
    return below + (equal + 1) / 2
