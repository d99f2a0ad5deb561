"""Problems with dense references for the tests of ``Sampled``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME, Case
from tests.references import ridge
from tests.references.evidence import Linearised
from tests.references.structures import floored

D = torch.float64
PRIORS = ["isotropic", "g", "per_layer"]
KINDS = {"gaussian": ("mlp", 0.49), "categorical": ("cnn", 1.0), "bernoulli": ("squeezed", 1.0)}


def targets(case: Case, kind: str) -> Tensor:
    return problems.numbers(case) if kind == "gaussian" else problems.targets(case, 6)


def likelihood(kind: str, phi: float) -> Any:
    return {"gaussian": lw.Gaussian(noise_std=phi**0.5), "categorical": lw.Categorical(), "bernoulli": lw.Bernoulli()}[
        kind
    ]


@dataclass(frozen=True)
class Problem:
    """A network with its data, and the design written out."""

    kind: str
    case: Case
    phi: float

    @property
    def data(self) -> list[Any]:
        return problems.split(self.case.batch(6), targets(self.case, self.kind), problems.SIZES)

    @property
    def exact(self) -> Linearised:
        return linearised(self.case.name, self.kind)

    @property
    def x(self) -> Tensor:
        return ridge.design(self.kind, self.exact.f, self.exact.jacobian)

    def precision(self, prior: str) -> Tensor:
        """Of every weight: 0.7; 0.3 times the diagonal of the GGN, floored by layer; 0.5, 1, 2 ... for the layers."""
        layers: dict[str, list[int]] = {}
        start = 0
        for name, parameter in self.case.build().named_parameters():
            layers.setdefault(name.rpartition(".")[0], []).extend(range(start, start + parameter.numel()))
            start += parameter.numel()
        if prior == "isotropic":
            return torch.full((start,), 0.7, dtype=D)
        found = torch.zeros(start, dtype=D)
        for number, index in enumerate(layers.values()):
            found[index] = 0.3 * floored(self.x.square().sum(0)[index]) if prior == "g" else 0.5 * 2.0**number
        return found

    def prior(self, prior: str) -> Any:
        if prior == "per_layer":
            count = len({n.rpartition(".")[0] for n, _ in self.case.build().named_parameters()})
            return lw.per_layer(0.5 * 2.0 ** torch.arange(count, dtype=D))
        return lw.isotropic(0.7) if prior == "isotropic" else lw.priors.g_prior(0.3)

    def fit(self, method: Any, prior: str = "isotropic", **options: Any) -> lw.Fitted:
        chosen = likelihood(self.kind, self.phi)
        return lw.fit(self.case.build(), self.data, chosen, method=method, prior=self.prior(prior), **options)


@lru_cache
def linearised(name: str, kind: str) -> Linearised:
    case = BY_NAME[name]
    return Linearised.of(kind, case.build(), case.batch(6), targets(case, kind))


def problem(kind: str = "gaussian") -> Problem:
    name, phi = KINDS[kind]
    return Problem(kind, BY_NAME[name], phi)


def noise(x: Tensor, count: int, seed: int = 6) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(count, x.shape[1], dtype=D, generator=gen), torch.randn(count, len(x), dtype=D, generator=gen)


@lru_cache
def larger() -> tuple[nn.Module, Tensor, Tensor]:
    """50 data of two outputs, 56 weights: more than a few products can show."""
    gen = torch.Generator().manual_seed(12)
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 2)).double()
    x = torch.randn(50, 3, dtype=D, generator=gen)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1) + 0.2 * torch.randn(50, 2, dtype=D, generator=gen)
    problems.descend(model, lambda model: (model(x) - y).square().mean(), 150, 0.02, weight_decay=1e-3)
    return model, x, y


def on_larger(method: Any, prior: Any = 1.0, std: float | None = 0.3, **options: Any) -> lw.Fitted:
    model, x, y = larger()
    return lw.fit(model, [(x, y)], lw.Gaussian(noise_std=std), method=method, prior=prior, **options)
