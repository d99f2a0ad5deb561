"""Small networks at the minimum of their regularised loss, each with its dense reference; trained once for all."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.cases import Case
from tests.references import dense
from tests.references.minimum import Energy

D = torch.float64
LIKELIHOODS: dict[str, Any] = {
    "categorical": lw.Categorical(), "bernoulli": lw.Bernoulli(), "poisson": lw.Poisson()
}  # fmt: skip


@lru_cache
def gapped() -> Energy:
    """1-50-1 through a sine with no data between -0.7 and 0.7."""
    gen = torch.Generator().manual_seed(4)
    x = torch.rand(40, 1, dtype=D, generator=gen) * 1.3 + 0.7
    x[:20] -= 2.7
    y = (2 * x).sin() + 0.15 * torch.randn(40, 1, dtype=D, generator=gen)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    return Energy("gaussian", model, x, y, 1.0, 0.15**2).minimise()


@lru_cache
def small(kind: str = "gaussian", outputs: int = 1, width: int = 6) -> Energy:
    """2-6-C with 25 data."""
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(25, 2, dtype=D, generator=gen)
    signal = torch.stack([(1.5 * x[:, 0]).sin(), x[:, 0] * x[:, 1], x.sum(1).tanh()], 1)[:, :outputs]
    noise = torch.randn(25, outputs, dtype=D, generator=gen)
    y: Tensor = signal + 0.2 * noise
    if kind == "categorical":
        y = (signal + 0.4 * noise).argmax(1)
    elif kind == "bernoulli":
        y = (signal + 0.4 * noise > 0).long()
    elif kind == "poisson":
        y = torch.poisson(signal.exp(), generator=gen)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    return Energy(kind, model, x, y, 0.5, 0.04 if kind == "gaussian" else 1.0).minimise(100)


def copied(energy: Energy, **changes: Any) -> Energy:
    """Return the energy with a copy of its model, which a test may change."""
    return replace(energy, model=copy.deepcopy(energy.model), **changes)


def likelihood(energy: Energy) -> Any:
    return LIKELIHOODS.get(energy.kind) or lw.Gaussian(noise_std=energy.phi**0.5)


def data(energy: Energy) -> list[Any]:
    """Return the data in two unequal batches."""
    cut = 2 * len(energy.x) // 3
    return [(energy.x[:cut], energy.y[:cut]), (energy.x[cut:], energy.y[cut:])]


def fitted(energy: Energy, method: Any, **options: Any) -> lw.Fitted:
    """Fit a method with the prior, likelihood and data of the energy."""
    options.setdefault("prior", lw.isotropic(energy.precision, energy.mean))
    options.setdefault("likelihood", likelihood(energy))
    return lw.fit(energy.model, options.pop("data", None) or data(energy), method=method, **options)


def new(energy: Energy, size: int = 3, seed: int = 6) -> Tensor:
    """Return inputs from a wider range than the data."""
    return 1.5 * torch.randn(size, energy.x.shape[1], dtype=D, generator=torch.Generator().manual_seed(seed))


def off(actual: Tensor, exact: Tensor) -> float:
    """Return the largest difference relative to the largest entry."""
    assert actual.shape == exact.shape
    return float((actual.double() - exact).abs().max() / exact.abs().max())


def shifted(energy: Energy, size: float) -> Energy:
    """Return the network ``size`` posterior standard deviations from its minimum, in the stiffest direction."""
    moved = copied(energy)
    values, vectors = torch.linalg.eigh(energy.hessian())
    moved.place(energy.theta + size * vectors[:, -1] / values[-1].sqrt())
    return moved


def at_its_targets(case: Case) -> tuple[nn.Module, list[Any], Any]:
    """Return model, data and prior with targets equal to the outputs: a minimum, where the Hessian is the GGN."""
    model, inputs = case.build(), case.batch(6)
    y = torch.cat([dense.output(model, dense.one(inputs, b)) for b in range(6)]).detach()
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
    return model, problems.split(inputs, y, (4, 2)), lw.isotropic(2.0, theta)


def pretrained(energy: Energy, **settings: Any) -> lw.Fitted:
    """Fit HFL in the mode "pretrained"; with Adam on one batch of all data, whose gradient has no noise."""
    generator, whole = settings.pop("generator", None), [(energy.x, energy.y)]
    given = whole if settings.get("solver") == "adam" else None
    return fitted(energy, lw.HFL(mode="pretrained", **settings), generator=generator, data=given)


def held_out(energy: Energy, noise: float = 0.6) -> list[Any]:
    """Return 60 held-out data in two batches: the network's outputs plus noise."""
    gen = torch.Generator().manual_seed(9)
    x = 1.5 * torch.randn(60, 2, dtype=D, generator=gen)
    f = energy.model(x).detach()
    return [(x[:35], (f + noise * torch.randn(f.shape, dtype=D, generator=gen))[:35]), (x[35:], f[35:] + noise)]
