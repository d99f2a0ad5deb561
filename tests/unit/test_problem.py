"""What a problem says about its hyperparameters before they are learned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.losses import Statistics
from lapwing.networks.network import Network
from lapwing.problem import Problem

D = torch.float64


def problem(prior: object) -> Problem:
    torch.manual_seed(0)
    network = Network.build(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.zeros(5, 3, dtype=D)
    )
    return Problem(network, lw.Categorical(), prior.bound(network.selection, network.theta()))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("data", "share"), [(100, 0.5), (4, 0.5 * 8 / 26)])
def test_one_precision_starts_at_half_of_the_largest_gamma_over_the_squared_weights(data: int, share: float) -> None:
    given = problem(lw.isotropic(1.0))
    started = given.with_starting_precision(Statistics(1.0, data, 2)).prior
    assert float(started.values) == pytest.approx(share * 26 / float(given.network.theta().square().sum()))


def test_every_group_starts_at_its_own_size() -> None:
    given = problem(lw.per_layer(1.0))
    theta, started = given.network.theta(), given.with_starting_precision(Statistics(1.0, 100, 2)).prior
    expected = [0.5 * 16 / float(theta[:16].square().sum()), 0.5 * 10 / float(theta[16:].square().sum())]
    assert started.values.tolist() == pytest.approx(expected)


def test_one_precision_for_each_weight_starts_alike_for_all() -> None:
    given = problem(lw.priors.diagonal(1.0))
    started = given.with_starting_precision(Statistics(1.0, 100, 2)).prior
    assert started.values.tolist() == pytest.approx([0.5 * 26 / float(given.network.theta().square().sum())] * 26)
