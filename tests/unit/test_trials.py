"""Times extrapolated from one batch, with a clock that counts operations: the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import trials
from lapwing.data.batches import Data
from lapwing.registry import METHODS
from tests.operations import OperationCount

DATA, BATCH = 320, 32
CPU = torch.device("cpu")
SHORTER = {"fmgp": {"steps": 10}, "swag": {"snapshots": 12, "rank": 8, "samples": 4}}  # counting takes its time
TIMED = ("full", "diagonal", "kron", "ekron", "low_rank", "map_only", "ella", "fmgp", "swag")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[OperationCount]:
    """A clock that shows the operations so far, in place of seconds.

    A number that is written counts for sixteen multiplications, as does each of a decomposition.
    """
    with OperationCount() as count:
        monkeypatch.setattr(trials, "BRIEF", 0.0)  # operations do not vary from call to call
        monkeypatch.setattr(trials, "CLOCK", lambda: 1e-9 * (count.products + 16 * (count.cubes + count.numbers)))
        yield count


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(DATA, 6, generator=generator), torch.randint(0, 3, (DATA,), generator=generator)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


@pytest.mark.parametrize("name", TIMED)
def test_a_fit_takes_what_was_extrapolated_from_one_batch(name: str, clock: OperationCount) -> None:
    model, batches = network(), data()
    method: Any = METHODS[name](**SHORTER.get(name, {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, name, lambda: method)
        cost = lw.check(model, batches[0], data=DATA, timed=[name]).costs[type(method).__name__]
    problem = lw.fit(model, batches[:1], "classification", method="map_only", prior=1.0).posterior.problem
    found: list[Any] = []
    fit = trials.shortest_time(lambda: found.append(method.fit(problem, Data(batches, CPU))), CPU, once=True)
    predict = lambda: trials.evaluate(found[-1].predict(batches[0][0]))
    first, later = trials.shortest_time(predict, CPU, once=True), trials.shortest_time(predict, CPU, once=True)
    assert cost.fit_seconds is not None
    assert cost.predict_seconds is not None
    assert 0.5 <= cost.fit_seconds / (fit + max(0.0, first - later)) <= 2
    assert 0.5 <= cost.predict_seconds / later <= 2


def test_what_a_long_trial_does_once_is_not_scaled_with_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where decompositions take far longer than the one that is timed says."""
    with OperationCount() as count:
        monkeypatch.setattr(trials, "CLOCK", lambda: 1e-9 * (count.products + 16 * count.numbers + 3000 * count.cubes))
        monkeypatch.setattr(trials, "eigh", lambda matrix: matrix)
        monkeypatch.setattr(trials, "SHORT", 0.0)
        model, batches, method = network(), data(), lw.Kron()
        cost = lw.check(model, batches[0], data=DATA, timed=["kron"]).costs["Kron"]
        problem = lw.fit(model, batches[:1], "classification", method="map_only", prior=1.0).posterior.problem
        seconds = trials.shortest_time(
            lambda: trials.evaluate(method.fit(problem, Data(batches, CPU)).predict(batches[0][0])), CPU, once=True
        )
    assert cost.fit_seconds is not None
    assert 0.7 <= cost.fit_seconds / seconds <= 1.4


def test_ratios_are_those_of_the_seconds(clock: OperationCount) -> None:
    model, batches = network(), data()
    report = lw.check(model, batches[0], data=DATA, timed=["kron"])
    cost, parameters = report.costs["Kron"], list(model.parameters())
    step = trials.shortest_time(lambda: torch.autograd.grad(model(batches[0][0]).sum(), parameters), CPU, once=True)
    assert cost.fit_seconds is not None
    assert cost.fit_epochs == pytest.approx(cost.fit_seconds / (step * DATA / BATCH), rel=0.02)
    assert report.timed
    assert report.costs["Diagonal"].fit_seconds is None  # was not asked for


def test_a_trial_has_the_optimiser_of_all_data() -> None:
    """On one batch VaLLA would learn by L-BFGS, on these data by Adam."""
    workload = lw.check(network(), data()[0], data=10**6).workload
    trial = lw.VaLLA().trial(workload)
    assert (trial.optimiser, trial.steps) == ("adam", 5)
    assert lw.Kron().trial(workload) == lw.Kron()


def test_a_method_that_takes_too_long_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fit runs, and the seconds are those of the work at the speed of plain passes."""
    monkeypatch.setattr(trials, "LONGEST", 0.0)
    monkeypatch.setattr(lw.Kron, "fit", lambda *_: pytest.fail("a trial ran"))
    model, batches = network(), data()
    counted = lw.check(model, batches[0], data=DATA).costs["Kron"]
    cost = lw.check(model, batches[0], data=DATA, timed=["kron"]).costs["Kron"]
    assert cost.fit_seconds is not None
    assert cost.fit_seconds > 0
    assert (cost.stored, cost.peak, cost.fit) == (counted.stored, counted.peak, counted.fit)


def test_a_trial_that_is_refused_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise lw.errors.NumericalError("no minimum.")

    monkeypatch.setattr(lw.Kron, "fit", refuse)
    cost = lw.check(network(), data()[0], data=DATA, timed=["kron"]).costs["Kron"]
    assert cost.note == "not timed: no minimum."
    assert cost.fit_seconds is not None


@pytest.mark.parametrize("likelihood", [None, "regression", "multilabel", "counts"])
def test_targets_are_drawn_where_there_are_none(likelihood: str | None) -> None:
    x = data()[0][0]
    cost = lw.check(network(), x, likelihood=likelihood, timed=["diagonal"]).costs["Diagonal"]
    assert cost.note == ""
    assert cost.fit_seconds is not None
    assert cost.fit_seconds > 0
