"""The verdict on a posterior: a comparison with the plain network, and a warning where it does worse."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw


def confident() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a network that fits its data well with few units left undecided."""
    torch.manual_seed(0)
    x = torch.randn(200, 5)
    y = (x[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 2))
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net.eval(), (x, y)


def weak(posterior: object) -> object:
    """Return the posterior under a prior that leaves nearly everything open."""
    problem = posterior.problem  # type: ignore[attr-defined]
    prior = problem.prior.with_precision(0 * problem.prior.values + 1e-3)
    return posterior.with_problem(problem.with_prior(prior))  # type: ignore[attr-defined]


def test_a_tuner_that_does_harm_is_warned_about() -> None:
    net, data = confident()
    with pytest.warns(lw.errors.CalibrationWarning, match="worse than that of the plain network.*fit"):
        posterior = lw.fit(net, data, "classification", tuner=weak)
    scores = posterior.trace.scores
    assert scores["this posterior"] > scores["plain network"] + 0.05
    by_hand = -float(posterior.predict(data[0]).log_prob(data[1]).mean())
    assert scores["this posterior"] == pytest.approx(by_hand, rel=1e-4)
    assert "Note: " in posterior.summary()


def test_a_harmless_tuner_is_not() -> None:
    net, data = confident()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lw.fit(net, data, "classification", tuner=lambda posterior: posterior)


def test_summaries_name_method_mixture_and_scores() -> None:
    net, data = confident()
    held_out = (data[0] + 0.1 * torch.randn_like(data[0]), data[1])
    text = lw.fit(net, data, "classification", validation=held_out).summary()
    assert text.startswith("Kron over 514 of 514 weights, Categorical: precision ")
    assert "A mixture of " in text
    assert "validation NLL: plain network " in text
    assert "temperature scaling " in text
    guarded = lw.fit(net, data, "classification")
    assert "training NLL" in guarded.summary()
    assert "validation data would calibrate" in guarded.summary()
    assert "\n" not in repr(guarded)
