"""The engine of experiments: running, storing, measuring, settings, seeds, tables and pages."""

from __future__ import annotations

import math
import mmap
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from benchmarks import spine
from experiments.__main__ import main
from experiments.engine import pages
from experiments.engine.contract import Record
from experiments.engine.known import EXPERIMENTS, experiment_class
from experiments.engine.machine import Machine
from experiments.engine.measuring import _PEAKS, measured
from experiments.engine.pages import Sources, refresh, written
from experiments.engine.running import Plan, run
from experiments.engine.seeds import parted, records_of, seed_units
from experiments.engine.settings import code_version, digest, from_toml, overridden, plain, what
from experiments.engine.store import Stored, Unit, checked, join, load, result_path, save
from experiments.engine.tables import as_markdown, as_text, compared, grid, means, pivoted, ranks, summarised
from experiments.engine.values import SettingsError, built, parsed, read_toml
from experiments.flights import Flights
from experiments.options import Progress
from lapwing.demo.result import Result, Row
from lapwing.errors import FileError, LapwingError
from tests.experiments.engine.toy import Link, Net, Toy

# Runs: every unit is stored when it is done, failures do not end a run, and the next run goes on.


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "out" / "toy_quick.json", "quick", command="python -m experiments toy")


def test_every_unit_is_stored_with_its_machine_time_and_memory(plan: Plan) -> None:
    outcome = run(Toy(), plan)
    stored = load(plan.path)
    assert stored == outcome.stored
    assert list(stored.units) == ["wine/0", "wine/1", "yacht/0", "yacht/1"]
    assert len(stored.records) == 8
    assert (outcome.failed, outcome.left) == ((), ())
    unit = stored.units["wine/1"]
    assert unit.machine.command == "python -m experiments toy"
    assert unit.machine.versions["torch"] == str(torch.__version__)
    assert unit.machine.hardware
    assert unit.peak is None or unit.peak > 2**20
    assert 0 <= unit.seconds < 60


