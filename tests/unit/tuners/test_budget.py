"""The budget mixture: harmless by construction; Student tails from residuals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.tuners.mixing import budget_weights, fitted_tails
from tests.tolerances import assert_close

D = torch.float64


def classifier() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double().eval()
    x = torch.randn(80, 2, dtype=D)
    return net, (x, net(x).detach().argmax(-1))


def test_weights_spend_the_budget() -> None:
    plain = torch.full((50,), -0.1, dtype=D)
    scores = torch.stack([plain - 1.0, plain - 0.1, plain, plain], 1)
    weights = budget_weights(scores, 0.005)
    lost = torch.tensor([1 - math.exp(-1.0), 1 - math.exp(-0.1)], dtype=D)
    scale = 0.95 / float((0.005 / 3 / lost).sum() + 1)  # the harmless cell would have all the weight
    assert_close(weights[:2], 0.005 / 3 / lost * scale)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert float(weights[-1]) == pytest.approx(0.05)


def test_one_surprising_datum_hands_no_weight_to_a_harmful_cell() -> None:
    plain = torch.full((100,), -0.01, dtype=D)
    harmful = torch.full((100,), -1.0, dtype=D)
    plain[0], harmful[0] = -20.0, -2.0  # the harmful cell is 1e8 times as likely there
    weights = budget_weights(torch.stack([harmful, plain], 1), 0.005)
    assert float(weights[0]) < 0.02


@pytest.mark.parametrize("budget", [0.001, 0.005, 0.05])
def test_the_training_likelihood_loses_no_more_than_the_budget(budget: float) -> None:
    net, data = classifier()
    guarded = lw.fit(net, data, "classification", prior=0.01).tuned(lw.tuners.Budget(data, budget=budget))
    plain = lw.fit(net, data, "classification", method=lw.baselines.MapOnly())
    p, q = (posterior.predict(data[0]).log_prob(data[1]).exp() for posterior in (guarded, plain))
    assert float((1 - p / q).clamp_min(0).mean()) <= budget * 1.001
    assert any("validation" in finding for finding in guarded.trace.findings)


@pytest.mark.parametrize(("degrees", "expected"), [(None, math.inf), (3.0, 4.0)])
def test_tails_are_those_of_the_residuals(degrees: float | None, expected: float) -> None:
    z = torch.randn(2000, dtype=D) if degrees is None else torch.distributions.StudentT(degrees).sample((2000,)).to(D)
    residuals = z / z.square().mean().sqrt()
    found, scale = fitted_tails([(residuals, None)])
    assert found == expected
    assert (scale == 1.0) is (expected == math.inf)
    assert fitted_tails((part, None) for part in residuals.split(300)) == (found, scale)  # however they are cut


def test_regression_averages_the_posteriors_with_the_same_tails() -> None:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double().eval()
    x = torch.randn(60, 2, dtype=D)
    data = (x, net(x).detach() + 0.2 * torch.distributions.StudentT(3.0).sample((60, 1)).to(D))
    kron, full = (lw.fit(net, data, "regression", method=method, prior=1.0) for method in (lw.Kron(), lw.Full()))
    mixed = kron.tuned(lw.tuners.Budget(data, others=[full.posterior], scales=[0.25]))
    tails = mixed.posterior.cells[0].likelihood
    plain, near, far = (posterior.functions(x) for posterior in (kron, kron, full))
    each = [tails.predict(belief) for belief in (plain.widened(0.0), near, far.widened(0.25))]
    shares = torch.tensor([0.5, 0.25, 0.25], dtype=D).log()[:, None, None]
    expected = torch.logsumexp(torch.stack([p.log_prob(data[1]).reshape(60, 1) for p in each]) + shares, 0)
    assert_close(mixed.predict(x).log_prob(data[1]).reshape(60, 1), expected)


def test_given_noise_keeps_its_normal_distribution() -> None:
    net = nn.Linear(2, 1).double().eval()
    x = torch.randn(40, 2, dtype=D)
    data = (x, x[:, :1])
    posterior = lw.fit(net, data, lw.Gaussian(noise_std=0.5), prior=1.0)
    mixed = posterior.tuned(lw.tuners.Budget(data))
    assert_close(mixed.predict(x).variance, 0.25 + 0.5 * posterior.functions(x).variance)


@pytest.mark.parametrize("settings", [{"budget": 0.0}, {"ratios": ()}, {"points": 0}, {"scales": (0.5,)}])
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=next(iter(settings))):
        lw.tuners.Budget(**settings)


def test_without_data_it_is_refused() -> None:
    net, data = classifier()
    with pytest.raises(lw.errors.UnsupportedError, match="training data"):
        lw.fit(net, data, "classification", prior=1.0).tuned(lw.tuners.Budget())


def test_ignored_classes_are_left_out() -> None:
    """The default of ``fit`` scores the training data, whose ignored targets may be anything."""
    net, (x, y) = classifier()
    masked = y.clone()
    masked[::3] = -100
    known = masked >= 0
    guarded = lambda data: lw.fit(net, data, "classification", method=lw.Full(), prior=1.0).tuned(
        lw.tuners.Budget(data)
    )
    assert_close(guarded((x, masked)).predict(x).probs, guarded((x[known], y[known])).predict(x).probs)
    assert bool(torch.isfinite(lw.fit(net, (x, masked), "classification").predict(x).probs).all())


@pytest.mark.parametrize("validated", [False, True])
def test_labels_that_are_known_count_where_others_are_ignored(validated: bool) -> None:
    net, (x, _) = classifier()
    y = (net(x).detach() > 0).to(D)
    y[torch.arange(80), torch.arange(80) % 3] = -1  # one label of each datum is unknown
    likelihood = lw.Bernoulli(ignore_index=-1)
    options: dict[str, Any] = {"validation": (x[40:], y[40:])} if validated else {}
    posterior = lw.fit(net, (x[:40], y[:40]), likelihood, **options)
    assert bool(torch.isfinite(posterior.predict(x).probs).all())
    if validated:
        assert posterior.trace is not None
        known = y[40:] >= 0
        loss = nn.functional.binary_cross_entropy_with_logits(net(x[40:]).detach()[known], y[40:][known])
        assert posterior.trace.scores["plain network"] == pytest.approx(2 * float(loss), rel=1e-6)
