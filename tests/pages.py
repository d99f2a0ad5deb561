"""The pages under docs/ and beside the experiments; the Python examples of a page run in one namespace.

What follows the comment ``<!-- needs: integrations -->`` needs packages that `make test` does not install: examples
before it run in tests/unit/test_docs.py, and pages that have it run as a whole in `make test-integrations`
(tests/integrations/test_docs.py).
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


def examples(page: Path, integrations: bool = True) -> list[tuple[int, str]]:
    """The blocks of a page, each with the line that it starts on; or those that need no integrations."""
    text = page.read_text(encoding="utf-8")
    shown = text if integrations else text.partition(NEEDS_INTEGRATIONS)[0]
    return [(shown.count("\n", 0, found.start(1)), found.group(1)) for found in BLOCK.finditer(shown)]


def pages_with_examples(integrations: bool) -> list[Path]:
    """The pages that have examples for the packages of the integrations, or those that have some for none."""
    if integrations:
        return [page for page in PAGES if NEEDS_INTEGRATIONS in page.read_text(encoding="utf-8")]
    return [page for page in PAGES if examples(page, integrations)]


def run_examples(page: Path, integrations: bool) -> None:
    """Run the examples of a page one after another."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for line, source in examples(page, integrations):
            # Blank lines before the code make a traceback point at the line of the page.
            exec(compile("\n" * line + source, str(page), "exec"), namespace)