def test_units_that_are_stored_do_not_run_again(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    run(Toy(repeats=1), plan)
    stored = run(Toy(repeats=1), plan, lambda line: None).stored
    ran: list[str] = []
    measure = Toy.measure
    monkeypatch.setattr(Toy, "measure", lambda self, unit, progress: ran.append(unit) or measure(self, unit, progress))
    more = run(Toy(repeats=3), plan).stored
    assert ran == ["wine/1", "wine/2", "yacht/1", "yacht/2"]
    assert more.units["wine/0"] == stored.units["wine/0"]
    ran.clear()
    monkeypatch.setattr(Toy, "version", 2, raising=False)
    run(Toy(repeats=1), plan)
    assert ran == ["wine/0", "yacht/0"]


def test_a_unit_gives_the_same_whatever_ran_before(plan: Plan) -> None:
    whole = run(Toy(), plan).stored
    torch.manual_seed(7)
    alone = run(Toy(), replace(plan, path=plan.path.with_name("alone.json"), only="yacht/1")).stored
    assert list(alone.units) == ["yacht/1"]
    assert alone.units["yacht/1"].records == whole.units["yacht/1"].records
    assert whole.units["yacht/0"].records[0].scores != whole.units["yacht/1"].records[0].scores


def test_a_unit_that_fails_is_stored_with_its_error_and_tried_again(plan: Plan) -> None:
    lines: list[str] = []
    outcome = run(Toy(bad="wine/1"), plan, lines.append)
    assert outcome.failed == ("wine/1",)
    assert load(plan.path).units["wine/1"].error == "lapwing.errors.DataError: the table is empty."
    assert len(load(plan.path).records) == 6
    assert any(line.startswith("wine/1: failed, lapwing.errors.DataError: the table is empty.") for line in lines)
    again = run(Toy(), plan)
    assert (again.failed, len(again.stored.records)) == ((), 8)


def test_ctrl_c_keeps_what_is_done(plan: Plan) -> None:
    outcome = run(Toy(stop="yacht/0"), plan)
    assert outcome.interrupted
    assert outcome.left == ("yacht/0", "yacht/1")
    assert list(load(plan.path).units) == ["wine/0", "wine/1"]
    assert len(run(Toy(), plan).stored.units) == 4


def test_results_of_other_settings_are_not_overwritten_unless_asked(plan: Plan) -> None:
    run(Toy(), plan)
    with pytest.raises(FileError, match=r"with net = .*--replace"):
        run(Toy(net=Net(rate=0.1)), plan)
    outcome = run(Toy(net=Net(rate=0.1), repeats=1), replace(plan, replace=True))
    assert list(outcome.stored.units) == ["wine/0", "yacht/0"]


def test_runs_of_other_units_may_share_the_file(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run ends while the first one is within its first unit."""
    measure = Toy.measure
    others = iter([replace(plan, only="wine/*")])

    def measured(self: Toy, unit: str, progress: Progress) -> Iterable[Record]:
        for other in others:
            run(Toy(), other)
        return measure(self, unit, progress)

    monkeypatch.setattr(Toy, "measure", measured)
    stored = run(Toy(), replace(plan, only="yacht/*")).stored
    assert stored == load(plan.path)
    assert list(stored.units) == list(Toy().units())


def test_another_process_gives_the_same_records_with_one_thread(plan: Plan) -> None:
    """One unit, since each process imports PyTorch."""
    here = run(Toy(), replace(plan, only="yacht/1")).stored.units["yacht/1"]
    there = run(Toy(), replace(plan, path=plan.path.with_name("there.json"), only="yacht/1", workers=2))
    unit = there.stored.units["yacht/1"]
    assert [r.scores["NLL"] for r in unit.records] == [r.scores["NLL"] for r in here.records]  # the same computation
    assert {r.scores["threads"] for r in unit.records} == {1.0}
    assert unit.machine.threads == 1


class Pool:
    """A pool in this process; a unit whose key is in ``deadly`` breaks it."""

    deadly: tuple[str, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        self.broken = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *arguments: Any) -> None:
        return

    def submit(self, call: Callable[..., Unit], experiment: Toy, key: str, *rest: Any) -> Future[Unit]:
        future: Future[Unit] = Future()
        self.broken = self.broken or key in self.deadly
        if self.broken:
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(call(experiment, key, *rest))
        return future


def test_a_process_that_dies_ends_its_unit_alone(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.engine.running.ProcessPoolExecutor", Pool)
    monkeypatch.setattr(Pool, "deadly", ("wine/1",))
    outcome = run(Toy(), replace(plan, workers=1 + 1))
    assert "wine/1" in outcome.failed
    assert "a process died" in outcome.stored.units["wine/1"].error
    assert set(outcome.stored.units) == set(Toy().units())
    assert "yacht/1" not in outcome.failed
    monkeypatch.setattr(Pool, "deadly", ())
    assert len(run(Toy(), replace(plan, workers=3)).stored.records) == 8


# The time and memory of a call, and the machine in words.


def touched(size: int) -> int:
    """Take so many bytes from the system and give them back; the allocator might have them at hand."""
    with mmap.mmap(-1, size) as block:
        for place in range(0, size, mmap.PAGESIZE):
            block[place] = 1
    return size


def test_the_peak_sees_memory_that_is_free_again() -> None:
    size = 2**26
    large = measured(lambda: touched(size))
    small = measured(lambda: 3)
    assert large.answer == size
    assert large.peak is None or (small.peak is not None and size / 2 < large.peak - small.peak < 2 * size)


def test_a_call_that_raises_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        measured(lambda: 1 // 0)
    assert _PEAKS == []


# Regions of pages are written from results, and a page that differs is seen.

ROOT = Path(__file__).parents[2]
MACHINE = Machine("an H200", {"python": "3.12", "torch": "2.11", "lapwing": "0.1"}, 1, "python -m experiments toy")


def stored() -> Stored:
    units = {}
    for i in (0, 1):
        rows = (("plain", 1.0 + i), ("last layer", 0.5 + 2 * i), ("VaLLA, alpha 1", 4.0))
        records = tuple(Record("wine", method, i, {"NLL": value, "fit / epoch": 2.0}, 3.0) for method, value in rows)
        units[f"wine/{i}"] = Unit(records, 1.5, 2**30, MACHINE, "abc", "toy 1")
    return Stored("toy", "full", {}, 0, units)


PRINTED = """On a GPU

    python -m experiments toy

first
                   NLL  fit / epoch
wine  plain       1.25          3.0
      last layer  0.75        1,200
      Kron        0.50  out of time
  a note

seed 0, Kron: {'NLL': 0.5, 'fit s': 2.0} precision 3
seed 1, Kron: {'NLL': 0.25, 'fit s': 3.0, 'trace': [1.0]} precision 4

second, of 100 rows
        NLL
plain  9.00
"""
FILES = {"results/toy.txt": PRINTED, "results/empty.txt": "nothing\n"}
SOURCES = Sources(lambda name, form: stored(), FILES.__getitem__)


def body(mark: str, kind: str = "value") -> str:
    if kind == "value":
        text = written(f"before old after\n\n<!-- values\nold = {mark}\n-->\n", SOURCES)
        found = re.fullmatch(r"before (.*) after\n\n<!-- values\n(.*) = (.*)\n-->\n", text)
        assert found is not None
        assert found.group(1, 3) == (found[2], mark)
        return found[1]
    text = written(f"before <!-- {kind}: {mark} -->old<!-- /{kind} --> after", SOURCES)
    start, end = f"before <!-- {kind}: {mark} -->", f"<!-- /{kind} --> after"
    assert text.startswith(start)
    assert text.endswith(end)
    return text[len(start) : -len(end)]


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ("toy/full wine/plain/NLL .3f", "1.500"),
        ('toy/full "wine/last layer/NLL/±" .2f', "1.00"),
        ("toy/full wine/plain/NLL/n", "2"),
        ('toy/full "wine/plain/fit / epoch" .0f', "2"),
        ("toy/full wine/plain/seconds .1f", "3.0"),
        ('toy/full "wine/last layer/NLL" baseline=plain +.2f', "+0.00"),
        ("toy/full hardware", "an H200"),
        ("toy/full torch", "2.11"),
        ("toy/full seconds .0f", "3"),
        ("toy/full units", "2"),
        ("toy/full peak .2e", "1.07e+09"),
        ("toy/full command", "`python -m experiments toy`"),
    ],
)
def test_values(mark: str, text: str) -> None:
    assert body(mark) == text


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        (
            'scores=NLL methods="VaLLA, alpha 1, plain"',
            ["|  | NLL |", "| VaLLA, alpha 1 | 4.000 ± 0.000 |", "| plain | 1.500 ± 0.500 |"],
        ),
        ("scores=NLL,seconds methods=plain digits=1", ["|  | NLL | seconds |", "| plain | 1.5 ± 0.5 | 3.0 ± 0.0 |"]),
        ('scores=NLL methods="last layer" baseline=plain digits=1', ["|  | NLL |", "| last layer | 0.0 ± 0.5 |"]),
        (
            'scores=NLL methods="plain,last layer" pivot=yes means=yes digits=1',
            ["|  | plain | last layer |", "| wine | 1.5 ± 0.5 | 1.5 ± 1.0 |", "| mean | 1.5 | 1.5 |"],
        ),
        (
            "scores=NLL pivot=yes ranks=yes digits=1 methods=plain",
            ["|  | plain |", "| wine | 1.5 ± 0.5 |", "| mean rank | 1.0 |"],
        ),
        (
            'scores=NLL methods="plain,last layer" pivot=groups digits=1',
            ["|  | wine |", "| plain | 1.5 ± 0.5 |", "| last layer | 1.5 ± 1.0 |"],
        ),
    ],
)
def test_tables(options: str, rows: list[str]) -> None:
    head, rule, *lines = body(f"toy/full {options}", "result").strip().splitlines()
    assert [head, *lines] == rows
    assert rule == "|" + "---|" * (head.count("|") - 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- value: toy/full wine/Kron/NLL -->", "expected both ends"),
        ("<!-- result: toy/full -->", "expected both ends"),
        ("<!-- /result -->", "expected both ends"),
        ("<!-- result: toy/full --><!-- output: results/toy.txt --><!-- /result -->", "holds another mark"),
        ("1\n\n<!-- values\n1\n-->", "has the line '1'; expected NUMBER = MARK"),
        ("1\n\n<!-- values\n1 = toy wine/plain/NLL\n-->", "expected value: NAME/FORM WHAT FORMAT"),
        ("1\n\n<!-- values\n1 = toy/full wine/Kron/NLL\n-->", "Kron/NLL is not stored; expected such as wine"),
        ("1\n\n<!-- values\n1 = toy/full hardware .3f\n-->", "the format '.3f' does not fit"),
        ("<!-- result: toy/full colour=red --><!-- /result -->", "options of scores="),
        ("<!-- result: toy/full methods=Kron --><!-- /result -->", "'Kron' is not in the table"),
        ("<!-- result: toy/full pivot=yes --><!-- /result -->", "has 2 scores; expected one"),
        ("<!-- result: toy/full scores=NLL pivot=no --><!-- /result -->", "expected one score with pivot=yes or"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(LapwingError, match=message):
        written(text, SOURCES)


@pytest.mark.parametrize(
    ("options", "first", "last", "count"),
    [
        ("", "On a GPU", "plain  9.00", 17),
        (" from=first", "first", "  a note", 6),
        (" from=first to=wine", "first", "wine  plain       1.25          3.0", 3),
        (
            ' after=first to="last layer"',
            "                   NLL  fit / epoch",
            "      last layer  0.75        1,200",
            3,
        ),
        (" after=second from=plain", "plain  9.00", "plain  9.00", 1),
    ],
)
def test_printed_output(options: str, first: str, last: str, count: int) -> None:
    before, fence, *lines, end, after = body(f"results/toy.txt{options}", "output").split("\n")
    assert (before, fence, end, after) == ("", "```text", "```", "")
    assert (lines[0], lines[-1], len(lines)) == (first, last, count)


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ("results/toy.txt wine/plain NLL", "1.25"),
        ('results/toy.txt "wine/last layer" "fit / epoch"', "1,200"),
        ('results/toy.txt "wine/last layer" "fit / epoch" .1f', "1200.0"),
        ("results/toy.txt plain NLL .1f after=second", "9.0"),
        ("results/toy.txt Kron NLL .3f", "0.375"),
        ('results/toy.txt wine/Kron "fit / epoch"', "out of time"),
    ],
)
def test_numbers_of_printed_output(mark: str, text: str) -> None:
    assert body(mark) == text


def test_a_table_of_printed_scores() -> None:
    lines = body("results/toy.txt digits=2", "result").strip().splitlines()
    assert lines == ["|  | NLL | fit s |", "|---|---|---|", "| Kron | 0.38 ± 0.12 | 2.50 ± 0.50 |"]


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("output: results/toy.txt from=third", "no line holds from='third'"),
        ("output: results/toy.txt from=second to=wine", "no line holds to='wine'"),
        ("output: results/toy.txt lines=3", "expected output: FILE.txt, and options of after=, from=, to="),
        ("output: toy/full", "expected output: FILE.txt"),
        ("result: toy", "expected result: NAME/FORM or FILE.txt"),
        ("result: results/toy.txt scores=RMSE", "'RMSE' is not in the table"),
        ("value: results/toy.txt plain", "expected value: FILE.txt ROW COLUMN FORMAT"),
        ("value: results/toy.txt wine/FMGP NLL", "no cell 'NLL' of a row 'wine/FMGP'"),
        ('value: results/toy.txt wine/Kron "fit / epoch" .1f', "the cell is 'out of time'; expected a number"),
        ("result: results/empty.txt", "results/empty.txt: no line has scores"),
        ("value: results/toy.txt wine/plain RMSE", "no cell 'RMSE'"),
        ("value: results/toy.txt wine/plain NLL q", "the format 'q' does not fit"),
    ],
)
def test_mistakes_about_printed_output_are_named(mark: str, message: str) -> None:
    kind, _, text = mark.partition(": ")
    page = f"1\n\n<!-- values\n1 = {text}\n-->" if kind == "value" else f"<!-- {mark} --><!-- /{kind} -->"
    with pytest.raises(LapwingError, match=message):
        written(page, SOURCES)


LISTED = "\n\n<!-- values\n1.5 = toy/full wine/plain/NLL .1f\n3 = toy/full wine/plain/seconds .0f\n-->\n"


@pytest.mark.parametrize("block", ["- 1.5 in\n- 3 s.", "| 1.5 | 3 |", "3\n\n1.5, then 3; not 31.5, 1.53, -3 or 1.5.2"])
def test_a_list_of_values_belongs_to_the_block_above(block: str) -> None:
    assert written(block + LISTED, SOURCES) == block + LISTED


@pytest.mark.parametrize(
    "block", ["1.4 and 3", "1.5 and 3 and 3", "3 and 1.5", "1.5", "1.50 and 3", "-1.5 and 3", "1.5\n\n3"]
)
def test_numbers_that_are_not_those_of_the_list_are_named(block: str) -> None:
    with pytest.raises(LapwingError, match="the block above has"):
        written(block + LISTED, SOURCES)


def test_values_are_written_in_the_block_and_in_the_list() -> None:
    old = "9 of 7\n\n<!-- values\n9 = toy/full units\n7 = toy/full seconds .0f\n-->"
    assert written(old, SOURCES) == old.replace("9", "2").replace("7", "3")


def test_code_is_left_alone() -> None:
    text = "a\n```\n<!-- values\n1 = toy/full x\n-->\n```\nb"
    assert written(text, SOURCES) == text


def test_the_command_writes_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(stored(), result_path(tmp_path / "docs" / "results", "toy", "full"))
    page = tmp_path / "docs" / "page.md"
    page.write_text("7.0\n\n<!-- values\n7.0 = toy/full wine/plain/NLL .1f\n-->\n", encoding="utf-8")
    assert main(["--docs", "--check"]) == 1
    assert "docs/page.md differ from the stored results" in capsys.readouterr().err
    assert main(["--docs"]) == 0
    assert page.read_text(encoding="utf-8") == "1.5\n\n<!-- values\n1.5 = toy/full wine/plain/NLL .1f\n-->\n"
    assert main(["--docs", "--check"]) == 0
    page.write_text("7.0\n\n<!-- values\n7.0 = uci/full x\n-->\n", encoding="utf-8")
    assert main(["--docs", "--check"]) == 1
    assert "docs/page.md: docs/results/uci_full.json does not exist" in capsys.readouterr().err


def test_a_page_may_have_the_list_of_its_values_beside_it(tmp_path: Path) -> None:
    save(stored(), result_path(tmp_path / "docs" / "results", "toy", "full"))
    page, beside = tmp_path / "README.md", tmp_path / "README.values"
    page.write_text("first 7.0\n\n```\n7.0\n```\n\n| 8.0 |\n", encoding="utf-8")
    beside.write_text(
        '7.0 = toy/full wine/plain/NLL .1f\n8.0 = toy/full "wine/last layer/fit / epoch" .1f\n', encoding="utf-8"
    )
    assert refresh(tmp_path, check=True) == [page, beside]
    assert refresh(tmp_path) == [page, beside]
    assert refresh(tmp_path) == []
    written_page = page.read_text(encoding="utf-8")
    assert written_page.startswith("first 1.5\n\n```\n7.0\n```\n\n| ")
    assert "8.0" not in written_page
    page.write_text(written_page.replace("1.5", "1.6"), encoding="utf-8")
    with pytest.raises(LapwingError, match=r"README\.md: .* where the list of its values has '1.5'"):
        refresh(tmp_path)


def test_every_number_of_a_page_with_a_list_beside_it_is_in_the_list(tmp_path: Path) -> None:
    """Settings are given; code, words such as ResNet-18 and the targets of links are no numbers."""
    save(stored(), result_path(tmp_path / "docs" / "results", "toy", "full"))
    page, beside = tmp_path / "README.md", tmp_path / "README.values"
    page.write_text("200 rows: 1.5 for ResNet-18, `9` and [a](b/7.md)\n", encoding="utf-8")
    source = "1.5 = toy/full wine/plain/NLL .1f\n"
    beside.write_text(f"200 = given\n{source}", encoding="utf-8")
    assert refresh(tmp_path) == []
    beside.write_text(source, encoding="utf-8")
    with pytest.raises(LapwingError, match=r'README\.md: the number 200 is not in the list .* as "200 = given"'):
        refresh(tmp_path)


def test_the_pages_of_this_repository_agree_with_the_stored_results() -> None:
    assert refresh(ROOT, check=True) == []


def places_of_numbers(page: Path) -> list[int]:
    """Return the place of a digit of every number that is written from results, and of the settings of a list."""
    blank = lambda piece: " " * len(piece[0]) if piece[0].startswith("```") else piece[0]
    text = pages.PIECES.sub(blank, page.read_text(encoding="utf-8"))  # without examples of marks
    beside = page.with_suffix(".values")
    regions = [match.span(3) for match in pages.REGION.finditer(text)]
    found = {a + match.start() for a, b in regions for match in re.finditer(r"(?<![\w.,])\d", text[a:b])}
    below = [
        (text[: match.start()].rstrip().rfind("\n\n") + 1, match.start(), match[1])
        for match in pages.VALUES.finditer(text)
    ]
    hidden = [match.span() for match in pages.HIDDEN.finditer(text)] if beside.exists() else []
    lists = [*below, (0, len(text), beside.read_text(encoding="utf-8").strip())] if beside.exists() else below
    for start, end, listed in lists:
        for line in listed.split("\n"):
            value = line.partition(" = ")[0]
            start = text.index(value, start, end)
            while any(a <= start < b for a, b in hidden):
                start = text.index(value, start + 1, end)
            digit = re.search(r"\d", value)
            found |= set() if digit is None else {start + digit.start()}
            start += len(value)
    return sorted(found)


MARKED = [page for page in pages.pages(ROOT) if places_of_numbers(page)]


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_number_that_is_altered_is_noticed(page: Path, tmp_path: Path) -> None:
    """Every number of the README, and the first, the last and some others of the other pages."""
    copy = tmp_path / page.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    for folder in ("docs/results", "benchmarks"):
        (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder).symlink_to(ROOT / folder)
    text, places = page.read_text(encoding="utf-8"), places_of_numbers(page)
    if page.with_suffix(".values").exists():
        shutil.copy(page.with_suffix(".values"), copy.with_suffix(".values"))
    copy.write_text(text, encoding="utf-8")
    assert refresh(tmp_path, check=True) == []
    some = places if page.name == "README.md" and page.parent == ROOT else places[:: max(1, len(places) // 3)]
    for place in {*some, places[-1]}:
        copy.write_text(f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}", encoding="utf-8")
        assert not agree(tmp_path), text[place - 60 : place + 20]


def agree(root: Path) -> bool:
    """Return whether ``--docs --check`` would find nothing."""
    try:
        return refresh(root, check=True) == []
    except LapwingError:
        return False


def test_the_front_page_has_generated_numbers() -> None:
    assert len(places_of_numbers(ROOT / "README.md")) > 40
    assert len(MARKED) > 20


def test_the_printed_output_of_the_spine_is_all_that_the_pages_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stored as it was printed, it gives every cost of the README and of the benchmarks."""
    ours, theirs = iter(range(1001, 1100)), iter(range(2001, 2100))
    cannot = {"wide_head": "asks for 32.8 GB", "resnet18_kron": "refuses BatchNorm"}

    def child(_: str, arguments: list[str], __: Any) -> dict[str, Any]:
        name = arguments[-1]
        values = ours if arguments[0] == "-m" else theirs
        can = values is ours or name not in cannot
        figures = {figure: next(values) / 1000 for figure in spine.CASES[name]} if can else {}
        return {"figures": figures, "note": cannot.get(name, "by BackPACK"), "versions": {}}

    monkeypatch.setattr(spine, "run_child", child)
    monkeypatch.setattr("sys.argv", ["spine", "--peer", sys.executable, "--out", str(tmp_path / "spine.json")])
    assert spine.main() == 0
    printed = capsys.readouterr().out
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    (tmp_path / "benchmarks" / "results" / "spine.txt").write_text(printed, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results").symlink_to(ROOT / "docs" / "results")
    for name in ("README.md", "docs/benchmarks.md"):
        for path in (ROOT / name, (ROOT / name).with_suffix(".values")):
            if path.exists():
                shutil.copy(path, tmp_path / name if path.suffix == ".md" else (tmp_path / name).with_suffix(".values"))
    assert refresh(tmp_path) != []
    assert refresh(tmp_path, check=True) == []
    readme, benchmarks = ((tmp_path / name).read_text(encoding="utf-8") for name in ("README.md", "docs/benchmarks.md"))
    assert "| MLP, Kron (the default) | 1 epochs (2) | 1 forwards (2) |" in readme
    assert "| 1.01 |" in benchmarks
    assert "refuses BatchNorm" in benchmarks


# Units of seeds, and the experiments that the engine knows.


def test_a_unit_for_each_name_and_seed() -> None:
    units = seed_units(SimpleNamespace(seed=5, seeds=2), "a/b", "c")
    assert units == ("a/b/5", "a/b/6", "c/5", "c/6")
    assert parted(units[1]) == ("a/b", 6)


def test_rows_become_records_with_their_time() -> None:
    rows = (Row("Kron", {"NLL": 1.5, "fit s": 2.0}, "wine"), Row("plain", {"NLL": 2.5}))
    records = list(records_of(Result("uci", {}, 0, rows, {}), 4))
    assert [(r.group, r.method, r.repeat, r.scores, r.seconds) for r in records] == [
        ("wine", "Kron", 4, {"NLL": 1.5}, 2.0),
        ("uci", "plain", 4, {"NLL": 2.5}, None),
    ]


def test_a_seed_alone_runs_with_that_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: Flights, progress: Progress) -> Result:
        rows = tuple(Row(name, {"NLL": float(settings.seed)}) for name in ("plain", "Kron"))
        return Result("flights", {}, settings.seed, rows * settings.seeds, {})

    monkeypatch.setattr("experiments.flights.run", run)
    settings = Flights(Path(), seeds=3, seed=7)
    records = [r for unit in settings.units() for r in settings.measure(unit, print)]
    assert [(r.method, r.repeat, r.scores["NLL"]) for r in records] == [
        (method, seed, float(seed)) for seed in (7, 8, 9) for method in ("plain", "Kron")
    ]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_keeps_the_contract(name: str) -> None:
    """Both forms are readable from plain values, and the quick one asks for other work than the full one."""
    cls = experiment_class(name)
    assert cls.name == name
    assert cls.title
    for form in (cls.quick(), cls.full()):
        assert built(cls, plain(form)) == form
    assert plain(cls.quick()) != plain(cls.full())
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    assert set(getattr(cls, "choosing", ())) <= names
    assert digest(replace(cls.full(), seed=99)) != digest(cls.full())  # type: ignore[type-var]


def test_unknown_experiments_are_named() -> None:
    with pytest.raises(LapwingError, match="no experiment 'walk'; expected one of"):
        experiment_class("walk")


# Settings from forms, files and options, their hash, and their way to JSON and back.


def test_options_reach_into_nested_settings() -> None:
    settings = overridden(Toy(), ["net.hidden=5,6,7", "link=sampled", "limit=2", "sets=boston"])
    assert settings == Toy(net=Net((5, 6, 7)), link=Link.SAMPLED, limit=2.0, sets=("boston",))


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "wide.toml"
    file.write_text("repeats = 5\n[net]\nrate = 0.25\n", encoding="utf-8")
    settings = from_toml(Toy, file, ["repeats=7", "net.hidden=9"])
    assert settings == Toy(repeats=7, net=Net((9,), 0.25))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("repeats", "expected key=value"),
        ("repeat=3", "repeat is unknown; expected one of seed"),
        ("net.width=3", "net.width is unknown; expected one of hidden, rate"),
        ("seed.x=3", "would be part of a plain value"),
        ("repeats=many", "repeats is 'many'; expected a whole number"),
    ],
)
def test_bad_options_are_refused(option: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        overridden(Toy(), [option])


def test_the_hash_depends_on_what_is_measured_alone() -> None:
    assert digest(Toy()) == digest(Toy(data_dir=Path("elsewhere"), repeats=9))
    changed = [Toy(seed=1), Toy(net=Net(rate=0.25)), Toy(sets=("wine",)), Toy(link=Link.SAMPLED), Toy(limit=1.0)]
    assert len({digest(each) for each in (Toy(), *changed)}) == 6
    assert "data_dir" not in what(Toy())


def test_the_code_version_names_the_experiment_and_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_version(Toy()) == "toy 1"
    monkeypatch.setattr(Toy, "version", 4, raising=False)
    assert code_version(Toy()) == "toy 4"


# Stored results: to JSON and back, joined, and refused where they are damaged or not finite.

HERE = Machine("a processor, 2 cores", {"python": "3.11", "torch": "2.13"}, 1, "python -m experiments toy")
GPU = replace(HERE, hardware="a GPU")


def unit(value: float, machine: Machine = HERE, error: str = "") -> Unit:
    records = () if error else (Record("wine", "Kron, γ", 3, {"NLL": value, "RMSE": 2.0}, 0.5, 2**33),)
    return Unit(records, 1.5, None, machine, "abc", "toy 1", error)


STORED = Stored("toy", "full", {"sets": ["wine"], "limit": None}, 7, {"a": unit(0.1), "b": unit(0.2, GPU)})


def test_results_go_to_json_and_come_back(tmp_path: Path) -> None:
    save(STORED, tmp_path / "new" / "toy_full.json")
    assert load(tmp_path / "new" / "toy_full.json") == STORED
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["toy_full.json"]
    failed = STORED.with_unit("c", unit(0.0, error="DataError: no"))
    assert Stored.from_json(failed.to_json()) == failed
    assert len(failed.records) == 2
    assert Stored.from_json(Stored("toy", "full", {}, 0).to_json()) == Stored("toy", "full", {}, 0)


def test_the_file_does_not_depend_on_the_order_in_which_units_ended() -> None:
    other = replace(STORED, units=dict(reversed(STORED.units.items())))
    assert other.to_json() != STORED.to_json()
    assert other.ordered(["a", "b"]).to_json() == STORED.to_json()
    assert list(other.ordered(["a"]).units) == ["a", "b"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(FileError, match="not finite"):
        replace(STORED, units={"a": unit(value)}).to_json()
    with pytest.raises(FileError, match=r"NLL of wine/Kron, γ/3 is (nan|inf); expected a finite number"):
        checked(unit(value).records)


def test_two_records_of_one_name_are_refused() -> None:
    with pytest.raises(FileError, match="two records of"):
        checked([*unit(1.0).records, *unit(2.0).records])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"units": {}}', '{"uci": {"rows": []}}'])
def test_damaged_files_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "toy_full.json").write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=r"toy_full\.json is not a stored result"):
        load(tmp_path / "toy_full.json")


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        load(tmp_path / "toy_full.json")


