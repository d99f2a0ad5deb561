"""Grids: the same as trying every precision by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.curvature.sweep import PerOutputCurvature
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors.given import GPrior
from lapwing.tuners.held_out import PRECISIONS, TEMPERATURES
from tests.tolerances import assert_close
from tests.unit.tuners.settings import (
    HELD,
    LIKELIHOODS,
    METHODS,
    MLP,
    VALUES,
    D,
    brute_force,
    log_densities,
    results_of,
    setting,
    split,
)


@pytest.mark.parametrize("method", METHODS)
def test_grid_by_the_evidence_is_brute_force(method: str) -> None:
    fitted, _ = setting(method=METHODS[method])
    tuned = fitted.tuned(lw.tuners.Grid(precisions=VALUES))
    evidences = torch.stack([fitted.with_prior(v).log_evidence() for v in VALUES])
    assert float(tuned.prior.values) == VALUES[int(evidences.argmax())]
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), evidences)
    assert [step.precisions for step in tuned.trace.steps] == [pytest.approx((v,)) for v in VALUES]
    assert (tuned.trace.tuner, tuned.trace.score) == ("Grid", "log evidence")


@pytest.mark.parametrize("method", METHODS)
def test_grid_by_held_out_data_is_brute_force(method: str) -> None:
    fitted, held = setting(method=METHODS[method])
    tuned = fitted.tuned(lw.tuners.Grid(held, VALUES))
    expected = brute_force(fitted, held)
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), expected)
    assert float(tuned.prior.values) == VALUES[int(expected.argmin())]
    assert tuned.trace.score == "held-out metric"
    new = MLP.batch(3, seed=2)
    same = fitted.with_prior(float(tuned.prior.values))
    assert_close(tuned.predict(new).std, same.predict(new).std)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_grid_for_every_likelihood(name: str) -> None:
    fitted, held = setting(name, lw.Kron())
    tuned = fitted.tuned(lw.tuners.Grid(held, VALUES))
    expected = brute_force(fitted, held)
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), expected)
    assert float(tuned.prior.values) == VALUES[int(expected.argmin())]


def test_the_best_value_depends_on_the_data() -> None:
    """The network's own outputs as targets need narrow error bars, other targets wide ones."""
    fitted, _ = setting(prior=1.0)
    x = MLP.batch(7, seed=21)
    f = MLP.build()(x).detach()
    narrow = fitted.tuned(lw.tuners.Grid([(x, f)], VALUES)).prior.values
    wide = fitted.tuned(lw.tuners.Grid([(x, f + 4)], VALUES)).prior.values
    assert float(narrow) == VALUES[-1]
    assert float(wide) < 1.0


def test_groups_keep_their_ratios() -> None:
    fitted, held = setting(prior=lw.per_layer(torch.tensor([0.25, 2.0, 16.0], dtype=D)))
    tuned = fitted.tuned(lw.tuners.Grid(held, VALUES))
    ratios = torch.tensor([1 / 8, 1.0, 8.0], dtype=D)  # about a geometric mean of two
    expected = torch.stack([
        -log_densities(fitted.with_prior(lw.per_layer(v * ratios)), held).mean() for v in VALUES
    ])  # fmt: skip
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), expected)
    assert_close(tuned.prior.values, VALUES[int(expected.argmin())] * ratios)


@pytest.mark.parametrize("prior", [lw.priors.g_prior(2.0), lw.isotropic(1.0, 0.4)], ids=["g", "about a mean"])
def test_grid_of_other_priors(prior: Any) -> None:
    fitted, held = setting(method=lw.Kron(), prior=prior)
    again = lw.priors.g_prior if isinstance(prior, GPrior) else lambda v: lw.isotropic(v, 0.4)
    for data, score in ((held, 1), ("evidence", -1)):
        tuned = fitted.tuned(lw.tuners.Grid(data, VALUES))
        tried = [fitted.with_prior(again(v)) for v in VALUES]
        expected = torch.stack([-log_densities(t, held).mean() if data is held else t.log_evidence() for t in tried])
        assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), expected)
        assert float(tuned.prior.values) == VALUES[int((score * expected).argmin())]


@pytest.mark.parametrize("weights", [lw.last_layer, lw.subnetwork(torch.arange(0, 83, 5))], ids=["last layer", "some"])
def test_grid_of_some_weights(weights: Any) -> None:
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    fitted = lw.fit(MLP.build(), train, "classification", method=lw.Full(), weights=weights, prior=1.0)
    tuned = fitted.tuned(lw.tuners.Grid(held, VALUES))
    expected = brute_force(fitted, held)
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), expected)


