"""No registered method is left out of a suite without a reason, and each has a section of a page and a cost."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.methods.base import Method
from lapwing.registry import METHODS, find_method
from tests.conformance import declared

FOLDER = Path(__file__).parents[2] / "docs" / "methods"
PAGES = [page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md"))]


@pytest.mark.parametrize("suite", declared.SUITES)
@pytest.mark.parametrize("name", METHODS)
def test_a_suite_tries_the_method_or_the_method_says_why_not(suite: str, name: str) -> None:
    tried = any(entry.split()[0] == name for entry in declared.SUITES[suite])
    assert tried or declared.skipped(suite, name), (
        f"the suite {suite!r} does not try {name!r}; declare in its class where it is exact, or never_exact=..."
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_exact_somewhere_or_says_why_not(name: str) -> None:
    declaration = declared.declaration(name)
    assert bool(declaration.exact) != bool(declaration.never_exact)


def test_a_new_method_is_tried_without_a_line_of_test(monkeypatch: pytest.MonkeyPatch) -> None:
    class Undeclared:
        def fit(self, *_: Any) -> Any:
            raise NotImplementedError

    class Declared(lw.Full):
        pass

    monkeypatch.setitem(METHODS, "undeclared", Undeclared)
    monkeypatch.setitem(METHODS, "declared", Declared)
    assert {"undeclared", "declared"} <= set(declared.small_names())
    assert isinstance(declared.small_method("undeclared", nn.Linear(1, 1)), Undeclared)
    assert "declared" in declared.lawful_entries()
    assert "undeclared" not in declared.exact_entries()
    assert declared.skipped("exact", "undeclared") == ""  # so that the first test of this file fails


@pytest.mark.parametrize("name", METHODS)
def test_a_name_stands_for_the_method_with_its_default_settings(name: str) -> None:
    assert find_method(name) == METHODS[name]()


@pytest.mark.parametrize("name", METHODS)
def test_one_page_has_a_section_of_the_method_and_its_docstring_names_every_setting(name: str) -> None:
    heading = re.compile(rf"^##? {METHODS[name].__name__}$", re.MULTILINE)
    (_,) = (text for text in PAGES if heading.search(text))
    described = re.findall(r"^ {8}(\w+): ", METHODS[name].__doc__ or "", re.MULTILINE)
    assert [each.name for each in dataclasses.fields(METHODS[name]) if each.init and each.name not in described] == []


@pytest.mark.parametrize("name", METHODS)
def test_a_method_knows_its_cost(name: str) -> None:
    assert METHODS[name].cost is not Method.cost
    cost = lw.check(nn.Sequential(nn.Linear(3, 2), nn.Dropout()).eval(), torch.randn(4, 3), data=500).costs[
        METHODS[name].__name__
    ]
    assert cost.supported
    assert cost.stored >= 0
    assert 0 < cost.fit_epochs < float("inf")
