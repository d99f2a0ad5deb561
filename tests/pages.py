"""The pages under docs/ and beside the experiments; the Python examples of a page run in one namespace.

A page with the comment ``<!-- needs: integrations -->`` needs packages that `make test` does not install: its examples
run in `make test-integrations` (tests/integrations/test_docs.py), those of all other pages in tests/unit/test_docs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

DOCS = Path(__file__).parents[1] / "docs"
EXPERIMENTS = DOCS.parent / "experiments"
PAGES = sorted([*DOCS.rglob("*.md"), *EXPERIMENTS.rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS_INTEGRATIONS = "<!-- needs: integrations -->"


def named(page: Path) -> str:
    return page.relative_to(DOCS if DOCS in page.parents else DOCS.parent).as_posix()


def examples(page: Path) -> list[tuple[int, str]]:
    """The blocks of a page, each with the line that it starts on."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)), found.group(1)) for found in BLOCK.finditer(text)]


def pages_with_examples(integrations: bool) -> list[Path]:
    """The pages whose examples need the packages of the integrations, or those whose examples do not."""
    return [
        page
        for page in PAGES
        if examples(page) and (NEEDS_INTEGRATIONS in page.read_text(encoding="utf-8")) == integrations
    ]


def run_examples(page: Path) -> None:
    """Run the examples of a page one after another."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for line, source in examples(page):
            # Blank lines before the code make a traceback point at the line of the page.
            exec(compile("\n" * line + source, str(page), "exec"), namespace)
