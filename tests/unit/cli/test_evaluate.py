"""``lapwing evaluate`` gives the scores of ``posterior.evaluate`` and ``lw.evaluate``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import lapwing as lw
from tests.unit.cli.conftest import FITTED, Ran
from tests.unit.cli.test_fit import classifier, tensors

Run = Callable[..., Ran]
EVALUATE = f"evaluate {FITTED} --posterior classifier.lapwing"


def test_one_posterior_is_scored_beside_the_plain_network(run: Run, folder: Path, posterior: Path) -> None:
    loaded = lw.load(posterior, classifier(folder))
    expected = loaded.evaluate([tensors(folder / "test.npz")])
    facts = run(f"{EVALUATE} --data test.npz --json").facts
    scores = facts["evaluation"]["scores"]
    assert list(scores) == [row.name for row in expected.rows]
    for row in expected.rows:
        assert scores[row.name]["posterior"]["value"] == pytest.approx(row.posterior.value, rel=1e-4, abs=1e-6)
        assert scores[row.name]["plain"]["value"] == pytest.approx(row.plain.value, rel=1e-4, abs=1e-6)
    printed = run(f"{EVALUATE} --data test.csv --target kind --drop id").out
    assert "(0 = bird, 1 = cat, 2 = dog)" in printed
    assert "plain network" in printed


def test_several_posteriors_are_ranked_with_one_plain_network(run: Run, tmp_path: Path, posterior: Path) -> None:
    last = tmp_path / "last.lapwing"
    words = f"fit {FITTED} --data train.npz --likelihood classification --subset last_layer --out {last}"
    assert run(words).code == 0
    rows = run(f"{EVALUATE} {last} --data test.npz --json").facts["evaluation"]["rows"]
    assert {row["name"] for row in rows} == {"classifier", "last", "plain network"}
    values = [row["scores"]["nll"]["value"] for row in rows]
    assert values == sorted(values)


def test_networks_without_error_bars_are_named_as_such(run: Run, tmp_path: Path, posterior: Path) -> None:
    words = f"fit {FITTED} --data train.npz --likelihood classification --method map_only --out"
    plain, scaled = tmp_path / "map.lapwing", tmp_path / "scaled.lapwing"
    assert run(f"{words} {plain}").code == run(f"{words} {scaled} --validation test.npz").code == 0
    rows = run(f"{EVALUATE} {plain} {scaled} --data test.npz --json").facts["evaluation"]["rows"]
    assert {row["name"] for row in rows} == {
        "classifier", "map (plain network)", "scaled (plain network with a temperature)",
    }  # fmt: skip


def test_seeds_change_the_bootstrap_alone(run: Run, posterior: Path) -> None:
    ran = [run(f"{EVALUATE} --data test.npz --json --seed {seed}").facts for seed in (1, 1, 2)]
    nll = [each["evaluation"]["scores"]["nll"]["posterior"] for each in ran]
    assert nll[0] == nll[1]
    assert nll[0]["value"] == nll[2]["value"]
    assert nll[0]["low"] != nll[2]["low"]


def test_regression_has_intervals_at_the_level(run: Run, regression: Path) -> None:
    words = "evaluate cli_nets:regressor --weights regressor.pt --posterior regressor.lapwing --data numbers.npz"
    facts = run(f"{words} --level 0.5 --json").facts
    assert facts["evaluation"]["level"] == 0.5
    assert facts["evaluation"]["scores"]["coverage"]["target"] == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data gone.npz", "there is no file gone.npz"),
        ("--data test.csv --drop id,kind", "and no target; expected one. Say which: --target NAME."),
        ("--data numbers.npz", "expected whole class numbers"),
        ("--data test.npz --posterior wide.lapwing", "belongs to another model"),
    ],
)
def test_bad_input_is_refused_in_a_line(options: str, message: str, run: Run, posterior: Path, other: Path) -> None:
    assert message in run(f"{EVALUATE} {options}").error
