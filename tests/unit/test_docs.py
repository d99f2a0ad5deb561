"""Every Python example under docs/ runs, every link leads somewhere, every method page has the same sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lapwing.registry import METHODS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
SECTIONS = ["What it computes", "When it is exact", "Cost", "Settings", "Example", "Pitfalls", "Reference"]


def named(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def examples(page: Path) -> list[tuple[int, str]]:
    """The blocks of a page, each with the line that it starts on."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)), found.group(1)) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=named)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples may write files
    namespace: dict[str, object] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for line, source in examples(page):
            # Blank lines before the code make a traceback point at the line of the page.
            exec(compile("\n" * line + source, str(page), "exec"), namespace)


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
