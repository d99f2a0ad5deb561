"""The Python examples of pages that need the packages of the integrations run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import named, pages_with_examples, run_examples


@pytest.mark.filterwarnings("default")  # those of the packages are no errors of Lapwing
@pytest.mark.parametrize("page", pages_with_examples(integrations=True), ids=named)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples may write files
    run_examples(page, integrations=True)