def test_parts_keep_their_machines_and_failures_do_not_win() -> None:
    first = replace(STORED, units={"a": unit(0.1), "b": unit(0.0, error="x")})
    second = replace(STORED, units={"a": unit(0.0, error="x"), "b": unit(0.2, GPU)})
    assert join([first, second]) == STORED
    with pytest.raises(FileError, match="nothing to join"):
        join([])


@pytest.mark.parametrize("other", [{"form": "quick"}, {"settings": {}}, {"seed": 3}, {"experiment": "uci"}])
def test_parts_of_different_results_are_not_joined(other: dict[str, object]) -> None:
    with pytest.raises(FileError, match=f"differ in {next(iter(other))}"):
        join([STORED, replace(STORED, **other)])  # type: ignore[arg-type]


# Means, standard errors, ranks and paired differences, against numbers worked out by hand.

NLL = {  # by group and method, over repeats
    ("wine", "plain"): (1.0, 2.0, 6.0),
    ("wine", "Kron"): (0.5, 1.0, 3.0),
    ("yacht", "plain"): (4.0, 8.0),
    ("yacht", "Kron"): (5.0, 6.0),
}
RECORDS = [Record(g, m, i, {"NLL": v}, seconds=2.0 * v) for (g, m), row in NLL.items() for i, v in enumerate(row)]


