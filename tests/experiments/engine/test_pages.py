"""Regions of pages are written from results, and a page that differs is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.engine.contract import Record
from experiments.engine.machine import Machine
from experiments.engine.pages import refresh, written
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


def body(mark: str, kind: str = "value") -> str:
    text = written(f"before <!-- {kind}: {mark} -->old<!-- /{kind} --> after", lambda name, form: stored())
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
        written(text, lambda name, form: stored())


def test_code_is_left_alone() -> None:
    text = "a\n```\n<!-- value: toy/full x -->\n```\nb"
    assert written(text, lambda name, form: stored()) == text


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
