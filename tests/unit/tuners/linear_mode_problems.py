"""Problems for the tests of ``LinearMode``: linear models, and a network with its dense reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems

D = torch.float64
METHODS: dict[str, Any] = {
    "full": lw.Full(), "kron": lw.Kron(), "ekron": lw.EKron(), "low_rank": lw.LowRank(rank=18),
    "diagonal": lw.Diagonal(),
}  # fmt: skip
MEANS = ["network", "tangent"]


def features(count: int = 30) -> tuple[Tensor, Tensor]:
    """A design (N, 5) and targets (N,) of a linear model with noise of 0.3."""
    gen = torch.Generator().manual_seed(4)
    phi = torch.randn(count, 5, dtype=D, generator=gen)
    truth = torch.tensor([1.0, -0.5, 0.2, 0.0, 2.0], dtype=D)
    return phi, phi @ truth + 0.3 * torch.randn(count, dtype=D, generator=gen)


def linear(weights: str) -> nn.Module:
    """Return a linear model whose weights are not at an optimum."""
    gen = torch.Generator().manual_seed(6)
    model = nn.Linear(5, 1, bias=False).double()
    scale = {"zero": 0.0, "small": 0.1, "wild": 300.0}[weights]
    model.weight.data = scale * torch.randn(1, 5, dtype=D, generator=gen)
    return model


def linear_data() -> list[Any]:
    phi, y = features()
    return problems.split(phi, y[:, None], (13, 1, 16))


def relative(a: Tensor | float, b: Tensor | float) -> float:
    return abs(float(a) - float(b)) / abs(float(b))
