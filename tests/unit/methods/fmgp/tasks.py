"""Small networks and their data for the tests of FMGP; trained once."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from tests.unit.methods import sine

D = torch.float64


def curve(count: int = 60, seed: int = 0, place: float = 0.0) -> tuple[Tensor, Tensor]:
    return sine.curve(count, seed, place)


def model(place: float = 0.0) -> nn.Module:
    """Return a network fitted to a sine."""
    network = sine.model(60)
    network[2].bias.data += place
    return network


def fitted(method: Any, likelihood: Any = "regression", **options: Any) -> lw.Fitted:
    """Return the posterior of a method; with validation data the one that the mixture varies."""
    data = options.pop("data", None) or [curve()]
    posterior = lw.fit(options.pop("model", None) or model(), data, likelihood, method=method, **options)
    return posterior.tuned(lambda base: base) if "validation" in options else posterior


@cache
def classes(count: int = 60, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return data of three overlapping classes."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    places = torch.tensor([[1.5, 0.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=D)
    return places[y] + torch.randn(count, 2, dtype=D, generator=gen), y


@cache
def confident() -> nn.Module:
    """Return a classifier that was trained on few data until its probabilities are near one."""
    torch.manual_seed(0)
    network, (x, y) = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).double(), classes()
    optimiser = torch.optim.Adam(network.parameters(), 0.05)
    with torch.enable_grad():
        for _ in range(300):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimiser.step()
    network.zero_grad(set_to_none=True)
    return network


@cache
def learned() -> lw.Fitted:
    return fitted(lw.FMGP(20, steps=250))
