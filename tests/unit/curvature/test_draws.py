"""The stated error of a curvature from drawn labels is the spread over repetitions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.curvature.sweep import DrawError, Seeds
from lapwing.networks.dense_jacobian import DenseJacobian
from lapwing.networks.network import Network
from tests.cases import BY_NAME
from tests.tolerances import assert_close

D = torch.float64


@pytest.mark.parametrize("draws", [1, 2, 6])
def test_the_stated_error_is_that_of_repetitions(draws: int) -> None:
    """Against the spread of the sums over 800 repetitions, known to 2.5 %; for one draw it is a bound."""
    chosen, f = lw.Categorical(), torch.randn(60, 5, generator=torch.Generator().manual_seed(1), dtype=D)
    y = f.argmax(-1)
    seeds = Seeds("fisher_mc", torch.Generator().manual_seed(5), draws=draws)
    sums, stated = [], []
    for _ in range(800):
        drawn = seeds.at(chosen, f, y)
        error = DrawError()
        error.add(0, DenseJacobian(drawn.transpose(0, 1)))
        sums.append(drawn.square().sum((0, 1)))
        stated.append(error.relative() ** 2)
    spread, mean = torch.stack(sums).var(0).sum(), torch.stack(sums).mean(0)
    true = float(spread / mean.square().sum()) ** 0.5
    seen = (sum(stated) / len(stated)) ** 0.5
    if draws == 1:
        assert 0.9 * true < seen < 4 * true
    else:
        assert seen == pytest.approx(true, rel=0.1)


def test_an_error_without_draws_is_zero() -> None:
    assert DrawError().relative() == 0.0
    error = DrawError()
    error.add(0, DenseJacobian(torch.zeros(2, 3, 4)))
    assert error.relative() == 0.0


@pytest.mark.parametrize("name", ["mlp", "cnn", "embedding", "norms"])
def test_squares_of_units_are_those_of_the_output_factor(name: str) -> None:
    """Their sum is the diagonal of the factor, and where a block is kept whole that of its matrix."""
    case = BY_NAME[name]
    inputs = case.batch(3)
    network = Network.build(case.build(), inputs)
    f = network(inputs)
    for block, part in network.linearise(inputs).jacobians(torch.randn(4, *f.shape, dtype=D)):
        squares = part.unit_squares()
        assert squares.shape == (4, 3, block.groups * block.d_out if block.linear else block.size)
        if block.linear:
            rows = part.kronecker_rows(reduce=False).outputs
            assert rows is not None
            expected = rows.reshape(block.groups, -1, block.d_out).square().sum(1).flatten()
        else:
            expected = part.whole().square().sum((0, 1)).flatten()
        assert_close(squares.sum((0, 1)), expected)


def test_more_data_state_a_smaller_error() -> None:
    """As one over the root of their number, within the noise of a few hundred data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 9)).double().eval()
    x = torch.randn(1600, 3, dtype=D)
    stated = []
    for rows in (100, 1600):
        data = [(x[:rows], torch.arange(rows) % 9)]
        finding = lw.fit(model, data, "classification", method=lw.Kron("fisher_mc"), prior=1.0).findings[0]
        stated.append(float(finding.partition("about ")[2].partition(" %")[0]))
    assert stated[0] / stated[1] == pytest.approx(4, rel=0.25)
