"""Pictures inside a page."""

from __future__ import annotations

import re
from functools import cache

import matplotlib

from lapwing.plots import COLOURS, INK, new_axis
from lapwing.report.page import inline_svg


@cache
def drawn(name: str = "first") -> str:
    ax = new_axis(size=(3, 2))
    ax.plot([0, 1], [1, 0], color=COLOURS[1], label="a < b & c")
    ax.axvline(0.5, color=INK)
    ax.set(xlabel="$\\alpha$ & x")
    ax.legend()
    return inline_svg(name, ax, 'A line, "falling" & <straight>.')


def test_equal_figures_give_equal_text_with_ids_of_their_own() -> None:
    first, again, second = drawn(), drawn.__wrapped__(), drawn("second")
    assert first == again
    ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', first))
    assert used <= ids[0]


def test_a_picture_is_described_and_takes_the_colours_of_the_page() -> None:
    text = drawn()
    assert text.startswith("<svg")
    assert 'role="img"' in text
    assert "A line, &quot;falling&quot; &amp; &lt;straight&gt;." in text
    assert "a &lt; b &amp; c" in text
    assert "currentColor" in text
    assert "var(--c1)" in text
    assert not re.search("#000000|" + "|".join((INK, *COLOURS)), text)
    for unwanted in ("<?xml", "<!DOCTYPE", "<metadata", "<style", "Date", "matplotlib.org"):
        assert unwanted not in text


def test_settings_of_matplotlib_stay() -> None:
    before = dict(matplotlib.rcParams)
    drawn("third")
    assert dict(matplotlib.rcParams) == before
