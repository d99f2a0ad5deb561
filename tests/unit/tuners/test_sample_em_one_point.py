"""Mean, noise and evidence of sample EM belong to one point."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests.unit.tuners.test_sample_em import completed, data, fitted, linear, setting

D = torch.float64
TIGHT: dict[str, Any] = {"tolerance": 1e-5, "solver_tolerance": 1e-12, "max_steps": 500}


@lru_cache
def with_noise() -> lw.Fitted:
    return completed(fitted(1.0, std=None)).tuned(lw.tuners.SampleEM(data(), noise=True, **TIGHT))


def test_the_evidence_is_that_of_the_optimum() -> None:
    """The marginal likelihood of the tangent model in closed form, with the noise learned or given."""
    for tuned in (with_noise(), completed(fitted(30.0)).tuned(lw.tuners.SampleEM(data(), **TIGHT))):
        exact = linear().log_evidence(float(tuned.prior.values), float(tuned.likelihood.dispersion))
        assert float(tuned.log_evidence()) == pytest.approx(exact, abs=1e-4 + 4 * tuned.evidence_error)
        weights = tuned.network.with_shift(None).theta()
        at_network = replace(tuned.posterior, mode=None, theta=weights)
        assert abs(float(at_network.log_evidence()) - exact) > 1


def test_compare_has_the_same_evidence() -> None:
    tuned = with_noise()
    (candidate,) = lw.compare({"net": tuned}).candidates
    assert candidate.log_evidence == pytest.approx(float(tuned.log_evidence()))
    assert candidate.fit == pytest.approx(float(tuned.posterior.log_likelihood()))


def test_a_learned_noise_comes_with_the_mean_of_the_optimum() -> None:
    _, x, y = setting()
    tuned, exact = with_noise(), linear()
    alpha, phi = exact.optimum()
    mean = (exact.x @ exact.mean(alpha, phi) - exact.y).reshape(y.shape) + y
    assert torch.allclose(tuned.functions(x).mean, mean, atol=1e-3)
    assert torch.allclose(tuned.posterior.weight_samples(1)[0] - tuned.posterior.samples[0], tuned.posterior.centre)


def test_a_given_noise_keeps_the_mean_of_the_network() -> None:
    model, x, _ = setting()
    tuned = completed(fitted(1.0)).tuned(lw.tuners.SampleEM(data(), noise=True, **TIGHT))
    assert torch.allclose(tuned.functions(x).mean, model(x).detach())


def test_the_network_mode_stays_at_the_network() -> None:
    """Also after a run that has moved to the optimum of the tangent model."""
    model, x, _ = setting()
    tuned = with_noise().tuned(lw.tuners.SampleEM(mode="network", noise=True, **TIGHT))
    assert torch.allclose(tuned.functions(x).mean, model(x).detach())
    assert tuned.posterior.mode is None


def test_another_prior_has_the_evidence_of_the_network() -> None:
    tuned = completed(fitted(1.0)).tuned(lw.tuners.SampleEM(data(), **TIGHT))
    assert tuned.with_prior(1.0).posterior.mode is None


def test_a_file_keeps_the_point(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, x, _ = setting()
    tuned = lw.Fitted(with_noise().posterior, with_noise().fingerprint, "Sampled")
    tuned.save(tmp_path / "posterior")
    loaded = lw.load(tmp_path / "posterior", model)
    assert float(loaded.log_evidence()) == pytest.approx(float(tuned.log_evidence()))
    assert torch.allclose(loaded.functions(x).mean, tuned.functions(x).mean)


def under_trained(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network after few steps of training, and data: 80 to fit and 400 to test."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(480, 2, dtype=D, generator=generator) * 4 - 2
    signal = (2 * x[:, :1]).sin() + 0.5 * x[:, 1:] ** 2
    y = signal + 0.1 * torch.randn(480, 1, dtype=D, generator=generator)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        optimiser.zero_grad()
        (net(x[:80]) - y[:80]).square().mean().backward()
        optimiser.step()
    return net, x, y


def test_error_bars_of_under_trained_networks_cover() -> None:
    """Nominal 90 %: the mean of w̃ with the noise of θ* would cover far less, and have a far higher NLL."""
    covered, mixed, gained = [], [], []
    for seed in range(4):
        net, x, y = under_trained(seed)
        tuner = lw.tuners.SampleEM(noise=True, max_steps=400)
        tuned = lw.fit(net, [(x[:80], y[:80])], "regression", method=lw.Sampled(num_samples=64), tuner=tuner)
        problem, test = tuned.posterior.problem, (x[80:], y[80:])
        plain = replace(problem, network=problem.network.with_shift(None))
        before = replace(tuned, posterior=replace(tuned.posterior, problem=plain))
        for posterior, into in ((tuned, covered), (before, mixed)):
            low, high = posterior.predict(test[0]).interval(0.9)
            into.append(float(((low <= test[1]) & (test[1] <= high)).double().mean()))
        scores = [-posterior.predict(test[0]).log_prob(test[1]).mean() for posterior in (tuned, before)]
        gained.append(float(scores[1] - scores[0]))
    assert sum(covered) / 4 > 0.8
    assert sum(mixed) / 4 < 0.6
    assert min(gained) > 0.5
