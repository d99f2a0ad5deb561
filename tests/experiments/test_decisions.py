"""Simulations of the guarantees, in a tiny form that needs no data folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.decision_tasks import simulated
from experiments.decisions import Decisions
from experiments.options import silent
from lapwing.demo.training import TrainingSettings
from lapwing.errors import LapwingError

TINY = Decisions(
    sets=("waves", "waves, thin", "cancer"), seeds=1, draws=60, calibration=60, rows=120,
    recipe=TrainingSettings(hidden=(5,), epochs=4),
)  # fmt: skip


def test_units_are_those_of_the_settings() -> None:
    assert TINY.units() == ("guarantees/waves/0", "guarantees/waves, thin/0", "guarantees/cancer/0")
    sets = {unit.split("/")[1].split(",")[0] for unit in Decisions.full().units() if unit.startswith("guarantees")}
    assert len(sets) >= 6


@pytest.mark.parametrize("name", ["waves", "cancer"])
def test_guarantees_hold_over_draws(name: str) -> None:
    """Sixty draws from one pool: coverage within four of its own standard errors, and 1/(n + 1) above at most."""
    scores = {record.method: record.scores for record in TINY.measure(f"guarantees/{name}/0", silent)}
    sized = {method: each for method, each in scores.items() if "coverage" in each}
    assert sorted(sized) == (["constant", "scaled"] if name == "waves" else ["adaptive", "threshold"])
    for each in sized.values():
        assert -4 * each["error"] <= each["coverage"] - TINY.level <= 4 * each["error"] + 1 / 61
    for method, each in scores.items():
        if method.startswith("ood"):
            assert each["false alarms"] <= TINY.rate + 4 * each["error"]
    assert scores["abstain"]["violations"] <= 0.05 + 4 * (0.05 * 0.95 / TINY.draws) ** 0.5


def test_a_thin_table_leaves_out_training_rows_only() -> None:
    whole, thin = (
        simulated(name, None, 200, TrainingSettings(hidden=(3,), epochs=1), 0) for name in ("waves", "waves, thin")
    )
    assert len(whole.x) == len(thin.x) == 400
    assert thin.posterior.base.statistics.data < 0.8 * whole.posterior.base.statistics.data
    assert torch.allclose(whole.x.std(0), thin.x.std(0))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(LapwingError, match="draws 1"):
        replace(TINY, draws=1)
    with pytest.raises(LapwingError, match="unknown kind 'wide'; expected thin or noise"):
        simulated("waves, wide", None, 50, TINY.recipe, 0)
    with pytest.raises(LapwingError, match=r"uci_nothing\.npz is not in the data folder"):
        simulated("nothing", tmp_path, 50, TINY.recipe, 0)
