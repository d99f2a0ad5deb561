"""The documentation site in headless Chromium, opened from its folder: widths, requests, search, moved pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import Chromium, browser

SITE = Path(__file__).parents[2] / "site"
PAGES = sorted(path for path in SITE.rglob("*.html") if "This page has moved" not in path.read_text(encoding="utf-8"))
CLIPPED = """[...document.querySelectorAll('.md-content pre, .md-content pre > code')].filter(
  e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX != 'visible').map(e => e.textContent)"""
BROKEN = "[...document.images].filter(e => !e.naturalWidth).map(e => e.src)"


@pytest.fixture(scope="module")
def page() -> Iterator[Chromium]:
    with browser() as opened:
        yield opened


def show(page: Chromium, address: str, width: int) -> list[str]:
    """Show a page of the site at this width; return the addresses outside that it asked for."""
    page.events.clear()
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600)
    page.call("Page.navigate", url=f"{SITE.resolve().as_uri()}/{address}")
    page.wait_for("Page.loadEventFired")
    asked = [each["params"]["request"]["url"] for each in page.events if each["method"] == "Network.requestWillBeSent"]
    return [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]


def eventually(page: Chromium, expression: str) -> Any:
    """Return the value of an expression, once it is true."""
    for _ in range(100):
        if found := page.value(expression):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{expression} is never true")


def test_the_site_is_built() -> None:
    assert len(PAGES) > 60


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(SITE).as_posix())
def test_a_page_fits(path: Path, width: int, page: Chromium) -> None:
    assert show(page, path.relative_to(SITE).as_posix(), width) == []
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value(BROKEN) == []
    if width == 1280:  # on a phone code scrolls by itself
        assert page.value(CLIPPED) == []


def test_search_works_from_the_folder(page: Chromium) -> None:
    show(page, "index.html", 1280)
    field = "document.querySelector('[data-md-component=search-query]')"
    page.value(f"document.querySelector('[data-md-toggle=search]').click(); {field}.focus()")
    eventually(page, "document.querySelector('.md-search-result__meta').textContent.includes('Type to start')")
    page.call("Input.insertText", text="conformal")
    page.call("Input.dispatchKeyEvent", type="keyUp", key="l")
    assert eventually(page, "document.querySelectorAll('.md-search-result__item').length") >= 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("plots.html", "/gallery.html"),
        ("methods/kron.html", "/methods/weight_space.html#kron"),
        ("methods/kron.html#many-outputs", "/methods/weight_space.html#many-outputs"),
        ("choosing.html#which-weights", "/reference/subnetworks.html"),
    ],
)
def test_old_addresses_lead_to_new_ones(old: str, new: str, page: Chromium) -> None:
    show(page, old, 1280)
    eventually(page, f"location.href.endsWith('{new}')")
