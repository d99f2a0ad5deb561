"""Scores on held-out data: one pass for all candidates, memory, folds, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.curvature.dense import FullCurvature
from lapwing.tuners import held_out
from lapwing.tuners.held_out import held_out_scores, nll
from tests import problems
from tests.tolerances import assert_close
from tests.unit.tuners.settings import (
    HELD,
    LIKELIHOODS,
    METHODS,
    MLP,
    VALUES,
    D,
    results_of,
    setting,
    split,
)

HELD_OUT: Any = [(torch.zeros(2, 4, dtype=D), torch.zeros(2, 3, dtype=D))]


class Counted(nn.Module):
    """A network that records the number of inputs of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP.build()
        calls: list[int] = []  # not reached through self, which is a copy in a run
        self.calls = calls
        self.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("method", ["full", "kron", "low_rank"])
def test_the_network_runs_once_for_all_values(method: str) -> None:
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    model = Counted().double().eval()
    fitted = lw.fit(model, train, "classification", method=METHODS[method], prior=1.0)
    tuners = [
        lw.tuners.Grid(held, VALUES),
        lw.tuners.Grid(held, VALUES * 5),
        lw.tuners.CrossValidated(held, VALUES, folds=3),
    ]
    for tuner in (*tuners, lw.tuners.Temperature(held, VALUES)):
        model.calls.clear()
        fitted.tuned(tuner)
        assert model.calls == list(HELD)
    model.calls.clear()
    fitted.tuned(lw.tuners.Grid(precisions=VALUES))
    assert model.calls == []