def test_means_and_standard_errors() -> None:
    summary = summarised(RECORDS)
    cell = summary.rows["wine", "plain"]["NLL"]
    assert (cell.n, cell.mean) == (3, pytest.approx(3.0))
    assert cell.error == pytest.approx(math.sqrt((4 + 1 + 9) / 2 / 3))
    assert summary.rows["yacht", "Kron"]["seconds"].mean == pytest.approx(11.0)
    assert summary.columns == ("NLL", "seconds")


def test_one_repeat_has_no_standard_error() -> None:
    summary = summarised(RECORDS[:1])
    assert summary.rows["wine", "plain"]["NLL"].error is None
    assert as_text(grid(summary)) == "         NLL  seconds\nplain  1.000    2.000"


def test_differences_are_paired_by_repeat() -> None:
    rows = compared(RECORDS, "plain").rows
    assert list(rows) == [("wine", "Kron"), ("yacht", "Kron")]
    cell = rows["wine", "Kron"]["NLL"]  # differences -0.5, -1 and -3
    assert cell.mean == pytest.approx(-1.5)
    assert cell.error == pytest.approx(math.sqrt((1 + 0.25 + 2.25) / 2 / 3))
    with pytest.raises(LapwingError, match="'MAP'; expected one of plain, Kron"):
        compared(RECORDS, "MAP")


