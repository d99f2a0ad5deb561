"""A bar for long work."""

from __future__ import annotations

import sys

import pytest

from lapwing.core.progress import Steps


@pytest.mark.parametrize("shown", [False, True])
def test_it_counts(shown: bool) -> None:
    assert list(Steps(4, "learning", shown)) == [0, 1, 2, 3]
    assert list(Steps(0, "learning", shown)) == []


def test_a_bar_shows_its_label_and_what_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps(3, "inducing points", shown=True)
    for _ in steps:
        steps.show(objective=12.3456789, KL=0.5)
    assert steps._bar.postfix == "objective=12.346, KL=0.5"
    assert steps._bar.n == 3
    assert "inducing points" in capsys.readouterr().err


def test_without_a_bar_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps(3, "inducing points", shown=False)
    for _ in steps:
        steps.show(objective=1.0)
    assert capsys.readouterr() == ("", "")


def test_a_bar_is_closed_when_work_ends_early() -> None:
    steps = Steps(9, "learning", shown=True)
    for step in steps:
        if step == 2:
            break
    assert steps._bar.disable


def test_without_tqdm_it_counts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    steps = Steps(2, "learning", shown=True)
    for _ in steps:
        steps.show(objective=1.0)
    assert capsys.readouterr().err == ""
