"""What MkDocs does not do by itself: files outside docs/, notebooks, formulas, doctests as code, redirects.

Links such as ``../CONTRIBUTING.md``, ``../experiments/uci.md`` and ``../benchmarks/results/links.txt`` lead out of
docs/, and those of the experiments into it. MkDocs knows files below docs/ alone: these are added to it under the same
path without the dots, and the links are changed. Formulas become MathML, which browsers show by themselves, so that
the site works offline. redirects.txt has a line "OLD NEW" for each page that has moved, and for each heading (OLD is
"page.md#heading") that has moved elsewhere than the other headings of its page; a NEW that does not exist is a warning.
"""

from __future__ import annotations

import base64
import html
import json
import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
EXPERIMENTS = "experiments/*.md"  # a page beside the code of each experiment; not in the navigation
RESULTS = "benchmarks/results/*.txt"
SOURCES = "docs/tutorials/*.py"
NOTEBOOKS = "docs/notebooks/*.ipynb"  # as `make notebooks` has executed them
TO_NOTEBOOK = re.compile(r"(\]\((?:(?:\.\./)*notebooks/)?\w+)\.ipynb\)")
OUT_OF_DOCS = re.compile(
    r"\]\((?P<up>(?:\.\./)+)(?P<path>(?:benchmarks/results/|experiments/|CONTRIBUTING|CHANGELOG|LICENSE)[^)]*)\)"
)
FORMULA = re.compile(r'<(div|span) class="arithmatex">\\[\[(](?P<tex>.*?)\\[\])]</\1>', re.DOTALL)
REDIRECTS = [line.split() for line in (Path(__file__).parent / "redirects.txt").read_text("utf-8").splitlines()]
MOVED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title>
<noscript><meta http-equiv="refresh" content="0; url={new}"></noscript>
<script>const at = {headings}[location.hash.slice(1)]; location.replace(at || "{new}")</script>
</head><body><a href="{new}">This page has moved.</a></body></html>
"""
MOVED_HEADINGS = "<script>{{const at = {headings}[location.hash.slice(1)]; if (at) location.replace(at)}}</script>"
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
    for path in sorted(ROOT.glob(NOTEBOOKS)):
        for name, content in notebook_page(path):
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def notebook_page(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the pictures of a notebook and its Markdown, each with the name of its file."""
    page, pictures = [], 0
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        page.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))
        if printed:
            page.append(f"```text\n{printed}```")
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                pictures += 1
                yield f"{path.stem}_{pictures}.png", base64.b64decode(output["data"]["image/png"])
                page.append(f"![What the code above draws]({path.stem}_{pictures}.png)")
    title, *rest = page[0].split("\n", 1)
    page[0] = f'{title}\n\n<a href="{path.name}" download>Download the notebook</a>\n{"".join(rest)}'
    yield f"{path.stem}.md", "\n\n".join(page)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links that lead out of docs/, and those of a page from outside that lead into it."""
    path, markdown = page.file.src_uri, TO_NOTEBOOK.sub(r"\1.md)", markdown)
    if path in PAGES or path.startswith("experiments/"):
        return INTO_DOCS.sub(lambda link: f"]({link['up']}{link['path']})", markdown)
    return OUT_OF_DOCS.sub(lambda link: f"]({'../' * path.count('/')}{link['path']})", markdown)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Replace formulas by MathML, and lead headings that have moved to their new places."""
    content = FORMULA.sub(lambda found: _formula(html.unescape(found["tex"]), found[1] == "div"), content)
    headings = _moved_headings(page.file.src_uri)
    return content + MOVED_HEADINGS.format(headings=json.dumps(headings)) if headings else content


def on_post_build(config: Any) -> None:
    """Write a page in the place of each page that has moved; warn of new places that do not exist."""
    site = Path(config.site_dir)
    for old, new in REDIRECTS:
        page, _, heading = _built(new).partition("#")
        if not (site / page).exists() or (heading and f'id="{heading}"' not in (site / page).read_text("utf-8")):
            logging.getLogger("mkdocs.plugins").warning(f"redirects.txt: {new} does not exist")
        if "#" not in old:
            path = site / _built(old)
            if path.exists():
                logging.getLogger("mkdocs.plugins").warning(f"redirects.txt: {old} is a page")
            path.parent.mkdir(parents=True, exist_ok=True)
            headings = json.dumps(_moved_headings(old))
            path.write_text(MOVED.format(new=_between(old, new), headings=headings), encoding="utf-8")


def _moved_headings(page: str) -> dict[str, str]:
    """Return the links from a page to the new places of its former headings."""
    begin = f"{page}#"
    return {old.removeprefix(begin): _between(page, new) for old, new in REDIRECTS if old.startswith(begin)}


def _between(old: str, new: str) -> str:
    page, mark, heading = _built(new).partition("#")
    return posixpath.relpath(page, posixpath.dirname(old) or ".") + mark + heading


def _built(page: str) -> str:
    """Return the path in the site of a page, with its heading."""
    return re.sub(r"\.md(?=#|$)", ".html", page.replace("README.md", "index.md"))


def _formula(tex: str, block: bool) -> str:
    return convert(tex, display="block" if block else "inline")
