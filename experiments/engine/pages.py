"""Numbers in pages: regions of Markdown and lists of values, written from stored results and printed outputs.

A list of values stands below its block, or for a page whose source should have few marks (the README) in a file beside
it, ``README.values``, which lists every number of the whole page: those that are no results, such as settings, as
``NUMBER = given``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from experiments.engine import printed
from experiments.engine.contract import Record
from experiments.engine.store import Stored, load, result_path
from experiments.engine.tables import Summary, as_markdown, compared, grid, means, pivoted, ranks, summarised
from lapwing.demo.result import number
from lapwing.errors import LapwingError

REGION = re.compile(r"<!-- (result|output): (.*?) -->(.*?)<!-- /\1 -->", re.DOTALL)
MARK = re.compile(r"<!-- /?(?:result|output|value)\b")
VALUES = re.compile(r"<!-- values\n(.*?)\n-->", re.DOTALL)  # below a paragraph or table: "NUMBER = MARK" in each line
# A block of code is left alone; one inside a region of printed output is part of the region.
PIECES = re.compile(r"^```.*?^```[ \t]*$|<!-- output: .*? -->.*?<!-- /output -->", re.DOTALL | re.MULTILINE)
# Parts of a page without numbers of a list: blocks of code, regions, code in a line, and the targets of links.
HIDDEN = re.compile(rf"^```.*?^```[ \t]*$|{REGION.pattern}|`[^`\n]+`|\]\([^)\s]+\)", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.,/#=+\-−])[+\-−]?\d[\d.,]*")
GIVEN = "given"
OPTIONS = {  # of each kind of region
    "result": ("scores", "groups", "methods", "baseline", "digits", "means", "ranks", "pivot"),
    "value": ("baseline",),
    "output": printed.OPTIONS,
    "value of a file": printed.OPTIONS,
}
FORMS = {  # what follows the name of each kind of region, and how many words it has after the first
    "result": ("NAME/FORM or FILE.txt", 0),
    "value": ("NAME/FORM WHAT FORMAT", 2),
    "output": ("FILE.txt", 0),
    "value of a file": ("FILE.txt ROW COLUMN FORMAT", 3),
}
PIVOTS: dict[str, Callable[[list[list[str]]], list[list[str]]]] = {  # of a table of one score
    "yes": lambda lines: lines,  # a column for each method
    "groups": lambda lines: [list(line) for line in zip(*lines)],  # a column for each group
}
FACTS = ("hardware", "python", "torch", "lapwing", "command", "seconds", "peak", "units")


@dataclass(frozen=True)
class Mark:
    """What a region shows: a result ("NAME/FORM") or a file of printed output, other words, options ``key=value``."""

    kind: str
    text: str
    reference: str
    words: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)

    @property
    def of_file(self) -> bool:
        """Whether the region is written from a file of printed output."""
        return self.reference.endswith(".txt")

    @classmethod
    def parse(cls, kind: str, text: str) -> Mark:
        """Read the text of a mark, such as ``uci/full scores=NLL methods="plain,last layer"``."""
        reference, *rest = shlex.split(text)
        options = dict(word.split("=", 1) for word in rest if re.match(r"[a-z]+=.", word))
        words = tuple(word for word in rest if not re.match(r"[a-z]+=.", word))
        mark = cls(kind, text, reference, words, options)
        rules = "value of a file" if kind == "value" and mark.of_file else kind
        form, most = FORMS[rules]
        least = 2 if rules == "value of a file" else 0
        fits = mark.of_file if kind == "output" else mark.of_file or "/" in reference
        unknown = [key for key in options if key not in OPTIONS[rules]]
        if not fits or unknown or not least <= len(words) <= most:
            known = ", ".join(f"{key}=" for key in OPTIONS[rules])
            raise LapwingError(f"a mark is {kind}: {text}; expected {kind}: {form}, and options of {known}.")
        return mark


@dataclass(frozen=True)
class Sources:
    """Where regions are written from: stored results by name and form, and texts by the paths of their files."""

    result: Callable[[str, str], Stored]
    text: Callable[[str], str]


def written(text: str, sources: Sources) -> str:
    """Return the text of a page with every region written from its source; blocks of code stay as they are.

    Raises:
        LapwingError: If a mark is wrong, has no end, or names what is not stored.
    """
    parts, start = [], 0
    for piece in PIECES.finditer(text):
        code = piece.group().startswith("```")
        parts += [_written(text[start : piece.start()], sources)]
        parts += [piece.group() if code else _written(piece.group(), sources)]
        start = piece.end()
    return "".join([*parts, _written(text[start:], sources)])


def _written(text: str, sources: Sources) -> str:
    text = _with_values(text, sources)
    bare = MARK.search(REGION.sub("", VALUES.sub("", text)))
    if bare is not None:
        raise LapwingError(f"a region that begins or ends with {bare.group()} is open; expected both ends.")

    def region(match: re.Match[str]) -> str:
        kind, inner = match.group(1), match.group(2)
        if MARK.search(match.group(3)):
            raise LapwingError(f"the region {kind}: {inner} holds another mark; expected its end before the next one.")
        mark = Mark.parse(kind, inner)
        body = _of_file(mark, sources) if mark.of_file else _of_result(mark, sources)
        return f"<!-- {kind}: {inner} -->{body}<!-- /{kind} -->"

    return REGION.sub(region, text)


def _with_values(text: str, sources: Sources) -> str:
    """Return a text whose blocks above lists of values have the values of their sources."""
    parts, start = list[str](), 0
    for match in VALUES.finditer(text):
        before = text[start : match.start()]
        cut = before.rstrip().rfind("\n\n") + 1
        block, lines = _with_sources(before[cut:], match.group(1).split("\n"), sources)
        parts += [before[:cut], block, "\n".join(["<!-- values", *lines, "-->"])]
        start = match.end()
    return "".join([*parts, text[start:]])


def _with_sources(block: str, lines: list[str], sources: Sources) -> tuple[str, list[str]]:
    """Return a block and the list of its values, both with the values of their sources.

    The list has each number in the order in which it stands in the block, and as often.
    """
    olds, marks = list[str](), list[str]()
    for line in lines:
        old, equals, mark = line.partition(" = ")
        if not equals:
            raise LapwingError(f"a list of values has the line {line!r}; expected NUMBER = MARK.")
        olds.append(old)
        marks.append(mark)
    pattern = _pattern(olds)
    seen = pattern.findall(block)
    if seen != olds:
        i = next((i for i, (a, b) in enumerate(zip(seen, olds)) if a != b), min(len(seen), len(olds)))
        have, want = (f"{each[i]!r}" if i < len(each) else "nothing more" for each in (seen, olds))
        where = marks[i] if i < len(marks) else marks[-1]
        raise LapwingError(f"{where}: the block above has {have} where the list of its values has {want}.")
    news = [
        old if mark == GIVEN else _value(Mark.parse("value", mark), sources)
        for old, mark in zip(olds, marks, strict=True)
    ]
    rest = iter(news)
    return pattern.sub(lambda _: next(rest), block), [f"{new} = {mark}" for new, mark in zip(news, marks)]


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for whole numbers, or other texts, of these."""
    longest = sorted(set(texts), key=len, reverse=True)
    return re.compile(rf"(?<![\w.,+\-−])(?:{'|'.join(map(re.escape, longest))})(?!\d|[.,]\d)")


