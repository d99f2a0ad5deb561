"""The documentation site has every page in its navigation, and every public name with an example in its reference."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lapwing as lw

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
ENTRIES = {
    name.rpartition(".")[2]
    for page in (DOCS / "reference").glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}


def public() -> Iterator[tuple[str, Any]]:
    """Every public name with its object: those of ``lw`` itself and of its namespaces."""
    for name in lw.__all__:
        value = getattr(lw, name)
        if inspect.ismodule(value):
            yield from ((f"{name}.{each}", getattr(value, each)) for each in value.__all__)
        else:
            yield name, value


NAMES = dict(public())
MEMBERS = {
    f"Fitted.{name}": getattr(lw.Fitted, name)
    for name in dir(lw.Fitted)
    if not name.startswith("_") and inspect.isfunction(getattr(lw.Fitted, name))
}


def test_every_page_is_in_the_navigation() -> None:
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert not {page for page in pages if not re.search(rf"(?:- |: ){re.escape(page)}$", NAVIGATION, re.MULTILINE)}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_entry_in_the_reference(name: str) -> None:
    assert name.rpartition(".")[2] in ENTRIES


def test_a_posterior_inherits_no_members() -> None:
    """The site lists the members of a class without those that it inherits."""
    assert {member.__qualname__.partition(".")[0] for member in MEMBERS.values()} == {"Fitted"}


@pytest.mark.parametrize("name", {**NAMES, **MEMBERS})
def test_every_public_name_has_an_example(name: str) -> None:
    assert ">>>" in (inspect.getdoc({**NAMES, **MEMBERS}[name]) or "")
