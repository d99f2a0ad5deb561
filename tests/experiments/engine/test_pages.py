"""Regions of pages are written from results, and a page that differs is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.engine.contract import Record
from experiments.engine.machine import Machine
from experiments.engine.pages import Sources, refresh, written
from experiments.engine.store import Stored, Unit, result_path, save
from lapwing.errors import LapwingError

ROOT = Path(__file__).parents[3]
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
        ("<!-- /result -->", "expected both ends"),
        ("<!-- value: toy/full a --><!-- value: toy/full b --><!-- /value -->", "holds another mark"),
        ("<!-- value: toy wine/plain/NLL --><!-- /value -->", "expected value: NAME/FORM WHAT FORMAT"),
        ("<!-- value: toy/full wine/Kron/NLL --><!-- /value -->", "wine/Kron/NLL is not stored; expected such as wine"),
        ("<!-- value: toy/full hardware .3f --><!-- /value -->", "the format '.3f' does not fit"),
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
    kind = mark.partition(":")[0]
    with pytest.raises(LapwingError, match=message):
        written(f"<!-- {mark} --><!-- /{kind} -->", SOURCES)


def test_a_page_with_printed_output_is_checked(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("a\n<!-- output: toy.txt -->\n```text\nold\n```\n<!-- /output -->\nb\n", encoding="utf-8")
    with pytest.raises(LapwingError, match=r"docs/page.md: toy.txt does not exist"):
        refresh(tmp_path, check=True)
    (tmp_path / "toy.txt").write_text("new\n", encoding="utf-8")
    assert refresh(tmp_path, check=True) == [page]
    assert "old" in page.read_text(encoding="utf-8")
    assert refresh(tmp_path) == [page]
    assert page.read_text(encoding="utf-8").split("\n")[2:5] == ["```text", "new", "```"]
    assert refresh(tmp_path, check=True) == []


def test_an_open_region_of_printed_output_is_named() -> None:
    region = "<!-- output: results/toy.txt -->\n```text\n```\n"
    for text in (region, region + region + "<!-- /output -->"):
        with pytest.raises(LapwingError, match="expected"):
            written(text, SOURCES)


def test_code_is_left_alone() -> None:
    text = "a\n```\n<!-- value: toy/full x -->\n```\nb"
    assert written(text, SOURCES) == text


def test_the_command_writes_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(stored(), result_path(tmp_path / "docs" / "results", "toy", "full"))
    page = tmp_path / "docs" / "page.md"
    page.write_text("<!-- value: toy/full wine/plain/NLL .1f -->7.0<!-- /value -->\n", encoding="utf-8")
    assert main(["--docs", "--check"]) == 1
    assert "docs/page.md differ from the stored results" in capsys.readouterr().err
    assert main(["--docs"]) == 0
    assert page.read_text(encoding="utf-8") == "<!-- value: toy/full wine/plain/NLL .1f -->1.5<!-- /value -->\n"
    assert main(["--docs", "--check"]) == 0
    page.write_text("<!-- value: uci/full x -->7.0<!-- /value -->\n", encoding="utf-8")
    assert main(["--docs", "--check"]) == 1
    assert "docs/page.md: docs/results/uci_full.json does not exist" in capsys.readouterr().err


def test_the_pages_of_this_repository_agree_with_the_stored_results() -> None:
    assert refresh(ROOT, check=True) == []
