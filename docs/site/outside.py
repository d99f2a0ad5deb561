"""What MkDocs does not do by itself: files outside docs/ in the site, formulas that need no script, doctests as code.

Links such as ``../CONTRIBUTING.md``, ``../experiments/uci.md`` and ``../benchmarks/results/links.txt`` lead out of
docs/, and those of the experiments into it. MkDocs knows files below docs/ alone: these are added to it under the same
path without the dots, and the links are changed. Formulas become MathML, which browsers show by themselves, so that
the site works offline.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
EXPERIMENTS = "experiments/*.md"  # a page beside the code of each experiment; not in the navigation
WIDE = ("results.md", "benchmarks.md")  # tables take the room of the navigation, as those of the experiments do
RESULTS = "benchmarks/results/*.txt"
SOURCES = "docs/tutorials/*.py"
OUT_OF_DOCS = re.compile(
    r"\]\((?P<up>(?:\.\./)+)(?P<path>(?:benchmarks/results/|experiments/|CONTRIBUTING|CHANGELOG|LICENSE)[^)]*)\)"
)
FORMULA = re.compile(r'<(div|span) class="arithmatex">\\[\[(](?P<tex>.*?)\\[\])]</\1>', re.DOTALL)
INTO_DOCS = re.compile(r"\]\((?P<up>(?:\.\./)*)docs/(?P<path>[^)]+)\)")


class Doctests(Extension, Preprocessor):
    """Show the lines of a doctest in a docstring as a block of code, up to the next empty line."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (the name that Markdown calls)
        md.preprocessors.register(self, "doctests", 100)  # before fenced blocks are read

    def run(self, lines: list[str]) -> list[str]:
        new, fenced, example = list[str](), False, False
        for line in lines:
            fenced ^= line.lstrip().startswith("```") and not example
            if line.startswith(">>> ") and not fenced and not example:
                new.append("```python")
                example = True
            elif example and not line.strip():
                new.append("```")
                example = False
            new.append(line)
        return [*new, "```"] if example else new


def on_config(config: Any) -> Any:
    """Add what turns doctests into code."""
    config.markdown_extensions.append(Doctests())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files from outside docs/."""
    for path in sorted([*(ROOT / name for name in PAGES), *ROOT.glob(EXPERIMENTS), *ROOT.glob(RESULTS)]):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for path in sorted(ROOT.glob(SOURCES)):
        files.append(File.generated(config, path.relative_to(ROOT / "docs").as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links that lead out of docs/, and those of a page from outside that lead into it."""
    path = page.file.src_uri
    if path in WIDE or path.startswith("experiments/"):
        page.meta["hide"] = ["navigation"]
    if path in PAGES or path.startswith("experiments/"):
        return INTO_DOCS.sub(lambda link: f"]({link['up']}{link['path']})", markdown)
    return OUT_OF_DOCS.sub(lambda link: f"]({'../' * path.count('/')}{link['path']})", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Replace formulas by MathML."""
    return FORMULA.sub(lambda found: _formula(html.unescape(found["tex"]), found[1] == "div"), content)


def _formula(tex: str, block: bool) -> str:
    return convert(tex, display="block" if block else "inline")
