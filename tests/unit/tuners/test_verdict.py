"""The verdict on a posterior: a comparison with the plain network, and a warning where it does worse."""

from __future__ import annotations

import warnings
from pathlib import Path

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


class ByFunction(nn.Module):
    """A norm that is no layer of the model."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (8,))


NORMS = (None, nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8), ByFunction())


@pytest.mark.parametrize("norm", NORMS, ids=repr)
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_summaries_say_where_norms_cancel_a_scale_as_check_does(
    norm: nn.Module | None, weights: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    x = torch.randn(40, 3)
    data = (x, (x[:, 0] > 0).long())
    net = nn.Sequential(nn.Linear(3, 8), norm or nn.Identity(), nn.Tanh(), nn.Linear(8, 2)).eval()
    posterior = lw.fit(net, data, "classification", weights=weights)
    text, normalised = posterior.summary(), bool(lw.check(net, x, weights=weights).scale_free)
    if not (weights == "last_layer" and isinstance(norm, nn.RMSNorm)):  # the graph does not show that norm
        assert ("The evidence depends on that scale; the corrected one does not" in text) == normalised
    posterior.save(tmp_path / "net")
    assert lw.load(tmp_path / "net", net).summary() == text
    if normalised:
        prior = lw.priors.per_normalised_group()
        assert (
            "Each such group has a precision to itself." in lw.fit(net, data, "classification", prior=prior).summary()
        )


def test_summaries_name_method_mixture_and_scores() -> None:
    net, data = confident()
    held_out = (data[0] + 0.1 * torch.randn_like(data[0]), data[1])
    text = lw.fit(net, data, "classification", validation=held_out).summary()
    first, what, parts = text.splitlines()[:3]
    assert first.startswith("On held-out data these predictions are ")
    assert "the network alone (" in first
    assert "the network with its temperature rescaled (" in first
    assert what.startswith("Kron over 514 of 514 weights, Categorical: mixture of ")
    assert " with its centre at precision " in what
    assert parts.startswith("A mixture of ")
    assert "cross-validated NLL on validation data: plain network " in text
    assert "temperature scaling " in text
    guarded = lw.fit(net, data, "classification")
    assert "; NLL on training data: plain network " in guarded.summary()
    assert "validation data would calibrate" in guarded.summary()
    assert "\n" not in repr(guarded)