def _value(mark: Mark, sources: Sources) -> str:
    if mark.of_file:
        return _of_file(mark, sources)
    name, _, form = mark.reference.partition("/")
    return value(mark, sources.result(name, form))


def _of_result(mark: Mark, sources: Sources) -> str:
    name, _, form = mark.reference.partition("/")
    return f"\n{table(mark, sources.result(name, form).records)}\n"


def _of_file(mark: Mark, sources: Sources) -> str:
    """Return a block of printed lines, a table of the records that they hold, or one number."""
    text = sources.text(mark.reference)
    try:
        if mark.kind == "result":
            return f"\n{table(mark, printed.records(text))}\n"
        lines = printed.part(text, mark.options)
        if mark.kind == "output":
            return "\n".join(["", "```text", *lines, "```", ""])
        row, column, form = (*mark.words, "")[:3]
        answer = printed.mean("\n".join(lines), row, column)
        if answer is None:
            found = printed.cell(lines, row, column)
            if not form:
                return found
            answer = printed.number(found)
    except LapwingError as error:
        raise LapwingError(f"{mark.text}: {error}") from error
    return _formatted(mark, answer, form)


def table(mark: Mark, records: Sequence[Record]) -> str:
    """Return the table of Markdown that a mark asks for."""
    options = mark.options
    summary = _summary(mark, records)
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
    answer = fact(stored, what) if what in FACTS else _number(_summary(mark, stored.records), what, mark)
    return _formatted(mark, answer, form)


