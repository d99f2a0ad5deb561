"""Predictions in the units of the data, and scores of predictives that are not normal."""

from __future__ import annotations

import pytest
import torch

import lapwing as lw
from lapwing import metrics
from lapwing.demo.regression import SplitTable, crps, predict, scores
from lapwing.predictives.mixture import DensityMixture
from lapwing.predictives.numbers import NormalPredictive, StudentPredictive
from lapwing.values.gaussian import FunctionGaussian

MEANS, TARGETS = (torch.tensor(values, dtype=torch.float64).unsqueeze(1) for values in ([0.0, 1.0, -2.0], [0, 4, -9]))


def belief(variance: float) -> FunctionGaussian:
    return FunctionGaussian(MEANS, torch.full((3, 1, 1), variance, dtype=torch.float64))


def test_crps_of_a_normal_predictive_is_the_closed_form() -> None:
    predictive = NormalPredictive(belief(0.5), torch.full((3, 1), 1.5, dtype=torch.float64))
    for i in range(3):
        expected = metrics.crps(MEANS[i], predictive.std[i], TARGETS[i])
        assert float(crps(predictive, TARGETS)[i]) == pytest.approx(expected, rel=1e-3)


def test_crps_of_a_mixture_with_tails_is_that_of_its_draws() -> None:
    r"""CRPS = E |y' - y| - ½ E |y' - y''|, for independent draws y' and y''."""
    noise = torch.ones(3, 1, dtype=torch.float64)
    parts = (NormalPredictive(belief(0.1), noise), StudentPredictive(belief(2.0), noise, 4.0, 0.9))
    mixture = DensityMixture(parts, torch.tensor([0.3, 0.7], dtype=torch.float64))
    draws = mixture.sample(400_000, torch.Generator().manual_seed(0))
    apart = (draws - TARGETS).abs() - 0.5 * (draws - draws.roll(1, 0)).abs()
    error = 4 * float(apart.std(0).max()) / 400_000**0.5
    assert crps(mixture, TARGETS).flatten().tolist() == pytest.approx(apart.mean(0).flatten().tolist(), abs=error)


def test_scores_are_in_the_units_of_the_targets() -> None:
    """Targets 100 times as large have a density 100 times as small, and intervals and CRPS 100 times as large."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    y = x.sum(1) + 0.3 * torch.randn(60, generator=generator, dtype=torch.float64)
    model = torch.nn.Linear(2, 1).double()
    of_unit = []
    for unit in (1.0, 100.0):
        table = SplitTable(x[:40], unit * y[:40], x[40:], unit * y[40:])
        predicted = predict(lw.fit(model, [table.training], "regression", progress=False), table)
        of_unit.append(scores(predicted, table.y_test))
    small, large = of_unit
    assert large["NLL"] == pytest.approx(small["NLL"] + float(torch.tensor(100.0).log()))
    assert large["coverage 95 %"] == small["coverage 95 %"]
    for key in ("RMSE", "CRPS", "width"):
        assert large[key] == pytest.approx(100 * small[key])
