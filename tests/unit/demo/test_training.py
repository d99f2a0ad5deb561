"""The training and the tables that experiments share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lapwing as lw
from lapwing import metrics
from lapwing.demo.training import (
    SplitTable,
    Standardiser,
    TrainingSettings,
    crps,
    mlp,
    predict,
    scores,
    train_mlp,
)
from lapwing.predictives.numbers import DensityMixture, NormalPredictive, StudentPredictive
from lapwing.values.gaussian import FunctionGaussian

# The training that experiments share.

SHORT = TrainingSettings(hidden=(7, 5), epochs=60, batch_size=16)


def line(rows: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, rows).unsqueeze(1)
    return x, 2 * x


def test_mlp_has_the_sizes_asked_for_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    model = mlp(3, 2, SHORT, seed=4)
    assert torch.equal(torch.rand(3), expected)
    assert [tuple(p.shape) for p in model.parameters() if p.ndim == 2] == [(7, 3), (5, 7), (2, 5)]


def test_normalisation_and_dropout_are_between_the_layers_only() -> None:
    model = mlp(3, 2, replace(SHORT, hidden=(7,), batch_norm=True, dropout=0.1), seed=0)
    assert [type(layer).__name__ for layer in model] == ["Linear", "BatchNorm1d", "Tanh", "Dropout", "Linear"]
    assert type(mlp(3, 2, replace(SHORT, batch_norm=True), seed=0)[-1]).__name__ == "Linear"


def test_training_fits_a_line_and_repeats_itself() -> None:
    x, y = line()
    model = train_mlp(x, y, 1, SHORT, seed=0)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert float((model(x) - y).detach().square().mean()) < 0.02 * float(y.var())
    again, other = train_mlp(x, y, 1, SHORT, seed=0), train_mlp(x, y, 1, SHORT, seed=1)
    assert torch.equal(model[0].weight, again[0].weight)
    assert not torch.equal(model[0].weight, other[0].weight)


def test_what_dropout_draws_comes_from_the_seed() -> None:
    x, y = line()
    recipe, weights = replace(SHORT, dropout=0.2), []
    for state in (0, 1):
        torch.manual_seed(state)
        weights.append(train_mlp(x, y, 1, recipe, seed=3)[0].weight)
    assert torch.equal(*weights)
    expected = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), expected)  # and leaves the state as it was


def test_max_steps_ends_training_early() -> None:
    x, y = line()
    one = TrainingSettings(hidden=(7, 5), epochs=60, batch_size=16, max_steps=1, learning_rate=1e-3)
    start = mlp(1, 1, one, seed=0)
    moved = train_mlp(x, y, 1, one, seed=0)
    # Adam moves every weight by at most its rate in its first step.
    steps = [float((a - b).detach().abs().max()) for a, b in zip(start.parameters(), moved.parameters(), strict=True)]
    assert 0 < max(steps) <= 1.001e-3


def test_standardiser_shifts_and_scales_and_keeps_constant_columns() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(50, 3, generator=generator, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 1e3]) + 7
    rows = torch.cat([rows, torch.full((50, 1), 288.15, dtype=torch.float64)], 1)
    out = Standardiser.of(rows)(rows)
    assert out.mean(0).abs().max() < 1e-9
    assert out.std(0, correction=0).tolist() == pytest.approx([1, 1, 1, 0], abs=1e-9)


# Predictions in the units of the data, and scores of predictives that are not normal.

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
