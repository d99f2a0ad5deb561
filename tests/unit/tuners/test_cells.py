"""Cells of a mixture and their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.tuners.mixing import MOST, RARE, TEMPERATURES, grid_of, log_scores, mixture_weights, thinned
from tests.tolerances import SOLVED, assert_close


def test_thinning_drops_precisions_and_gives_the_plain_network_no_weight() -> None:
    """Few data leave many precisions plausible; those that are kept stand for all of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(60, 1, generator=generator)
    posterior = lw.fit(nn.Linear(3, 1), (x[:40], y[:40]), "regression", prior=1.0, progress=False).posterior
    grid = grid_of(posterior, None, TEMPERATURES)
    scores = log_scores(grid, Data((x[40:], y[40:]), torch.device("cpu")))
    few = thinned(grid, scores)
    before, after = (mixture_weights(each.log_prior, scores) for each in (grid, few))
    number = torch.tensor([cell.belief for cell in grid.cells])
    shares = lambda weights: torch.zeros(len(grid.beliefs)).double().index_add(0, number, weights * (grid.scales > 0))
    count = lambda weights: int((shares(weights) >= RARE).sum())
    assert count(after) <= MOST < count(before)
    plain = grid.scales == 0
    assert float(after[plain].sum()) == pytest.approx(float(before[plain].sum()))
    assert torch.allclose(after[plain], before[plain])


def test_scores_in_parts_are_the_same_scores() -> None:
    """The covariances of all members at all data would not fit."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 3, generator=generator), torch.randint(0, 3, (9,), generator=generator)
    posterior = lw.fit(nn.Linear(3, 3).double(), (x.double(), y), "classification", prior=1.0).posterior
    grid, data = grid_of(posterior, None, TEMPERATURES), Data((x.double(), y), torch.device("cpu"))
    whole = log_scores(grid, data)
    with lw.memory.limited(1):
        assert_close(log_scores(grid, data), whole, SOLVED)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_limit_of_tokens_runs_no_more_samples_than_it_needs(ignored: bool) -> None:
    """Samples have five tokens. Where the first sample and a token of the others are ignored, 13 take five samples."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 5, 2, generator=generator).double(), torch.randint(0, 3, (9, 5), generator=generator)
    if ignored:
        y[:, 1] = y[0] = -100
    model = nn.Linear(2, 3).double()
    posterior = lw.fit(model, [(x, y)], "classification", prior=1.0).posterior
    grid, data = grid_of(posterior, None, TEMPERATURES), Data([(x[:7], y[:7]), (x[7:], y[7:])], torch.device("cpu"))
    counts: list[int] = []
    posterior.problem.network.replica.register_forward_pre_hook(lambda _, args: counts.append(len(args[0])))
    scores = log_scores(grid, data, 13)
    assert max(counts) == (5 if ignored else 3)
    assert_close(scores, log_scores(grid, data)[:13])
    assert max(counts) == 9