def test_a_repeat_without_its_baseline_does_not_count() -> None:
    rows = compared([*RECORDS, Record("wine", "Kron", 7, {"NLL": 100.0})], "plain").rows
    assert rows["wine", "Kron"]["NLL"].n == 3


def test_tables_two_records_of_one_name_are_refused() -> None:
    with pytest.raises(LapwingError, match="two records of"):
        summarised([*RECORDS, RECORDS[0]])


def test_means_and_ranks_over_groups() -> None:
    summary = summarised(RECORDS)
    assert means(summary)["mean", "plain"]["NLL"].mean == pytest.approx((3.0 + 6.0) / 2)
    assert ranks(summary)["mean rank", "plain"]["NLL"].mean == pytest.approx((2 + 2) / 2)
    assert ranks(summary)["mean rank", "Kron"]["NLL"].mean == pytest.approx(1.0)
    equal = summarised([Record("wine", m, 0, {"NLL": 1.0}) for m in ("a", "b", "c")])
    assert ranks(equal)["mean rank", "b"]["NLL"].mean == pytest.approx(2.0)


def test_methods_that_lack_a_group_have_no_mean() -> None:
    summary = summarised([*RECORDS, Record("wine", "SWAG", 0, {"NLL": 1.0})])
    assert ("mean", "SWAG") not in means(summary)