def _formatted(mark: Mark, answer: str | float, form: str) -> str:
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


def with_listed_values(text: str, listed: str, sources: Sources) -> tuple[str, str]:
    """Return a page and the list of its values from the file beside it, both with the values of their sources.

    Code, regions and the targets of links have no values.

    Raises:
        LapwingError: If a number of the list is not in the page, or is there more often, or one of the page is not in
            the list.
    """
    kept: list[str] = []

    def hidden(code: re.Match[str]) -> str:
        kept.append(code.group())
        return chr(0xE000 + len(kept) - 1)  # a character for private use

    bare = HIDDEN.sub(hidden, text)
    rows = listed.rstrip("\n").split("\n")
    new, lines = _with_sources(bare, rows, sources)
    left = NUMBER.search(_pattern([row.partition(" = ")[0] for row in rows]).sub("_", bare))
    if left is not None:
        raise LapwingError(
            f"the number {left.group()} is not in the list of values beside the page; expected it there, with its "
            f'source or as "{left.group()} = {GIVEN}".'
        )
    for i, code in enumerate(kept):
        new = new.replace(chr(0xE000 + i), code)
    return new, "\n".join([*lines, ""])


def pages(root: Path) -> Iterator[Path]:
    """Yield the pages of a repository: README.md and all pages below docs/ and experiments/."""
    if (root / "README.md").exists():
        yield root / "README.md"
    for folder in ("docs", "experiments"):
        yield from sorted((root / folder).rglob("*.md"))


def refresh(root: Path, check: bool = False) -> list[Path]:
    """Write all regions of all pages and return the pages that differed; ``check`` writes nothing.

    Results are those of docs/results; the paths of printed outputs begin at the root.
    """
    folder, loaded = root / "docs" / "results", dict[tuple[str, str], Stored]()

    def results(name: str, form: str) -> Stored:
        if (name, form) not in loaded:
            loaded[name, form] = load(result_path(folder, name, form))
        return loaded[name, form]

    def text_of(path: str) -> str:
        if not (root / path).is_file():
            raise LapwingError(f"{path} does not exist; expected a file of printed output.")
        return (root / path).read_text(encoding="utf-8")

    changed, sources = [], Sources(results, text_of)
    for page in pages(root):
        beside = page.with_suffix(".values")
        files = {path: path.read_text(encoding="utf-8") for path in (page, beside) if path.exists()}
        try:
            new = {page: written(files[page], sources)}
            if beside in files:
                new[page], new[beside] = with_listed_values(new[page], files[beside], sources)
        except LapwingError as error:
            raise LapwingError(f"{page.relative_to(root)}: {error}") from error
        for path, text in files.items():
            if new[path] != text:
                changed.append(path)
                if not check:
                    path.write_text(new[path], encoding="utf-8")
    return changed


def _summary(mark: Mark, records: Sequence[Record]) -> Summary:
    baseline = mark.options.get("baseline")
    return summarised(records) if baseline is None else compared(records, baseline)


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
