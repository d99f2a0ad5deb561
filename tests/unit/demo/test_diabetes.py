"""A short run on the diabetes table."""

from __future__ import annotations

import math

import pytest
import torch

from lapwing import metrics
from lapwing.demo import diabetes
from lapwing.demo.result import Result
from lapwing.demo.training import TrainingSettings

NAMES = ["plain network", "refitted noise", "Lapwing", "Lapwing with validation", "naive evidence"]


@pytest.fixture(scope="module")
def result() -> Result:
    return diabetes.run(diabetes.Diabetes(recipe=TrainingSettings(epochs=30), repeats=2))


def column(result: Result, name: str, key: str) -> torch.Tensor:
    return torch.tensor(result.arrays[f"{name}/{key}"], dtype=torch.float64)


def test_error_bars_widen_the_intervals_around_the_same_mean(result: Result) -> None:
    assert [row.name for row in result.rows] == NAMES
    plain, _, default, *_ = result.rows
    for row in result.rows:
        assert row.scores["RMSE"] == pytest.approx(plain.scores["RMSE"], rel=1e-5)
        assert row.scores["RMSE"] < 77  # the deviation of y
        assert row.scores["coverage 95 %"] >= plain.scores["coverage 95 %"] - 0.03
    assert default.scores["width"] > plain.scores["width"]


def test_the_plain_network_has_one_noise_for_all(result: Result) -> None:
    patients = len(column(result, "plain network", "std")) // 2  # of the first split
    std = column(result, "plain network", "std")[:patients]
    assert std.max() == pytest.approx(float(std.min()), rel=1e-6)
    assert len(set(column(result, "naive evidence", "std")[:patients].tolist())) > 50


def test_scores_are_those_of_the_arrays_in_the_units_of_y(result: Result) -> None:
    """The arrays hold both splits, which have the same number of patients."""
    for row in result.rows:
        y = column(result, row.name, "observed")
        assert 25 <= y.min() < y.max() <= 346
        mean, std, low, high, log_density = (
            column(result, row.name, key) for key in ("mean", "std", "low", "high", "log_density")
        )
        assert row.scores["NLL"] == pytest.approx(-float(log_density.mean()))
        assert row.scores["coverage 95 %"] == pytest.approx(float(((low <= y) & (y <= high)).double().mean()))
        assert row.scores["width"] == pytest.approx(float((high - low).mean()))
        assert ((low < mean) & (mean < high)).all()
        assert row.scores["NLL"] < math.log(346 - 25)  # a uniform density over all targets
    for name in ("plain network", "naive evidence"):  # these are normal
        y, mean, std = (column(result, name, key) for key in ("observed", "mean", "std"))
        low, high = column(result, name, "low"), column(result, name, "high")
        scores = next(row.scores for row in result.rows if row.name == name)
        assert scores["NLL"] == pytest.approx(metrics.normal_nll(mean, std, y))
        assert scores["CRPS"] == pytest.approx(metrics.crps(mean, std, y), rel=1e-3)
        assert ((high - low) / std).tolist() == pytest.approx([2 * 1.959964] * len(y), rel=1e-4)


def test_parts_of_a_split_do_not_overlap() -> None:
    table, (x_held, y_held) = diabetes.split(diabetes.Diabetes(), seed=3)
    rows = torch.cat([table.x_train, table.x_test, x_held])
    assert len(rows.unique(dim=0)) == len(rows) == 442
    assert len(y_held) == 67


def test_a_result_goes_to_json(result: Result) -> None:
    assert Result.from_json(result.to_json()) == result