def test_the_data_are_passed_over_once() -> None:
    fitted, held = setting()
    passes: list[int] = []

    class Counting:
        def __iter__(self) -> Any:
            passes.append(1)
            return iter(held)

    source = Counting()
    tuned = fitted.tuned(lw.tuners.Grid(source, VALUES))  # type: ignore[arg-type]
    opened = len(passes)
    assert opened <= 2  # one is the look whether it can be iterated again
    assert float(tuned.prior.values) == float(fitted.tuned(lw.tuners.Grid(held, VALUES)).prior.values)


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_candidates_that_do_not_fit_at_once_come_in_groups(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two factorisations of 83 weights fit in memory, three do not: seven values take four passes; scores are equal."""
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    model = Counted().double().eval()
    fitted = lw.fit(model, train, "classification", method=lw.Full(), prior=1.0)
    expected = fitted.tuned(make(held, VALUES)).trace
    alive, seen = results_of(FullCurvature, "precision", monkeypatch), []

    def metric(predictive: Any, y: Tensor) -> Tensor:
        seen.append(len(alive))
        return nll(predictive, y)

    monkeypatch.setattr(held_out, "temporary", lambda device: 8 * 83**2 * 5 // 4)
    model.calls.clear()
    tuned = fitted.tuned(make(held, VALUES, metric))
    assert tuned.trace.steps == expected.steps
    assert model.calls == list(HELD) * 4
    assert max(seen) == 2


def test_one_candidate_is_tried_whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, held = setting()
    expected = fitted.tuned(lw.tuners.Grid(held, VALUES)).trace
    monkeypatch.setattr(held_out, "temporary", lambda device: 0)
    assert fitted.tuned(lw.tuners.Grid(held, VALUES)).trace.steps == expected.steps


@pytest.mark.parametrize("method", METHODS)
def test_groups_of_every_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, held = setting(method=METHODS[method])
    expected = fitted.tuned(lw.tuners.Temperature(held, VALUES)).trace
    monkeypatch.setattr(held_out, "temporary", lambda device: 0)
    assert fitted.tuned(lw.tuners.Temperature(held, VALUES)).trace.steps == expected.steps


def test_groups_need_data_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, held = setting()
    x, y = torch.cat([x for x, _ in held]), torch.cat([y for _, y in held])
    loader = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(0))
    one = fitted.tuned(lw.tuners.Grid(loader, VALUES)).trace
    fitted.tuned(lw.tuners.CrossValidated(loader, VALUES, folds=3))
    monkeypatch.setattr(held_out, "temporary", lambda device: 0)
    trace = fitted.tuned(lw.tuners.Grid(loader, VALUES)).trace  # one fold does not mind the order
    assert [step.score for step in trace.steps] == pytest.approx([step.score for step in one.steps], rel=1e-10)
    with pytest.raises(lw.errors.DataError, match="a second pass over the held-out data gave other folds"):
        fitted.tuned(lw.tuners.CrossValidated(loader, VALUES, folds=3))


def test_the_model_is_left_as_it_was() -> None:
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    model = MLP.build()
    fitted = lw.fit(model, train, "classification", method=lw.Kron(), prior=1.0)
    for tuner in (lw.tuners.Grid(held), lw.tuners.CrossValidated(held), lw.tuners.Temperature(held)):
        problems.unchanged(model, lambda t=tuner: fitted.tuned(t))
    assert float(fitted.prior.values) == 1.0


def test_in_float32() -> None:
    fitted, held = setting("classification", lw.Kron())
    train, _ = split(MLP, LIKELIHOODS["classification"][2])
    narrow = lw.fit(MLP.build(torch.float32), [(x.float(), y) for x, y in train], "classification", method=lw.Kron(),
                    prior=1.0)  # fmt: skip
    for make in (lw.tuners.Grid, lw.tuners.Temperature):
        wide = fitted.tuned(make(held, VALUES)).trace
        trace = narrow.tuned(make([(x.float(), y) for x, y in held], VALUES)).trace
        assert [s.score for s in trace.steps] == pytest.approx([s.score for s in wide.steps], rel=1e-4)


def test_scores_of_folds() -> None:
    fitted, held = setting()
    candidates = [fitted.with_prior(v).posterior for v in VALUES[:2]]
    whole = held_out_scores(candidates, held, lambda p, y: -p.log_prob(y).mean())
    parts = held_out_scores(candidates, held, lambda p, y: -p.log_prob(y).mean(), folds=7)
    assert whole.shape == (1, 2)
    assert parts.shape == (7, 2)
    assert_close(parts.mean(0), whole[0])


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_a_best_value_at_the_edge_is_told(make: Any) -> None:
    fitted, _ = setting()
    x = MLP.batch(7, seed=21)
    f = MLP.build()(x).detach()
    sure = fitted.tuned(
        make([(x, f + 1e-3)], (1e-2, 1.0, 1e2) if make is not lw.tuners.Temperature else (1e2, 1.0, 1e-2))
    )
    assert sure.trace.findings[-1] == "the best value is at the edge of those tried: try further out"
    assert "edge" in str(sure.trace)


@pytest.mark.parametrize(
    "values", [(), [], (0.0,), (-1.0, 1.0), (math.nan,), (math.inf, 1.0), 3.0, "abc", None, ("a",)]
)
def test_values_that_are_none_are_refused(values: Any) -> None:
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"precisions is .*; expected a list of positive, finite numbers"
    ):
        lw.tuners.Grid(HELD_OUT, values)
    with pytest.raises(lw.errors.UnsupportedError, match=r"precisions is .*; expected"):
        lw.tuners.CrossValidated(HELD_OUT, values)
    with pytest.raises(lw.errors.UnsupportedError, match=r"temperatures is .*; expected"):
        lw.tuners.Temperature(HELD_OUT, values)


@pytest.mark.parametrize(
    "tuner", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature, lw.tuners.LinearMode]
)
def test_a_class_in_place_of_an_object_is_refused(tuner: Any) -> None:
    fitted, _ = setting()
    with pytest.raises(lw.errors.UnsupportedError, match=rf"tuner is the class {tuner.__name__}; expected an object"):
        fitted.tuned(tuner)
    with pytest.raises(lw.errors.UnsupportedError, match="expected an object"):
        lw.fit(MLP.build(), problems.batches(MLP), "classification", tuner=tuner)


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_a_network_without_spread_has_nothing_to_change(make: Any) -> None:
    fitted, held = setting(method=lw.baselines.MapOnly())
    with pytest.raises(
        lw.errors.UnsupportedError, match="PointPosterior has no precision to change; use a method that has"
    ):
        fitted.tuned(make(held))
    with pytest.raises(lw.errors.UnsupportedError, match="PointPosterior has no precision to change"):
        fitted.tuned(lw.tuners.Grid())


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_held_out_data_that_do_not_fit_are_refused(make: Any) -> None:
    fitted, held = setting()
    x, y = held[1]
    with pytest.raises(lw.errors.DataError, match="4 inputs with 3 targets; expected one target for each"):
        fitted.tuned(make([(x, y[:3])], VALUES))
    with pytest.raises(lw.errors.DataError, match="3 inputs with 4 targets; expected one target for each"):
        fitted.tuned(make([(x[:3], y)], VALUES))
    with pytest.raises(lw.errors.DataError, match=r"targets have the shape \(4, 2\)"):
        fitted.tuned(make([(x, y[:, :2])], VALUES))
    with pytest.raises(lw.errors.DataError, match="NaN"):
        fitted.tuned(make([(x, y * math.nan)], VALUES))
    with pytest.raises(lw.errors.DataError, match="data is empty"):
        fitted.tuned(make([], VALUES))
    with pytest.raises(lw.errors.DataError, match="one-shot iterator"):
        fitted.tuned(make(iter(held), VALUES))


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_a_metric_that_is_no_number_is_refused(make: Any) -> None:
    fitted, held = setting()
    with pytest.raises(lw.errors.DataError, match=r"the metric gave \(\d,\) numbers; expected one"):
        fitted.tuned(make(held, VALUES, lambda p, y: p.log_prob(y).repeat(2)))
    with pytest.raises(lw.errors.DataError, match="7 of 7 scores are not finite"):
        fitted.tuned(make(held, VALUES, lambda p, y: math.nan))
