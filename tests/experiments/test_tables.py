"""The UCI tables in the engine, on small ones made here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lapwing as lw
from experiments import table_methods
from experiments.engine.contract import Record
from experiments.options import silent
from experiments.stacked import StackedTraining
from experiments.table_methods import METHODS, SLOW, Belief, Sizes, Task
from experiments.tables import DEPTHS, KINDS, SPLITS, Tables
from experiments.uci import read_split
from lapwing.demo.regression import SplitTable
from lapwing.errors import DataError, DivergedError, LapwingError, NumericalError
from lapwing.runtime.trace import Trace

TRAINING = StackedTraining(steps=60, batch_size=16)
SIZES = Sizes(8, landmarks=12, directions=4, inducing=5, inducing_steps=3, snapshots=4, pushes=3, push_steps=6)


def written(folder: Path, name: str = "yacht") -> None:
    """70 rows of two inputs; two standard splits, and a gap along each input."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(70, 2)) * [1, 10] + [0, 5]
    y = 30 * (np.sin(x[:, 0]) + 0.05 * x[:, 1] + 0.1 * rng.normal(size=70) + 20)
    splits: dict[str, Any] = {}
    for i in range(2):
        order = rng.permutation(70)
        splits |= {f"train_{i}": order[:55], f"test_{i}": order[55:]}
        along = x[:, i].argsort()
        splits |= {f"gap_train_{i}": np.concatenate([along[:23], along[46:]]), f"gap_test_{i}": along[23:46]}
    np.savez(folder / f"uci_{name}.npz", X=x, y=y, **splits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables")
    written(path)
    return path


@pytest.fixture(scope="module")
def settings(folder: Path) -> Tables:
    return Tables(folder, sets=("yacht",), splits=2, slow_splits=1, members=3, training=TRAINING, sizes=SIZES)


@pytest.fixture(scope="module")
def measured(settings: Tables) -> dict[str, tuple[Record, ...]]:
    """The first split of one kind and the second of the other, at different depths."""
    return {unit: tuple(settings.measure(unit, silent)) for unit in ("yacht/gap/0/1x50", "yacht/standard/1/2x50")}


def test_every_method_is_scored_and_slow_ones_on_the_first_splits(measured: dict[str, tuple[Record, ...]]) -> None:
    slow, fast = measured.values()
    assert tuple(record.method for record in slow) == METHODS
    assert tuple(record.method for record in fast) == tuple(name for name in METHODS if name not in SLOW)
    assert {(record.group, record.repeat) for record in fast} == {("yacht/standard/2x50", 1)}
    for record in (*slow, *fast):
        assert record.seconds is not None
        assert record.seconds > 0
        assert all(math.isfinite(score) for score in record.scores.values())


def test_methods_share_mean_and_noise_where_they_share_the_network(measured: dict[str, tuple[Record, ...]]) -> None:
    scores = {record.method: record.scores for record in measured["yacht/gap/0/1x50"]}
    shared = [name for name in METHODS if name not in ("sampled network", "MC dropout", "ensemble", "SWAG")]
    for name in shared:
        assert scores[name]["RMSE"] == pytest.approx(scores["MAP"]["RMSE"], rel=1e-6)
        assert scores[name]["noise std"] == pytest.approx(scores["MAP"]["noise std"], rel=1e-6)
    assert scores["sampled network"]["noise std"] == pytest.approx(scores["MAP"]["noise std"], rel=1e-6)
    assert len({scores[name]["log-likelihood"] for name in shared}) == len(shared)
    for name in ("MC dropout", "ensemble", "SWAG"):
        assert scores[name]["RMSE"] != pytest.approx(scores["MAP"]["RMSE"], rel=1e-6)


def test_the_noise_is_the_residual_over_the_rows_that_are_left(folder: Path) -> None:
    """At the optimum of the evidence the noise is the sum of squares over n - γ."""
    table = read_split(folder / "uci_yacht.npz", 0)
    task = Task.trained(table, TRAINING, SIZES, 3, 2)
    x, y = table.training
    with torch.no_grad():
        squares = float((task.model(x) - y).square().sum())
    gamma = float(task.exact.effective_parameters().total)
    assert gamma > 1
    assert task.noise == pytest.approx(squares / (len(x) - gamma), rel=1e-3)
    assert task.inflation == pytest.approx(len(x) / (len(x) - gamma), rel=1e-3)


def test_scores_are_in_the_units_of_the_table() -> None:
    y = torch.tensor([1.0, 3.0, 5.0, 11.0], dtype=torch.float64)
    table = SplitTable(y[:, None], y, y[:, None], y + 2)
    units = table.scale_y
    belief = Belief((y - units.mean) / units.std, torch.full((4,), 0.3).double(), 0.7)
    scores = belief.scores(table)
    std = float(units.std)
    assert scores["RMSE"] == pytest.approx(2.0)
    expected = -0.5 * math.log(2 * math.pi) - math.log(std) - 0.5 * (2 / std) ** 2
    assert scores["log-likelihood"] == pytest.approx(expected)
    assert scores["coverage 95 %"] == 1.0
    assert scores["noise std"] == pytest.approx(math.sqrt(0.7) * std)


def test_a_gap_split_takes_its_rows(folder: Path) -> None:
    with np.load(folder / "uci_yacht.npz") as file:
        x, y, train, test = (file[key] for key in ("X", "y", "gap_train_1", "gap_test_1"))
    table = read_split(folder / "uci_yacht.npz", 1, "gap")
    assert torch.equal(table.x_train, torch.from_numpy(x[train]))
    assert torch.equal(table.y_test, torch.from_numpy(y[test]))
    inside = table.x_test[:, 1]
    assert not bool(((table.x_train[:, 1] > inside.min()) & (table.x_train[:, 1] < inside.max())).any())
    with pytest.raises(DataError, match="lacks gap_train_2, gap_test_2"):
        read_split(folder / "uci_yacht.npz", 2, "gap")
    with pytest.raises(DataError, match=r"uci_wine\.npz is not in the data folder"):
        read_split(folder / "uci_wine.npz", 0)


def test_units_are_all_splits_and_the_first_ones_come_first() -> None:
    units = Tables.full().units()
    assert len(units) == len(set(units)) == len(DEPTHS) * sum(map(sum, SPLITS.values())) == 496
    assert "naval/gap/15/1x50" in units
    assert "protein/standard/5/1x50" not in units
    splits = [int(unit.split("/")[2]) for unit in units]
    assert splits == sorted(splits)
    assert {unit.split("/")[0] for unit in units[: len(SPLITS) * len(KINDS) * len(DEPTHS)]} == set(SPLITS)
    assert set(Tables.quick().units()) <= set(units)


def test_a_unit_gives_the_same_scores_again(settings: Tables) -> None:
    few = replace(settings, methods=("MAP", "linearised", "sampled network", "MC dropout"))
    first, second = (tuple(few.measure("yacht/standard/0/1x50", silent)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.scores == pytest.approx(b.scores, rel=1e-6)


def test_a_method_that_fails_is_left_out_with_a_line(settings: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(task: Task) -> lw.Fitted:
        raise NumericalError("no subnetwork.")

    monkeypatch.setattr(table_methods, "_subnetwork", fail)
    lines: list[str] = []
    found = replace(settings, methods=("MAP", "subnetwork", "diagonal")).measure("yacht/gap/1/1x50", lines.append)
    assert [record.method for record in found] == ["MAP", "diagonal"]
    assert lines == ["yacht/gap/1x50, split 1, subnetwork: no subnetwork."]


def test_without_an_optimum_the_noise_is_the_residual(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(posterior: object) -> object:
        raise DivergedError("no optimum.", Trace(""), posterior)

    monkeypatch.setattr(table_methods, "JOINT", diverge)
    task = Task.trained(read_split(folder / "uci_yacht.npz", 0), TRAINING, SIZES, 0, 1)
    assert task.inflation == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sets", ("cars",), "sets: unknown cars"),
        ("kinds", ("gaps",), "kinds: unknown gaps"),
        ("depths", ("3x50",), "depths: unknown 3x50"),
        ("methods", ("MAP", "GP"), "methods: unknown GP"),
        ("members", 1, "members is 1"),
        ("splits", 0, "splits 0"),
    ],
)
def test_settings_that_are_unknown_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(LapwingError, match=message):
        replace(Tables(), **{field: value})  # type: ignore[arg-type]
