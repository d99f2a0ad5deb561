"""Numbers in pages: marked regions of Markdown that are written from stored results."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from experiments.engine.store import Stored, load, result_path
from experiments.engine.tables import Summary, as_markdown, compared, grid, means, pivoted, ranks, summarised
from lapwing.demo.result import number
from lapwing.errors import LapwingError

REGION = re.compile(r"<!-- (result|value): (.*?) -->(.*?)<!-- /\1 -->", re.DOTALL)
MARK = re.compile(r"<!-- /?(?:result|value)\b")
FENCED = re.compile(r"(^```.*?^```[ \t]*$)", re.DOTALL | re.MULTILINE)
OPTIONS = {  # of each kind of region
    "result": ("scores", "groups", "methods", "baseline", "digits", "means", "ranks", "pivot"),
    "value": ("baseline",),
}
PIVOTS: dict[str, Callable[[list[list[str]]], list[list[str]]]] = {  # of a table of one score
    "yes": lambda lines: lines,  # a column for each method
    "groups": lambda lines: [list(line) for line in zip(*lines)],  # a column for each group
}
FACTS = ("hardware", "python", "torch", "lapwing", "command", "seconds", "peak", "units")


@dataclass(frozen=True)
class Mark:
    """What a region shows: a result by its name and form, other words, and options ``key=value``."""

    kind: str
    text: str
    name: str
    form: str
    words: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, kind: str, text: str) -> Mark:
        """Read the text of a mark, such as ``uci/full scores=NLL methods="plain,last layer"``."""
        reference, *rest = shlex.split(text)
        name, slash, form = reference.partition("/")
        options = dict(word.split("=", 1) for word in rest if re.match(r"[a-z]+=", word))
        words = tuple(word for word in rest if not re.match(r"[a-z]+=", word))
        unknown = [key for key in options if key not in OPTIONS[kind]]
        if not slash or unknown or len(words) > (2 if kind == "value" else 0):
            known = ", ".join(f"{key}=" for key in OPTIONS[kind])
            form_text = "NAME/FORM WHAT FORMAT" if kind == "value" else "NAME/FORM"
            raise LapwingError(f"a mark is {kind}: {text}; expected {kind}: {form_text}, and options of {known}.")
        return cls(kind, text, name, form, words, options)


def written(text: str, results: Callable[[str, str], Stored]) -> str:
    """Return the text of a page with every region written from the results; blocks of code stay as they are.

    Raises:
        LapwingError: If a mark is wrong, has no end, or names what is not stored.
    """
    parts = FENCED.split(text)
    return "".join(part if part.startswith("```") else _written(part, results) for part in parts)


def _written(text: str, results: Callable[[str, str], Stored]) -> str:
    bare = MARK.search(REGION.sub("", text))
    if bare is not None:
        raise LapwingError(f"a region that begins or ends with {bare.group()} is open; expected both ends.")

    def region(match: re.Match[str]) -> str:
        kind, inner = match.group(1), match.group(2)
        if MARK.search(match.group(3)):
            raise LapwingError(f"the region {kind}: {inner} holds another mark; expected its end before the next one.")
        mark = Mark.parse(kind, inner)
        stored = results(mark.name, mark.form)
        body = f"\n{table(mark, stored)}\n" if kind == "result" else value(mark, stored)
        return f"<!-- {kind}: {inner} -->{body}<!-- /{kind} -->"

    return REGION.sub(region, text)


def table(mark: Mark, stored: Stored) -> str:
    """Return the table of Markdown that a mark asks for."""
    options = mark.options
    summary = _summary(mark, stored)
    shown = [name for name in summary.columns if name not in ("seconds", "peak")]
    groups, methods = (dict.fromkeys(names) for names in zip(*summary.rows))
    scores = _names(options, "scores", summary.columns) or shown
    summary = summary.restricted(_names(options, "groups", groups), _names(options, "methods", methods), scores)
    form = partial(_fixed, digits=int(options["digits"])) if "digits" in options else number
    rows = dict(summary.rows)
    rows |= means(summary) if options.get("means") == "yes" else {}
    rows |= ranks(summary) if options.get("ranks") == "yes" else {}
    summary = Summary(summary.columns, rows)
    if "pivot" in options:
        if len(summary.columns) != 1 or options["pivot"] not in PIVOTS:
            expected = f"one score with pivot={' or pivot='.join(PIVOTS)}"
            raise LapwingError(f"{mark.text} has {len(summary.columns)} scores; expected {expected}.")
        return as_markdown(PIVOTS[options["pivot"]](pivoted(summary, summary.columns[0], form)))
    return as_markdown(grid(summary, form))


def value(mark: Mark, stored: Stored) -> str:
    """Return the number or fact that a mark asks for, in its format."""
    what, form = (*mark.words, "")[:2] if mark.words else ("", "")
    answer = fact(stored, what) if what in FACTS else _number(_summary(mark, stored), what, mark)
    try:
        return format(answer, form)
    except ValueError as error:
        raise LapwingError(f"{mark.text}: the format {form!r} does not fit {answer!r}.") from error


def fact(stored: Stored, name: str) -> str | float:
    """Return a fact about a result: its machines, versions or commands, and the seconds of all units."""
    units = stored.units.values()
    if name == "units":
        return len(stored.units)
    if name == "seconds":
        return sum(unit.seconds for unit in units)
    if name == "peak":
        return max((unit.peak for unit in units if unit.peak is not None), default=0)
    if name == "command":
        return "; ".join(dict.fromkeys(f"`{unit.machine.command}`" for unit in units))
    of_machine = lambda m: m.hardware if name == "hardware" else m.versions[name]
    return "; ".join(dict.fromkeys(of_machine(unit.machine) for unit in units))


def pages(root: Path) -> Iterator[Path]:
    """Yield the pages of a repository: README.md and all pages below docs/."""
    if (root / "README.md").exists():
        yield root / "README.md"
    yield from sorted((root / "docs").rglob("*.md"))


def refresh(root: Path, check: bool = False) -> list[Path]:
    """Write all regions of all pages from docs/results and return the pages that differed; ``check`` writes nothing."""
    folder, loaded = root / "docs" / "results", dict[tuple[str, str], Stored]()

    def results(name: str, form: str) -> Stored:
        if (name, form) not in loaded:
            loaded[name, form] = load(result_path(folder, name, form))
        return loaded[name, form]

    changed = []
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        try:
            new = written(text, results)
        except LapwingError as error:
            raise LapwingError(f"{page.relative_to(root)}: {error}") from error
        if new != text:
            changed.append(page)
            if not check:
                page.write_text(new, encoding="utf-8")
    return changed


def _summary(mark: Mark, stored: Stored) -> Summary:
    baseline = mark.options.get("baseline")
    return summarised(stored.records) if baseline is None else compared(stored.records, baseline)


def _names(options: dict[str, str], key: str, known: Iterable[str]) -> list[str] | None:
    """Return the names of an option, split at commas; a name may hold commas if it is a known one."""
    if key not in options:
        return None
    parts, names, every = options[key].split(","), list[str](), set(known)
    while parts:
        tries = [",".join(parts[:count]).strip() for count in range(len(parts), 0, -1)]
        name = next((each for each in tries if each in every), tries[-1])  # one that is unknown is refused later
        names.append(name)
        parts = parts[len(tries) - tries.index(name) :]
    return names


def _number(summary: Summary, what: str, mark: Mark) -> float:
    """Return the number that ``group/method/score`` names; ``/±`` gives its standard error and ``/n`` the repeats."""
    cells: dict[str, float | None] = {}
    for (group, method), row in summary.rows.items():
        for score, cell in row.items():
            name = "/".join(part for part in (group, method, score) if part)
            cells |= {name: cell.mean, f"{name}/±": cell.error, f"{name}/n": cell.n}
    answer = cells.get(what)
    if answer is None:
        near = [name for name in cells if name.startswith(what.split("/")[0])] or list(cells)
        raise LapwingError(f"{mark.text}: {what} is not stored; expected such as {', '.join(near[:4])}.")
    return answer


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"
