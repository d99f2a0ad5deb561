"""A short run on the diabetes table."""

from __future__ import annotations

import pytest
import torch

from lapwing import metrics
from lapwing.demo import diabetes
from lapwing.demo.result import Result
from lapwing.demo.training import Recipe


@pytest.fixture(scope="module")
def result() -> Result:
    return diabetes.run(diabetes.Diabetes(recipe=Recipe(epochs=30)))


def test_the_posterior_widens_the_intervals_around_the_same_mean(result: Result) -> None:
    plain, posterior = result.rows
    assert plain.scores["RMSE"] == pytest.approx(posterior.scores["RMSE"], rel=1e-5)
    assert plain.scores["RMSE"] < 77  # the deviation of y
    assert posterior.scores["width"] > plain.scores["width"]
    assert posterior.scores["coverage 95 %"] >= plain.scores["coverage 95 %"]


def test_the_plain_network_has_one_noise_for_all(result: Result) -> None:
    std = torch.tensor(result.arrays["plain network/std"])
    assert std.max() == pytest.approx(float(std.min()), rel=1e-6)
    assert len(set(result.arrays["posterior/std"])) > 50


def test_scores_are_those_of_the_arrays_in_the_units_of_y(result: Result) -> None:
    y = torch.tensor(result.arrays["observed"], dtype=torch.float64)
    assert 25 <= y.min() < y.max() <= 346
    for row in result.rows:
        keys = ("mean", "std", "low", "high")
        mean, std, low, high = (torch.tensor(result.arrays[f"{row.name}/{k}"], dtype=torch.float64) for k in keys)
        assert row.scores["NLL"] == pytest.approx(metrics.normal_nll(mean, std, y))
        assert row.scores["coverage 95 %"] == pytest.approx(float(((low <= y) & (y <= high)).double().mean()))
        assert ((high - low) / std).tolist() == pytest.approx([2 * 1.959964] * len(y), rel=1e-4)


def test_a_result_goes_to_json(result: Result) -> None:
    assert Result.from_json(result.to_json()) == result
