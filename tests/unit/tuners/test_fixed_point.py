"""MacKay's updates: their fixed point, evidence that never falls, and what happens if a precision diverges."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense, structures
from tests.references.linear_regression import regress
from tests.tolerances import SOLVED, assert_close
from tests.unit.tuners.settings import failing

D = torch.float64
MLP = BY_NAME["mlp"]
METHODS: dict[str, Any] = {
    "full": lw.Full(), "diagonal": lw.Diagonal(), "kron": lw.Kron(), "ekron": lw.EKron(),
    "low_rank": lw.LowRank(rank=18),
}  # fmt: skip
PRIORS: dict[str, Any] = {
    "isotropic": lw.isotropic(1.0), "per_layer": lw.per_layer(1.0), "about a mean": lw.isotropic(1.0, 0.3),
    "grouped": lw.grouped({r"0\..*": 1.0, r"[24]\..*": 1.0}), "g": lw.priors.g_prior(1.0),
}  # fmt: skip
PAIRS = [
    *(("full", prior) for prior in PRIORS), ("diagonal", "per_layer"), ("diagonal", "g"), ("kron", "isotropic"),
    ("kron", "g"), ("ekron", "grouped"), ("ekron", "about a mean"), ("low_rank", "per_layer"),
]  # fmt: skip


def regression(method: Any, prior: Any = 1.0, **likelihood: Any) -> lw.Fitted:
    return lw.fit(MLP.build(), problems.number_batches(MLP), lw.Gaussian(**likelihood), method=method, prior=prior)


def classifier(method: Any, prior: Any = 1.0) -> lw.Fitted:
    return problems.fit(MLP, method, prior=prior)


def unit_curvature(method: str) -> Tensor:
    """H of the regression at unit noise by brute force."""
    model, x = MLP.build(), MLP.batch(6)
    return structures.structured(method, dense.unit_ggn(model, x), model, x)


def theta() -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in MLP.build().parameters()])


def assert_never_falls(scores: list[float]) -> None:
    for before, after in pairwise(scores):
        assert after >= before - 1e-9


@pytest.mark.parametrize(("method", "prior"), PAIRS)
def test_it_stands_still_where_mackay_says(method: str, prior: str) -> None:
    """α_d = γ_d / |w_d|² and φ = SSE / (N C - γ), with γ from a dense inverse."""
    tuned = regression(METHODS[method], PRIORS[prior]).tuned(lw.tuners.FixedPoint())
    phi, each = float(tuned.likelihood.dispersion), tuned.prior.vector
    matrix = unit_curvature(method) / phi
    shares = torch.linalg.solve(matrix + torch.diag(each), matrix).diagonal()
    centred = (theta() - (0.3 if prior == "about a mean" else 0.0)).square()
    if prior == "g":  # the squares count in units of the curvature
        centred = centred * each / tuned.prior.values
    groups = {"per_layer": (30, 35, 18), "grouped": (30, 53)}.get(prior, (83,))
    expected = torch.stack([
        a.sum() / b.sum() for a, b in zip(shares.split(groups), centred.split(groups), strict=True)
    ])  # fmt: skip
    assert_close(tuned.prior.values.reshape(-1) / expected, torch.ones(len(groups), dtype=D), 0.33)
    squares = float((problems.numbers(MLP) - MLP.build()(MLP.batch(6)).detach()).square().sum())
    assert phi == pytest.approx(squares / (18 - float(shares.sum())), rel=1e-5)
    assert tuned.trace.steps[-1].gamma == pytest.approx(float(shares.sum()), rel=1e-6)
    assert tuned.effective_parameters().total == pytest.approx(float(shares.sum()), rel=1e-7)


@pytest.mark.parametrize(("method", "prior"), PAIRS)
def test_it_ends_at_the_optimum_of_the_evidence_without_losing_any(method: str, prior: str) -> None:
    start = regression(METHODS[method], PRIORS[prior])
    tuned = start.tuned(lw.tuners.FixedPoint())
    best = start.tuned(lw.tuners.MaximiseEvidence(noise=True, tolerance=1e-10, max_steps=200))
    assert_close(tuned.prior.values / best.prior.values, torch.ones_like(tuned.prior.values), 0.33)
    assert_close(tuned.likelihood.dispersion, best.likelihood.dispersion, 0.33)
    assert float(tuned.log_evidence()) == pytest.approx(float(best.log_evidence()), abs=1e-8)
    steps = tuned.trace.steps
    assert (tuned.trace.tuner, tuned.trace.score) == ("FixedPoint", "log evidence")
    assert len(steps) < 60  # a logarithm that oscillates would take hundreds
    assert tuned.trace.findings == ()
    assert_never_falls([step.score for step in steps])
    assert steps[0].score == pytest.approx(float(start.log_evidence()), abs=1e-9)
    assert steps[-1].score == pytest.approx(float(tuned.log_evidence()), abs=1e-9)
    assert steps[0].precisions == pytest.approx(tuple(start.prior.values.reshape(-1).tolist()))
    assert steps[-1].noise == pytest.approx((float(tuned.likelihood.dispersion),))


@pytest.mark.parametrize(("method", "prior"), [("full", "isotropic"), ("diagonal", "per_layer"), ("kron", "g")])
def test_of_a_classifier(method: str, prior: str) -> None:
    start = classifier(METHODS[method], PRIORS[prior])
    tuned = start.tuned(lw.tuners.FixedPoint())
    best = start.tuned(lw.tuners.MaximiseEvidence(tolerance=1e-10, max_steps=200))
    assert_close(tuned.prior.values / best.prior.values, torch.ones_like(tuned.prior.values), 0.33)
    assert_never_falls([step.score for step in tuned.trace.steps])
    assert tuned.trace.steps[-1].noise == ()
    if method == "full" and prior == "isotropic":
        _, ggn = problems.dense_ggn(MLP, MLP.build())
        alpha = float(tuned.prior.values)
        gamma = torch.linalg.solve(ggn + alpha * torch.eye(83, dtype=D), ggn).trace()
        assert alpha == pytest.approx(float(gamma / theta().square().sum()), rel=1e-5)


def test_of_a_linear_model_at_its_optimum() -> None:
    """If the weights are the posterior mean under the result, the result is the optimum of the exact evidence.

    The targets have a signal: for pure noise the evidence may have no optimum at a finite precision.
    """
    x = torch.randn(30, 4, dtype=D)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=D) + 0.5 * torch.randn(30, dtype=D)
    log_alpha, log_phi = torch.zeros((), dtype=D), torch.zeros((), dtype=D)
    for _ in range(300):  # the exact evidence, by its own fixed point
        exact = regress(x, y, log_alpha.exp().expand(4), log_phi.exp().expand(30))
        gamma = 4 - log_alpha.exp() * exact.covariance.trace()
        log_alpha = (gamma / exact.mean.square().sum()).log()
        log_phi = ((y - x @ exact.mean).square().sum() / (30 - gamma)).log()
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data = exact.mean[None].clone()
    tuned = lw.fit(model, [(x, y[:, None])], lw.Gaussian(), method=lw.Full(), prior=1.0).tuned(lw.tuners.FixedPoint())
    assert_close(tuned.prior.values, log_alpha.exp(), 0.33)
    assert_close(tuned.likelihood.dispersion, log_phi.exp(), 0.33)
    assert_close(tuned.log_evidence(), exact.log_evidence, SOLVED)


@pytest.mark.parametrize("start", [1e-8, 1e4, 1e11])
def test_from_anywhere_to_the_same_place(start: float) -> None:
    tuned = regression(lw.Full(), start).tuned(lw.tuners.FixedPoint())
    near = regression(lw.Full(), 1.0).tuned(lw.tuners.FixedPoint())
    assert float(tuned.prior.values) == pytest.approx(float(near.prior.values), rel=1e-5)
    assert_never_falls([step.score for step in tuned.trace.steps])


@pytest.mark.parametrize("method", ["diagonal", "kron"])
def test_where_a_structure_counts_more_weights_than_data(method: str) -> None:
    """γ of a structure that ignores correlations may exceed N C = 9; SSE / (N C - γ) would be negative."""
    x, y = MLP.batch(3), problems.numbers(MLP)[:3]
    start = lw.fit(MLP.build(), [(x, y)], lw.Gaussian(), method=METHODS[method], prior=1e-4)
    assert start.effective_parameters().total > 9
    tuned = start.tuned(lw.tuners.FixedPoint())
    best = start.tuned(lw.tuners.MaximiseEvidence(noise=True, tolerance=1e-10, max_steps=300))
    assert_close(tuned.likelihood.dispersion, best.likelihood.dispersion, 0.3)
    assert_close(tuned.prior.values, best.prior.values, 0.3)
    assert_never_falls([step.score for step in tuned.trace.steps])
    assert tuned.effective_parameters().total < 9


def test_the_noise_stays_the_residuals_where_asked() -> None:
    start = regression(lw.Full())
    tuned = start.tuned(lw.tuners.FixedPoint(noise=False))
    assert tuned.likelihood.dispersion.item() == start.likelihood.dispersion.item()
    best = start.tuned(lw.tuners.MaximiseEvidence(tolerance=1e-10))
    assert float(tuned.prior.values) == pytest.approx(float(best.prior.values), rel=1e-5)
    assert tuned.trace.steps[-1].noise == ()


# Where it does not end.


def unbiased() -> lw.Fitted:
    """Return a network with zero biases: the evidence rises with their precision without end."""
    model = nn.Linear(4, 3).double()
    nn.init.zeros_(model.bias)
    prior = lw.grouped({"weight": 1.0, "bias": 1.0})
    return lw.fit(model, [(MLP.batch(6), problems.numbers(MLP))], lw.Gaussian(), method=lw.Full(), prior=prior)


def test_a_precision_that_runs_away_is_refused_with_the_last_good_value() -> None:
    start = unbiased()
    with pytest.raises(
        lw.errors.DivergedError, match=r"precision ran to .*near the prior mean.*The last steps were"
    ) as e:
        start.tuned(lw.tuners.FixedPoint())
    assert isinstance(e.value, lw.errors.NumericalError)
    trace, kept = e.value.trace, e.value.posterior
    assert trace.tuner == "FixedPoint"
    assert trace.findings[0] in str(e.value)
    assert max(trace.steps[-1].precisions) > 1e12
    assert_never_falls([step.score for step in trace.steps])
    # The last step inside the range has the most evidence of those that are.
    assert kept.problem.prior.values.tolist() == pytest.approx(list(trace.steps[-2].precisions))
    assert float(kept.problem.likelihood.dispersion) == pytest.approx(trace.steps[-2].noise[0])
    assert 1e3 < float(kept.problem.prior.values[1]) < 1e12
    assert float(kept.log_evidence()) == pytest.approx(trace.steps[-2].score, abs=1e-9)
    assert kept.trace is trace
    weight = float(kept.problem.prior.values[0])  # the other group was tuned meanwhile
    given = start.with_prior(lw.grouped({"weight": weight, "bias": 1e9})).tuned(lw.tuners.MaximiseEvidence(noise=True))
    assert weight == pytest.approx(float(given.prior.values[0]), rel=0.1)


@pytest.mark.parametrize("change", [math.nan, math.inf])
def test_an_evidence_that_is_not_finite_ends_it(change: float) -> None:
    with pytest.raises(lw.errors.DivergedError, match=r"the evidence is not finite\. Give the prior") as e:
        lw.tuners.FixedPoint()(failing(regression(lw.Full(), 3.0), 3, change))
    steps = e.value.trace.steps
    good = [s for s in steps if math.isfinite(s.score)]
    assert 1 <= len(good) < len(steps)
    assert e.value.trace.tuner == "FixedPoint"
    kept = float(e.value.posterior.problem.prior.values)
    assert kept == pytest.approx(max(good, key=lambda s: s.score).precisions[0])
    assert math.isfinite(float(e.value.posterior.problem.likelihood.dispersion))


def test_an_update_that_is_not_finite_ends_it() -> None:
    fitted = regression(lw.Full(), 3.0)

    class Broken(type(fitted.posterior)):  # type: ignore[misc]
        @property
        def centre(self) -> Tensor:
            return super().centre * math.nan

        def log_evidence(self) -> Tensor:
            return torch.zeros((), dtype=D)

    broken = Broken(**{f.name: getattr(fitted.posterior, f.name) for f in fields(fitted.posterior)})
    with pytest.raises(lw.errors.DivergedError, match="FixedPoint: an update is not finite") as e:
        lw.tuners.FixedPoint()(broken)
    assert float(e.value.posterior.problem.prior.values) == pytest.approx(3.0)


def test_too_few_steps_are_refused_or_reported() -> None:
    start = regression(lw.Full(), 1e-8)
    with pytest.raises(lw.errors.DivergedError, match=r"after 2 steps a logarithm moves .*Raise max_steps") as e:
        start.tuned(lw.tuners.FixedPoint(max_steps=2))
    assert len(e.value.trace.steps) == 2
    assert float(e.value.posterior.problem.prior.values) > 1e-8  # as far as it came
    near = regression(lw.Full()).tuned(lw.tuners.FixedPoint(max_steps=200, tolerance=1e-4))
    unfinished = near.tuned(lw.tuners.FixedPoint(max_steps=2, tolerance=1e-15))
    assert "stopped after 2 steps" in unfinished.trace.findings[0]
    assert "stopped after 2 steps" in str(unfinished.trace)


# Samples.


@pytest.mark.parametrize("prior", ["isotropic", "per_layer", "g"])
def test_samples_end_where_their_own_gamma_says(prior: str) -> None:
    """α_d = γ_d / |w_d|² and φ = SSE / (N C - γ), with γ by the samples; near what Full finds."""
    method = lw.Sampled(num_samples=256, tolerance=1e-6)
    tuned = regression(method, PRIORS[prior]).tuned(lw.tuners.FixedPoint())
    effective = tuned.effective_parameters()
    squares = tuned.prior.squares(tuned.posterior.centre)
    assert torch.allclose(tuned.prior.values.reshape(-1), effective.by_precision / squares, rtol=1e-4)
    statistics = tuned.posterior.statistics
    assert float(tuned.likelihood.dispersion) == pytest.approx(2 * statistics.loss / (18 - effective.total), rel=1e-4)
    full = regression(lw.Full(), PRIORS[prior]).tuned(lw.tuners.FixedPoint())
    assert float((tuned.prior.values / full.prior.values).log().abs().max()) < 0.3


def test_samples_need_not_climb() -> None:
    """Evidence and γ are estimated independently, so the evidence is not largest at the fixed point."""
    torch.manual_seed(5)
    x = torch.randn(60, 3)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    y = x[:, :1].sin() + 0.1 * torch.randn(60, 1)
    tuned = lw.fit(model, [(x, y)], "regression", method=lw.Sampled(), tuner=lw.tuners.FixedPoint())
    assert len(tuned.trace.steps) < 40
    assert tuned.trace.findings == ()