def test_grid_of_a_metric_of_ones_own() -> None:
    """The score is the weighted mean over batches; here interval width plus a penalty for missed targets."""
    fitted, held = setting()

    def metric(predictive: Any, y: Tensor) -> float:
        low, high = predictive.interval(0.9)
        return float((high - low + 20 * ((y < low) | (y > high))).mean())

    tuned = fitted.tuned(lw.tuners.Grid(held, VALUES, metric))
    expected = []
    for value in VALUES:
        tried = fitted.with_prior(value)
        expected.append(sum(len(y) * metric(tried.predict(x), y) for x, y in held) / sum(HELD))
    assert [step.score for step in tuned.trace.steps] == pytest.approx(expected, rel=1e-10)
    assert float(tuned.prior.values) == VALUES[expected.index(min(expected))]
    nll = fitted.tuned(lw.tuners.Grid(held, VALUES))
    assert [s.score for s in nll.trace.steps] != pytest.approx(expected, rel=1e-3)


def test_ignored_data_do_not_count() -> None:
    case, likelihood, targets = LIKELIHOODS["tokens"]
    train, held = split(case, targets)
    masked = [(x, y.masked_fill(torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.4, -100))
              for x, y in held]  # fmt: skip
    masked.append((case.batch(2, seed=3), torch.full((2, 4), -100)))  # a batch that does not count at all
    fitted = lw.fit(case.build(), train, likelihood, method=lw.Kron(), prior=1.0)
    tuned = fitted.tuned(lw.tuners.Grid(masked, VALUES))
    expected = []
    for value in VALUES:
        tried, total = fitted.with_prior(value), []
        for x, y in masked:
            logs = tried.predict(x).log_probs.gather(-1, y.clamp_min(0)[..., None])[..., 0]
            total.append(logs[y != -100])
        expected.append(-torch.cat(total).mean())
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), torch.stack(expected))
    with pytest.raises(lw.errors.DataError, match="no held-out datum counts: every target is ignored"):
        fitted.tuned(lw.tuners.Grid(masked[-1:], VALUES))


def test_labels_of_which_some_are_unknown_are_refused() -> None:
    """Without the error the log density would use the label -1 as a number."""
    x = MLP.batch(6)
    y = torch.tensor([[0, 1, -1]]).expand(6, 3)
    fitted = lw.fit(MLP.build(), [(x, y)], lw.Bernoulli(ignore_index=-1), prior=1.0)
    with pytest.raises(lw.errors.DataError, match="some held-out labels are ignored ones"):
        fitted.tuned(lw.tuners.Grid([(x, y)], VALUES))


def test_the_evidence_of_a_grid_keeps_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a noise for each output every candidate computes its own curvature, which must be freed."""
    fitted, _ = setting("noise for each output")
    alive, seen = results_of(PerOutputCurvature, "at", monkeypatch), []
    plain = WeightPosterior.log_evidence

    def counting(self: WeightPosterior) -> Tensor:
        evidence = plain(self)
        seen.append(len(alive))
        return evidence

    monkeypatch.setattr(WeightPosterior, "log_evidence", counting)
    fitted.tuned(lw.tuners.Grid(precisions=VALUES))
    assert max(seen) == 1


def test_as_the_tuner_of_a_fit() -> None:
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    at_once = lw.fit(MLP.build(), train, "classification", method=lw.Kron(), tuner=lw.tuners.Grid(held, VALUES))
    later = lw.fit(MLP.build(), train, "classification", method=lw.Kron(), prior=1.0).tuned(
        lw.tuners.Grid(held, VALUES)
    )
    assert float(at_once.prior.values) == float(later.prior.values)
    assert_close(at_once.log_evidence(), later.log_evidence())


def test_a_best_value_inside_is_not_told() -> None:
    fitted, _ = setting()
    evidences = [float(fitted.with_prior(v).log_evidence()) for v in VALUES]
    best = evidences.index(max(evidences))
    assert 0 < best < len(VALUES) - 1
    assert fitted.tuned(lw.tuners.Grid(precisions=VALUES)).trace.findings == ()
    assert fitted.tuned(lw.tuners.Grid(precisions=VALUES[best:])).trace.findings == (
        "the best value is at the edge of those tried: try further out",
    )
    assert fitted.tuned(lw.tuners.Grid(precisions=VALUES[best : best + 2])).trace.findings == ()  # two are all edge


def test_the_default_values_cover_what_is_needed() -> None:
    assert len(PRECISIONS) == 21
    assert (min(PRECISIONS), max(PRECISIONS)) == pytest.approx((1e-4, 1e6))
    assert (min(TEMPERATURES), max(TEMPERATURES)) == pytest.approx((1e-3, 1e2))
    fitted, held = setting()
    assert float(fitted.tuned(lw.tuners.Grid(held)).prior.values) in PRECISIONS