def test_the_table_counts_repeats_where_they_differ() -> None:
    lines = grid(summarised(RECORDS).restricted(columns=["NLL"]))
    assert lines[0] == ["", "", "NLL", "n"]
    assert [line[0] for line in lines] == ["", "wine", "", "yacht", ""]
    assert [line[-1] for line in lines[1:]] == ["3", "3", "2", "2"]
    assert "n" not in grid(summarised(RECORDS).restricted(["yacht"]))[0]


def test_names_choose_and_order() -> None:
    summary = summarised(RECORDS).restricted(["yacht", "wine"], ["Kron"], ["NLL"])
    assert list(summary.rows) == [("yacht", "Kron"), ("wine", "Kron")]
    with pytest.raises(LapwingError, match="'boston' is not in the table; expected some of wine, yacht"):
        summarised(RECORDS).restricted(["boston"])


def test_a_pivot_has_a_column_for_each_method() -> None:
    lines = pivoted(summarised(RECORDS), "NLL", lambda v: f"{v:.1f}")
    assert lines == [["", "plain", "Kron"], ["wine", "3.0 ± 1.5", "1.5 ± 0.8"], ["yacht", "6.0 ± 2.0", "5.5 ± 0.5"]]
    assert as_markdown(lines).splitlines()[1] == "|---|---|---|"


