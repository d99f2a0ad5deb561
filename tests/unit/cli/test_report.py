"""``lapwing report`` writes the page of ``posterior.report``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import lapwing as lw
from tests.unit.cli.conftest import FITTED, Ran
from tests.unit.cli.test_fit import classifier, tensors

Run = Callable[..., Ran]
REPORT = f"report {FITTED} --posterior classifier.lapwing --data test.npz"


def test_the_page_names_its_command_and_has_the_verdict_of_the_library(
    run: Run, folder: Path, tmp_path: Path, posterior: Path
) -> None:
    out = tmp_path / "report.html"
    words = f"{REPORT} --seed 4 --out {out}"
    facts = run(f"{words} --json").facts
    loaded = lw.load(posterior, classifier(folder))
    expected = loaded.evaluate([tensors(folder / "test.npz")], resamples=10)["nll"].posterior.value
    page = out.read_text()
    assert facts["out"] == str(out)
    assert f"lapwing {words} --json" in page
    assert "cli_nets:classifier" in page
    nll = facts["report"]["evaluation"]["scores"]["nll"]["posterior"]["value"]
    assert nll == pytest.approx(expected, rel=1e-4)
    assert facts["verdict"] in page.replace("&#39;", "'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--out report.pdf", "--out is 'report.pdf'; expected a name that ends in .html or .htm."),
        ("--out no/report.html", "there is no folder no."),
        ("--out report.html --data gone.npz", "there is no file gone.npz"),
        ("--out report.html --posterior gone.lapwing", "there is no file gone.lapwing"),
    ],
)
def test_bad_input_is_refused_in_a_line(options: str, message: str, run: Run, posterior: Path) -> None:
    assert message in run(f"{REPORT} {options}").error
