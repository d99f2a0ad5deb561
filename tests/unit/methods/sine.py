"""A small network fitted to a sine, and posteriors on it, for the tests of methods with inducing points."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems

D = torch.float64
NOISE = 0.2
GIVEN = lw.Gaussian(noise_std=NOISE)


@cache
def trained(count: int = 40) -> dict[str, Tensor]:
    x, y = curve(count)
    torch.manual_seed(0)
    model = net()
    problems.descend(model, lambda model: (model(x) - y).square().mean(), 300, 0.05)
    return {key: value.detach() for key, value in model.state_dict().items()}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def model(count: int = 40) -> nn.Module:
    """Fitted to a sine."""
    found = net()
    found.load_state_dict(trained(count))
    return found


@cache
def curve(count: int = 40, seed: int = 0, place: float = 0.0) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(count, 1, dtype=D, generator=gen) - 2
    return x, place + (2 * x).sin() + NOISE * torch.randn(count, 1, dtype=D, generator=gen)


def fitted(method: Any, likelihood: Any = GIVEN, prior: Any = 0.5, **options: Any) -> lw.Fitted:
    """Return the posterior of a method; with validation data the one that the mixture varies."""
    data = options.pop("data", None) or [curve()]
    network = options.pop("model", None) or model()
    posterior = lw.fit(network, data, likelihood, method=method, prior=prior, **options)
    return posterior.tuned(lambda base: base) if "validation" in options else posterior


@cache
def exact(learned: bool = False) -> lw.Fitted:
    if learned:
        return fitted(lw.Full(), lw.Gaussian(), None, tuner=lw.tuners.MaximiseEvidence())
    return fitted(lw.Full(), GIVEN, 0.5)


@cache
def classes(count: int = 30) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(2)
    return torch.randn(count, 4, dtype=D, generator=gen), torch.randint(0, 3, (count,), generator=gen)
