"""What the samples of ``Sampled()`` are worth as it comes: their error, γ by layers, and the precision learned."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw

D = torch.float64


@lru_cache
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that 200 data decide in many directions, over ten decades of curvature."""
    torch.manual_seed(5)
    x = torch.randn(200, 3, dtype=D)
    y = x[:, :1].sin() + 0.05 * torch.randn(200, 1, dtype=D)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(500):
        optimiser.zero_grad()
        (model(x) - y).square().mean().backward()
        optimiser.step()
    model.zero_grad(set_to_none=True)
    return model, x, y


def fitted(method: Any, prior: Any, std: float | None = 0.05) -> lw.Fitted:
    model, x, y = trained()
    return lw.fit(model, [(x, y)], lw.Gaussian(noise_std=std), method=method, prior=prior)


@pytest.mark.parametrize(
    ("prior", "std"), [(1e-4, 0.05), (1.0, 1e-3), (lw.per_layer(1e-4), 0.05), (lw.per_layer(1e-2), 0.05)]
)
def test_samples_are_off_by_a_small_share_of_a_standard_deviation(prior: Any, std: float) -> None:
    """At the tolerance that it has, against a dense solve with the same noise, where the prior is far too weak."""
    posterior, full = fitted(lw.Sampled(), prior, std), fitted(lw.Full(), prior, std)
    ridge, vector = posterior.posterior.solver.ridge, full.prior.vector.detach()
    rhs = vector.sqrt() * ridge.prior + ridge.back / std
    precision = full.posterior.curvature.matrix / std**2 + torch.diag(vector)
    error = posterior.posterior.samples - torch.linalg.solve(precision, rhs.mT).mT
    assert float(((error @ precision) * error).sum(1).max()) <= (1e-2) ** 2 * ridge.prior.shape[1] * 1.5
    x = 2 * torch.randn(20, 3, dtype=D, generator=torch.Generator().manual_seed(1))
    moved = full.jacobian([(x, torch.zeros(20, 1, dtype=D))]) @ error.mT
    share = moved / full.functions(x).std.reshape(-1, 1)
    assert float(share.square().mean().sqrt()) < 0.05


def test_gamma_of_layers_has_a_small_spread() -> None:
    """None is below zero or above the number of weights, and all are near those of Full."""
    effective, full = (fitted(m, 1.0).effective_parameters() for m in (lw.Sampled(num_samples=64), lw.Full()))
    assert effective.total == pytest.approx(full.total, rel=0.05)
    for name, exact in full.layers.items():
        assert effective.layers[name] == pytest.approx(exact, abs=6.0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_precision_that_is_learned_is_that_of_the_evidence(seed: int) -> None:
    model, x, y = trained()
    generator = torch.Generator().manual_seed(seed)
    posterior = lw.fit(model, [(x, y)], lw.Gaussian(), method=lw.Sampled(), generator=generator)
    full = lw.fit(model, [(x, y)], lw.Gaussian(), method=lw.Full())
    assert float(posterior.prior.values) == pytest.approx(float(full.prior.values), rel=0.15)
    assert "gamma" in posterior.trace.findings[0]


def test_precisions_by_layers_come_near() -> None:
    """Of the evidence at the network's own weights, which FixedPoint finds for Full."""
    tuner = lw.tuners.SampleEM(mode="network", max_steps=200, tolerance=1e-3)
    posterior = fitted(lw.Sampled(num_samples=128), lw.per_layer(1.0)).tuned(tuner)
    full = fitted(lw.Full(), lw.per_layer(1.0)).tuned(lw.tuners.MaximiseEvidence())
    ratio = (posterior.prior.values / full.prior.values).log().abs()
    assert float(ratio.max()) < 0.3
