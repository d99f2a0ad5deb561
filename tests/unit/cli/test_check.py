"""``lapwing check`` prints what ``lw.check`` reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lapwing as lw
from tests.unit.cli.conftest import FITTED, Ran
from tests.unit.cli.test_fit import classifier, tensors

Run = Callable[..., Ran]


def test_the_report_is_that_of_the_library(run: Run, folder: Path) -> None:
    expected = lw.check(classifier(folder), tensors(folder / "train.npz")[0])
    ran = run(f"check {FITTED} --data train.npz")
    assert ran.out == f"train.npz: 40 rows, inputs 'x'\n{expected}\n".replace("timed=True", "--timed")
    facts = run(f"check {FITTED} --data train.npz --json").facts
    assert facts["weights"] == expected.weights == 4 * 5 + 5 + 5 * 3 + 3
    assert facts["methods"]["Kron"]["stored"] == expected.costs["Kron"].stored
    assert facts["recommended"]["method"] == "Kron"


def test_subset_rows_and_batches_of_a_loader(run: Run) -> None:
    facts = run(f"check {FITTED} --data cli_nets:make_loader --subset last_layer --json").facts
    assert facts["weights"] == 5 * 3 + 3
    assert "30 data" in run(f"check {FITTED} --data cli_nets:make_loader").out


def test_weights_are_not_needed(run: Run) -> None:
    assert run("check cli_nets:classifier --data train.npz").code == 0
