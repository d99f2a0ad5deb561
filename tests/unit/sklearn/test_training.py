"""Training of the estimators' networks: scales, shapes, early stopping at the best epoch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from lapwing.errors import ModelError, NumericalError, UnsupportedError
from lapwing.sklearn import (
    InUnitsOfTargets,
    Schedule,
    Standardised,
    column_scales,
    first_weight,
    small_network,
)

X = torch.tensor([[1.0, 5.0, 1e8], [2.0, 5.0, 3e8], [6.0, 5.0, 5e8]], dtype=torch.float64)


def test_inputs_are_standardised_and_constant_columns_only_shifted() -> None:
    z = Standardised(X)(X)
    expected = (X - X.mean(0)) / X.std(0, correction=0)
    torch.testing.assert_close(z[:, ::2], expected[:, ::2])
    assert not z[:, 1].any()


def test_nearly_constant_columns_are_not_scaled_by_rounding_errors() -> None:
    x = torch.full((5, 1), 0.1, dtype=torch.float64)
    x[2] += 1e-17
    assert column_scales(x)[1] == 1


def test_network_has_the_layers_and_the_dtype() -> None:
    network = small_network(X, 4, (7, 2), "tanh")
    assert [tuple(p.shape) for p in network.parameters()] == [(7, 3), (7,), (2, 7), (2,), (4, 2), (4,)]
    assert network(X).dtype == torch.float64
    with pytest.raises(UnsupportedError, match="activation"):
        small_network(X, 4, (7,), "swish")


def test_outputs_are_in_the_units_of_the_targets() -> None:
    inner = nn.Linear(3, 2).double()
    mean, scale = torch.tensor([3.0, -1.0], dtype=torch.float64), torch.tensor([10.0, 0.1], dtype=torch.float64)
    torch.testing.assert_close(InUnitsOfTargets(inner, mean, scale)(X), inner(X) * scale + mean)


def test_module_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="without parameters"):
        first_weight(nn.Tanh())


def test_training_keeps_the_epoch_that_is_best_on_held_out_rows() -> None:
    # One weight moves from 0 towards 2; the held-out rows say 1, so the best epoch is neither the first nor the last.
    network = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(network.weight)
    x = torch.ones(8, 1, dtype=torch.float64)
    epochs = Schedule(0.1, 0.0, 8, 100, 5, 0).train(network, mse_loss, x, 2 * x, (x, x))
    assert abs(network.weight.item() - 1) < 0.1  # within one step of Adam
    assert 10 < epochs < 30
    assert not network.training


def test_diverged_training_is_refused() -> None:
    network = nn.Linear(1, 1).double()
    x = torch.ones(4, 1, dtype=torch.float64)
    nan = lambda f, y: (f * torch.nan).sum()
    with pytest.raises(NumericalError, match="learning_rate_init"):
        Schedule(1.0, 0.0, 4, 3, 5, 0).train(network, nan, x, x, (x, x))
