"""The training that experiments share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lapwing.demo.regression import Standardiser
from lapwing.demo.training import TrainingSettings, batches, best_seconds, epoch_seconds, mlp, trained

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
    model = trained(x, y, 1, SHORT, seed=0)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert float((model(x) - y).detach().square().mean()) < 0.02 * float(y.var())
    again, other = trained(x, y, 1, SHORT, seed=0), trained(x, y, 1, SHORT, seed=1)
    assert torch.equal(model[0].weight, again[0].weight)
    assert not torch.equal(model[0].weight, other[0].weight)


def test_what_dropout_draws_comes_from_the_seed() -> None:
    x, y = line()
    recipe, weights = replace(SHORT, dropout=0.2), []
    for state in (0, 1):
        torch.manual_seed(state)
        weights.append(trained(x, y, 1, recipe, seed=3)[0].weight)
    assert torch.equal(*weights)
    expected = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), expected)  # and leaves the state as it was


def test_class_numbers_are_trained_by_cross_entropy() -> None:
    x, _ = line()
    y = (x[:, 0] > 0.2).long() + (x[:, 0] > -0.4).long()
    model = trained(x, y, 3, SHORT, seed=0)
    assert float((model(x).argmax(1) == y).double().mean()) > 0.9


def test_max_steps_ends_training_early() -> None:
    x, y = line()
    one = TrainingSettings(hidden=(7, 5), epochs=60, batch_size=16, max_steps=1, learning_rate=1e-3)
    start = mlp(1, 1, one, seed=0)
    moved = trained(x, y, 1, one, seed=0)
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


def test_batches_keep_every_row_in_order() -> None:
    x, y = line(10)
    parts = batches(x, y, 4)
    assert [len(part) for part, _ in parts] == [4, 4, 2]
    assert torch.equal(torch.cat([part for part, _ in parts]), x)


def test_an_epoch_changes_nothing() -> None:
    x, y = line()
    model = mlp(1, 1, SHORT, seed=0)
    before = [p.clone() for p in model.parameters()]
    assert epoch_seconds(model, batches(x, y, 16)) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_best_seconds_runs_as_often_as_asked() -> None:
    calls: list[int] = []
    seconds, first = best_seconds(lambda: calls.append(len(calls)) or len(calls), repeats=3)
    assert (len(calls), first) == (3, 1)
    assert seconds >= 0
