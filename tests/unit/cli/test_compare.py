"""``lapwing compare`` ranks as ``lw.compare`` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lapwing as lw
from tests.unit.cli.conftest import FITTED, Ran
from tests.unit.cli.test_fit import classifier

Run = Callable[..., Ran]
BOTH = "compare cli_nets:classifier cli_nets:wide --weights classifier.pt wide.pt"


def test_models_are_ranked_by_their_evidence(run: Run, folder: Path, posterior: Path, other: Path) -> None:
    wide = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    wide.load_state_dict(torch.load(folder / "wide.pt", weights_only=True))
    loaded = {"classifier": lw.load(posterior, classifier(folder)), "wide": lw.load(other, wide.eval())}
    expected = lw.compare(loaded)
    words = f"{BOTH} --posterior classifier.lapwing wide.lapwing"
    facts = run(f"{words} --json").facts
    assert facts["best"] == expected.best
    assert [row["name"] for row in facts["candidates"]] == [row.name for row in expected.candidates]
    for row, candidate in zip(facts["candidates"], expected.candidates, strict=True):
        assert row["log_evidence"] == pytest.approx(candidate.log_evidence, rel=1e-5)
    again = run(f"{BOTH} --posterior classifier.lapwing --posterior wide.lapwing")
    assert again.out.splitlines()[0].split() == str(expected).splitlines()[0].split()


def test_one_model_serves_several_posteriors(run: Run, tmp_path: Path, posterior: Path) -> None:
    last = tmp_path / "classifier.lapwing"  # the same name in another folder
    words = f"{FITTED} --data train.npz --likelihood classification"
    assert run(f"fit {words} --subset last_layer --out {last}").code == 0
    facts = run(f"compare {FITTED} --posterior classifier.lapwing {last} --json").facts
    assert {row["name"] for row in facts["candidates"]} == {"classifier.lapwing", str(last)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{BOTH} --posterior classifier.lapwing", "MODEL was given 2 times and --posterior 1 times; expected as many"),
        (
            "compare cli_nets:classifier --weights classifier.pt wide.pt --posterior classifier.lapwing a b",
            "--weights was given 2 times and --posterior 3 times",
        ),
        (f"{BOTH} --posterior classifier.lapwing classifier.lapwing", "names classifier.lapwing twice"),
        (f"{BOTH} --posterior wide.lapwing classifier.lapwing", "belongs to another model"),
        (f"{BOTH} --posterior classifier.lapwing gone.lapwing", "there is no file gone.lapwing"),
        (
            "compare cli_nets:classifier cli_nets:regressor --weights classifier.pt regressor.pt "
            "--posterior classifier.lapwing regressor.lapwing",
            "different numbers of data",
        ),
    ],
)
def test_what_does_not_match_is_refused(
    words: str, message: str, run: Run, posterior: Path, other: Path, regression: Path
) -> None:
    assert message in run(words).error
