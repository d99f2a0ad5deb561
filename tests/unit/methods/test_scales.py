"""Variances of float32 networks are those of float64 over many scales, or the posterior says that they may not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from benchmarks.scales import LIMIT, measured, methods

PRIORS, NOISES = (1e-4, 1.0, 1e6), (1e-4, 1e-2, 1e2)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("network", ["tanh", "relu", "norm, few"])
@pytest.mark.parametrize("method", methods())
def test_within_one_percent_of_float64(method: str, network: str, scale: float) -> None:
    row = measured(method, network, scale, PRIORS, NOISES)
    assert row.worst < LIMIT
    assert row.remarked <= 2 or scale > 1
    assert method != "Diagonal" or row.remarked == 0


@pytest.mark.parametrize("method", [name for name in methods() if name != "Diagonal"])
def test_a_prior_beyond_the_digits_of_the_network_is_a_finding(method: str) -> None:
    row = measured(method, "relu", 1e3, (1e-4,), (1e-4,))
    assert row.remarked == 1


def linear(dtype: torch.dtype, **options: Any) -> lw.Fitted:
    x = torch.linspace(-1, 1, 20, dtype=dtype).unsqueeze(1)
    torch.manual_seed(0)
    return lw.fit(nn.Linear(1, 1).to(dtype), [(x, x)], lw.Gaussian(noise_std=1e-5), **options)


def test_the_finding_names_the_remedy_and_is_in_the_summary() -> None:
    fitted = linear(torch.float32, prior=1e-3)
    (finding,) = fitted.findings
    assert "model.double()" in finding
    assert "float32" in finding
    assert f"Note: {finding}" in fitted.summary()
    assert linear(torch.float64, prior=1e-3).findings == ()
    assert fitted.with_prior(1.0).findings == ()


def test_weights_on_their_own_lose_no_digits() -> None:
    assert linear(torch.float32, prior=1e-3, method=lw.Diagonal()).findings == ()
