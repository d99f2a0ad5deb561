"""The progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from lapwing.runtime.threads import ProgressBar, shows_progress


@pytest.mark.parametrize("visible", [False, True])
def test_it_yields_all_items(visible: bool) -> None:
    assert list(ProgressBar(range(4), "learning", visible)) == [0, 1, 2, 3]
    assert list(ProgressBar(["a", "b"], "learning", visible)) == ["a", "b"]
    assert list(ProgressBar([], "learning", visible)) == []


def test_a_bar_shows_its_label_and_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(range(3), "inducing points", visible=True, leave=True)
    for _ in bar:
        bar.show(objective=12.3456789, KL=0.5)
    printed = capsys.readouterr().err
    assert "inducing points: 100%" in printed
    assert "3/3" in printed
    assert "objective=12.346, KL=0.5" in printed


def test_text_is_shown_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(range(3), "learning", visible=True)
    for number in bar:
        bar.show_text(f"loss is {number}")
        assert f"loss is {number}" in capsys.readouterr().err


def test_items_that_an_earlier_run_has_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(ProgressBar(range(2, 5), "learning", visible=True, first=2)) == [2, 3, 4]
    assert "2/5" in capsys.readouterr().err


def test_items_without_a_length(capsys: pytest.CaptureFixture[str]) -> None:
    class Stream:
        def __iter__(self) -> Iterator[int]:
            return iter((1, 2))

    assert list(ProgressBar(Stream(), "learning", visible=True, leave=True)) == [1, 2]
    assert "2it" in capsys.readouterr().err


def test_without_a_bar_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(range(3), "inducing points", visible=False)
    for _ in bar:
        bar.show(objective=1.0)
        bar.show_text("a text")
    assert capsys.readouterr() == ("", "")


def test_a_bar_is_closed_when_work_ends_early(capsys: pytest.CaptureFixture[str]) -> None:
    """The last thing it writes clears its line."""
    for step in ProgressBar(range(9), "learning", visible=True):
        if step == 2:
            break
    printed = capsys.readouterr().err
    assert "learning" in printed
    assert printed.rsplit("\r", 2)[-2].strip() == ""


def test_without_tqdm_it_yields_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    bar = ProgressBar(range(2), "learning", visible=True)
    for _ in bar:
        bar.show(objective=1.0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_bars_are_for_terminals_unless_asked_for(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert shows_progress(None) is terminal
    assert shows_progress(True)
    assert not shows_progress(False)