# Settings from plain values: every type, and every mistake with the key, what was seen and what was expected.


@dataclass(frozen=True)
class Kinds:
    count: int
    ratio: float = 0.5
    on: bool = False
    path: Path | None = None
    link: Link = Link.PROBIT
    mode: Literal["a", "b"] = "a"
    pair: tuple[int, str] = (2, "x")
    many: tuple[float, ...] = ()
    net: Net = Net()
    by_name: dict[str, int] | None = None


def test_toml_gives_every_type(tmp_path: Path) -> None:
    file = tmp_path / "kinds.toml"
    file.write_text(
        'count = 3\nratio = 2\non = true\npath = "d"\nlink = "sampled"\nmode = "b"\npair = [5, "y"]\nmany = [1, 2.5]\n'
        "[net]\nhidden = [7]\n[by_name]\nwine = 4\n",
        encoding="utf-8",
    )
    expected = Kinds(3, 2.0, True, Path("d"), Link.SAMPLED, "b", (5, "y"), (1.0, 2.5), Net((7,), 0.5), {"wine": 4})
    settings = built(Kinds, read_toml(file))
    assert settings == expected
    assert isinstance(settings.ratio, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "count is missing; expected a whole number."),
        ({"count": 1, "cuont": 2}, "cuont is unknown; expected one of count, ratio"),
        ({"count": True}, "count is True; expected a whole number."),
        ({"count": 2.0}, "count is 2.0; expected a whole number."),
        ({"count": 1, "on": 1}, "on is 1; expected true or false."),
        ({"count": 1, "ratio": "much"}, "ratio is 'much'; expected a number."),
        ({"count": 1, "ratio": True}, "ratio is True; expected a number."),
        ({"count": 1, "path": 3}, "path is 3; expected a path or none."),
        ({"count": 1, "link": "none"}, "link is 'none'; expected one of probit, sampled."),
        ({"count": 1, "mode": "c"}, "mode is 'c'; expected one of a, b."),
        ({"count": 1, "pair": [1]}, r"pair is \[1\]; expected a list of 2: a whole number, text."),
        ({"count": 1, "many": 2.0}, "many is 2.0; expected a list of numbers."),
        ({"count": 1, "many": [1.0, "x"]}, r"many\[1\] is 'x'; expected a number."),
        ({"count": 1, "net": {"hiden": 2}}, "net.hiden is unknown; expected one of hidden, rate."),
        ({"count": 1, "net": 3}, "net is 3; expected a table with the keys hidden, rate."),
        ({"count": 1, "by_name": {"wine": "x"}}, "by_name is {'wine': 'x'}; expected"),
    ],
)
def test_values_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        built(Kinds, values)


def test_files_that_are_not_toml_are_named(tmp_path: Path) -> None:
    file = tmp_path / "kinds.toml"
    file.write_text("count: 3", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"kinds\.toml is not TOML"):
        read_toml(file)


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int, "3", 3),
        (float, "1e-3", 1e-3),
        (str, "3", "3"),
        (bool, "true", True),
        (Path, "a/b", Path("a/b")),
        (Link, "sampled", Link.SAMPLED),
        (int | None, "none", None),
        (int | None, "4", 4),
        (tuple[str, ...], "last layer, Kron", ("last layer", "Kron")),
        (tuple[str, ...], '["a,b", "c"]', ("a,b", "c")),
        (tuple[int, ...], "5", (5,)),
        (tuple[int, ...], "", ()),
    ],
)
def test_text_of_the_command_line_is_read_by_type(hint: Any, text: str, value: Any) -> None:
    assert parsed(hint, text, "key") == value


@pytest.mark.parametrize(("hint", "text"), [(int, "3.5"), (int, "x"), (bool, "1"), (tuple[int, ...], "1,x")])
def test_text_of_the_wrong_type_is_refused(hint: Any, text: str) -> None:
    with pytest.raises(SettingsError, match="key"):
        parsed(hint, text, "key")
