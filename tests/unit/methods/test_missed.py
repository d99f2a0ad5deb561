"""Evidence of beliefs that live in a span: what they miss is a difference of traces, in float32 too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw

METHODS: dict[str, Any] = {
    "valla": lw.VaLLA(50, optimiser="none"),
    "ella": lw.ELLA(400, 60, residual=True),
}


def smooth() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """One input: a few points hold nearly all of the kernel, so that traces cancel to a millionth."""
    torch.manual_seed(0)
    x = torch.randn(2000, 1)
    net = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    return net, x, net(x).detach() + 0.02 * torch.randn(2000, 1)


@pytest.mark.parametrize(("method", "prior"), [("valla", 1e-5), ("valla", 1.0), ("ella", 1e-3), ("ella", 1.0)])
def test_single_precision_has_the_evidence_of_double(method: str, prior: float) -> None:
    net, x, y = smooth()
    likelihood = lw.Gaussian(noise_std=0.02)
    single, double, full = (
        lw.fit(model, [(inputs, targets)], likelihood, method=way, prior=prior)
        for model, inputs, targets, way in (
            (net, x, y, METHODS[method]),
            (copy.deepcopy(net).double(), x.double(), y.double(), METHODS[method]),
            (copy.deepcopy(net).double(), x.double(), y.double(), lw.Full()),
        )
    )
    exact, evidence = float(full.log_evidence()), float(double.log_evidence())
    assert evidence <= exact + 1e-3
    assert float(single.log_evidence()) == pytest.approx(evidence, abs=0.5)
