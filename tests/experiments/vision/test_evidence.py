"""Naive and corrected evidence of tiny networks, their picture, and both ways to regularise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.engine.contract import Record
from experiments.options import silent
from experiments.vision.architectures import ARCHITECTURES, SMALL
from experiments.vision.evidence import Evidence, divergence
from experiments.vision.evidence_picture import picture
from experiments.vision.networks import seeded
from experiments.vision.regularised import Regularised
from experiments.vision.rescaled import rescaled
from lapwing.errors import DataError
from lapwing.plots import OTHER, POSTERIOR
from tests.pixels import drawn, share

TINY = replace(
    Evidence.quick(), networks=("CNN",), moving=("CNN",), epochs=2, data=14, few=12, test=25, snapshots=(1, 2),
    factors=(10.0,), tolerance=10.0, solver_tolerance=1.0,
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::lapwing.errors.CalibrationWarning")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_have_about_as_many_weights(name: str) -> None:
    model = ARCHITECTURES[name]()
    assert 42_000 < sum(p.numel() for p in model.parameters()) < 47_000
    assert model.eval()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert SMALL[name]().eval()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def measured(unit: str) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    records: Iterator[Record] = TINY.measure(unit, silent)
    for record in records:
        groups.setdefault(record.group, []).append(record)
    return groups


def test_the_table() -> None:
    (records,) = measured("table/CNN/0").values()
    assert records[0].method == "plain network"
    assert {r.method for r in records} >= {"naive, one precision", "naive, many", "corrected, one precision"}
    for record in records[1:]:
        assert record.scores["log evidence"] < 0
        assert record.scores["gamma"] > 0


def test_training_and_scale() -> None:
    epochs = measured("training/CNN/0")
    assert set(epochs) == {"CNN training, epoch 1", "CNN training, epoch 2"}
    assert all("KL" in r.scores for each in epochs.values() for r in each if r.method == "naive")
    factors = measured("scale/CNN/0")
    assert set(factors) == {"CNN scale, factor 1", "CNN scale, factor 10"}
    moved = {r.method: r.scores["KL"] for r in factors["CNN scale, factor 10"]}
    assert moved["plain network"] < 1e-6
    assert moved["naive, one precision"] > 10 * moved["plain network"]


def test_a_rescaled_network_is_the_same_function() -> None:
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    model = seeded(SMALL["ResNet"], 0).double().train()
    model(x)  # statistics that are not those of the start
    model.eval()
    for factor in (0.1, 10.0):
        other = rescaled(model, x, factor)
        with torch.no_grad():
            torch.testing.assert_close(other(x), model(x))
    for wrong, factor in ((model, 0.0), (nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double(), 2.0)):
        with pytest.raises(DataError, match="expected"):
            rescaled(wrong, x, factor)


def test_divergence() -> None:
    p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    expected = 0.5 * (0.5 * torch.log(torch.tensor(4 / 3)) + torch.log(torch.tensor(2.0)))
    assert divergence(p, q) == pytest.approx(float(expected), rel=1e-6)


def test_the_picture(tmp_path: Path) -> None:
    records = [
        Record(f"CNN {kind} {step}", method, seed, {"NLL": 1.0 + seed + len(method), "KL": 0.1 * len(method)})
        for kind, steps in (("training, epoch", (1, 3)), ("scale, factor", (0.1, 10)))
        for step in steps
        for method in ("naive", "corrected")
        for seed in (0, 1)
    ]
    both = drawn(picture, records, tmp_path)
    assert share(both, OTHER) > 2e-4
    naive = drawn(picture, [r for r in records if r.method == "naive"], tmp_path)
    assert share(naive, POSTERIOR) == 0


def test_both_ways_to_regularise() -> None:
    tiny = replace(
        Regularised.quick(), hidden=(6,), channels=(2,), last=3, epochs=2, frequency=1, burn_in=0, hyper_steps=2,
        precisions=(0.1, 10.0), data=100,
    )  # fmt: skip
    assert tiny.units() == ("digits/MLP/0", "digits/CNN/0")
    for unit in tiny.units():
        lines: list[str] = []
        records = list(tiny.measure(unit, lines.append))
        names = ["evidence", "evidence, posterior", "evidence, one precision", "evidence, one precision, posterior"]
        assert [r.method for r in records] == ["cross-validation", *names]
        assert {r.group for r in records} == {f"digits, {unit.split('/')[1]}"}
        assert "precision" in lines[0]
    with pytest.raises(DataError, match="expected one of MLP, CNN"):
        list(tiny.measure("digits/LSTM/0", silent))
