"""Tuners of networks with many classes: cells and candidates are scored by drawn functions, not by all variances."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.networks.tangent import Tangent
from lapwing.posteriors import base as posteriors
from lapwing.posteriors.mixture import MixturePosterior, member
from lapwing.predictives.labels import AveragedClasses, SoftmaxSamples
from lapwing.tuners import grid as cells
from lapwing.tuners.grid import CellGrid, held_out_scores, nll
from lapwing.tuners.mixing import grid_of
from lapwing.values.gaussian import FunctionSamples
from tests.references import dense
from tests.tolerances import assert_close
from tests.unit.tuners.settings import log_scores

D = torch.float64
CLASSES = 40
RATIOS, TEMPERATURES = (0.1, 10.0), (0.5, 1.0, 2.0)


@pytest.fixture(autouse=True)
def forty_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold itself is for speed; dense references need few classes."""
    monkeypatch.setattr(posteriors, "MANY_OUTPUTS", CLASSES - 1)


@cache
def problem(tokens: bool = False) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A network, and training and validation data of its labels with noise."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double().eval()
    x = torch.randn(*((30, 2, 3) if tokens else (30, 3)), dtype=D)
    with torch.no_grad():
        y = (net(x) + torch.randn(*x.shape[:-1], CLASSES, dtype=D)).argmax(-1)
    return net, (x[:20], y[:20]), (x[20:], y[20:])


def no_jacobians(patch: pytest.MonkeyPatch) -> None:
    """Fail if a Jacobian of all outputs is computed; that of a drawn label is part of the fit."""
    plain = Tangent.jacobians

    def watched(self: Tangent, seeds: Tensor | None = None, *more: Any) -> Any:
        if seeds is None:
            pytest.fail("the Jacobian of all outputs was computed")
        return plain(self, seeds, *more)

    patch.setattr(Tangent, "jacobians", watched)


def scores_written_out(grid: CellGrid, x: Tensor, y: Tensor) -> Tensor:
    """log p(y) of every cell, from functions by a dense Jacobian."""
    model = grid.bases[0].problem.network.model
    jacobian, mean = dense.jacobian(model, x, len(x)), model(x).detach()
    columns = []
    for cell in grid.cells:
        each = member(grid.bases, grid.beliefs[cell.belief])
        steps = torch.einsum("bcp,kp->kbc", jacobian, each.numbered_steps(range(cells.SCORED_PAIRS))).reshape(
            -1, *mean.shape
        )
        belief = FunctionSamples.of(mean, steps).widened(cell.scale).scaled(1 / cell.likelihood.link_temperature)
        columns.append(SoftmaxSamples((belief,)).log_prob(y).flatten())
    return torch.stack(columns, 1)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("fit_in", [10**9, 15_000])
def test_cells_are_scored_by_the_same_draws(tokens: bool, fit_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, data, (x, y) = problem(tokens)
    posterior = lw.fit(net, data, "classification", method=lw.Kron(curvature="fisher_mc"), prior=1.0).posterior
    grid = grid_of(posterior, RATIOS, TEMPERATURES)
    expected = scores_written_out(grid, x, y)
    monkeypatch.setattr(posteriors, "temporary_bytes", lambda device: fit_in)  # whole, or in pieces of a few rows
    no_jacobians(monkeypatch)
    assert_close(log_scores(grid, Data((x, y), torch.device("cpu"))), expected)


def test_data_that_do_not_count_are_left_out() -> None:
    net, data, (x, y) = problem(tokens=True)
    posterior = lw.fit(net, data, "classification", method=lw.Diagonal(curvature="fisher_mc"), prior=1.0).posterior
    grid = grid_of(posterior, RATIOS, TEMPERATURES)
    whole = log_scores(grid, Data((x, y), torch.device("cpu"))).reshape(10, 2, -1)
    some = y.clone()
    some[3], some[4, 0] = -100, -100
    scores = log_scores(grid, Data((x, some), torch.device("cpu")))
    kept = torch.ones(10, 2, dtype=torch.bool)
    kept[3], kept[4, 0] = False, False
    assert_close(scores[scores.abs().sum(1) > 0], whole[kept])


@pytest.mark.parametrize("validated", [False, True])
def test_a_fit_takes_no_jacobian_of_all_outputs(validated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, data, held_out = problem()
    no_jacobians(monkeypatch)
    validation = held_out if validated else None
    posterior = lw.fit(net, data, "classification", method=lw.Kron(curvature="fisher_mc"), validation=validation)
    assert isinstance(posterior.posterior, MixturePosterior)
    assert isinstance(posterior.predict(held_out[0]), AveragedClasses)
    assert posterior.trace is not None
    assert set(posterior.trace.scores) >= {"plain network", "mixture"}


def test_the_verdict_on_a_tuner_takes_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    net, data, _ = problem()
    no_jacobians(monkeypatch)
    tuner = lw.tuners.MaximiseEvidence()
    posterior = lw.fit(net, data, "classification", method=lw.Kron(curvature="fisher_mc"), tuner=tuner)
    assert posterior.trace is not None
    assert set(posterior.trace.scores) == {"plain network", "this posterior"}


@pytest.mark.parametrize(
    "tuner",
    [
        lambda data: lw.tuners.Grid(data, precisions=(0.1, 1.0, 10.0)),
        lambda data: lw.tuners.CrossValidated(data, precisions=(0.1, 1.0, 10.0), folds=2),
        lambda data: lw.tuners.Temperature(data, temperatures=(0.5, 1.0, 2.0)),
    ],
)
@pytest.mark.parametrize("ignored", [False, True])
def test_lists_of_values_are_scored_by_functions(tuner: Any, ignored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, data, (x, y) = problem(tokens=True)
    posterior = lw.fit(net, data, "classification", method=lw.Kron(curvature="fisher_mc"), prior=1.0)
    if ignored:
        y = y.clone()
        y[2, 1] = -100
    no_jacobians(monkeypatch)
    assert len(posterior.tuned(tuner([(x, y)])).trace.steps) == 3  # type: ignore[union-attr]


def test_held_out_scores_equal_those_of_the_cells() -> None:
    net, data, (x, y) = problem()
    posterior = lw.fit(net, data, "classification", method=lw.Kron(curvature="fisher_mc"), prior=1.0).posterior
    prior = posterior.problem.prior.values
    candidates = [posterior.with_problem(posterior.problem.with_precisions(prior * ratio)) for ratio in RATIOS]
    scores = held_out_scores(candidates, (x, y), nll)
    grid = grid_of(posterior, RATIOS, (1.0,))
    by_cell = -log_scores(grid, Data((x, y), torch.device("cpu"))).mean(0)
    assert_close(scores[0], by_cell[: len(RATIOS)])


def test_scores_by_functions_are_near_those_by_variances(monkeypatch: pytest.MonkeyPatch) -> None:
    """With narrow error bars both links are near the integral, and four pairs of functions suffice."""
    net, data, (x, y) = problem()
    posterior = lw.fit(net, data, "classification", method=lw.Kron(curvature="fisher_mc"), prior=20.0).posterior
    grid = grid_of(posterior, (1.0, 10.0), TEMPERATURES)
    read = lambda: log_scores(grid, Data((x, y), torch.device("cpu"))).mean(0)
    drawn = read()
    monkeypatch.setattr(posteriors, "MANY_OUTPUTS", 10**9)
    exact = read()
    plain = exact[grid.scales == 0]
    assert float((exact[: len(plain)] - plain).abs().max()) > 1e-3  # error bars matter
    assert float((drawn - exact).abs().max()) < 0.3 * float((exact[: len(plain)] - plain).abs().max())
