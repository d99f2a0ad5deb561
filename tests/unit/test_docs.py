"""Every Python example under docs/ runs, every link leads somewhere, every method page has the same sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lapwing.registry import METHODS
from tests.pages import DOCS, PAGES, named, pages_with_examples, run_examples

LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
SECTIONS = ["What it computes", "When it is exact", "Cost", "Settings", "Example", "Pitfalls", "Reference"]


@pytest.mark.parametrize("page", pages_with_examples(integrations=False), ids=named)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples may write files
    run_examples(page)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", sorted((DOCS / "methods").glob("*.md")), ids=named)
def test_method_pages_have_the_same_sections(page: Path) -> None:
    matches = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert matches == SECTIONS


def test_every_method_has_a_page() -> None:
    assert set(METHODS) == {path.stem for path in (DOCS / "methods").glob("*.md")}
