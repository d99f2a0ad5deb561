"""A small reconstruction network with an image as output, its measurements, and the dense matrices of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from tests.references import inverse as dense

D = torch.float64
SHAPE = (2, 4, 5)  # of the image: channels, height, width
DX, DY = 40, 17
BLOCKS = {r"inc.*": "first", r"(body|wide).*": "middle", r"skip.*|out.*": "points"}
VALUES = (0.5, 0.9, 0.3, 1.6, 0.7)  # variance and length-scale of first and middle, variance of points
NOISE = 0.3


class Net(nn.Module):
    """Convolutions with kernels of 3 × 3 and 1 × 3, a skip of 1 × 1, biases and a norm; ends in (B, 2, 4, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.GroupNorm(1, 3)
        self.body = nn.Conv2d(3, 4, 3, padding=1)
        self.wide = nn.Conv2d(4, 3, (1, 3), padding=(0, 1), bias=False)
        self.skip = nn.Conv2d(3, 2, 1)
        self.out = nn.Conv2d(3, 2, 1)
        self.act = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        first = self.act(self.norm(self.inc(x)))
        return torch.tanh(self.out(self.act(self.wide(self.act(self.body(first)))))) + self.skip(first)


NAMES = ("inc.weight", "body.weight", "wide.weight", "skip.weight", "out.weight")


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@dataclass(frozen=True)
class Case:
    """A network, an operator and measurements; the dense matrices follow from them."""

    model: nn.Module
    x: Tensor
    a: Tensor
    y: Tensor

    @cached_property
    def jacobian(self) -> Tensor:
        return dense.jacobian(self.model, self.x, NAMES)

    @cached_property
    def theta(self) -> Tensor:
        parameters = dict(self.model.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in NAMES])

    @cached_property
    def f(self) -> Tensor:
        return self.model(self.x).detach().reshape(-1)

    @cached_property
    def residual(self) -> Tensor:
        return self.y - self.a @ self.f

    def sigma(self, values: Any = VALUES) -> Tensor:
        """The prior covariance of the blocks in ``BLOCKS``, written out."""
        v = [float(value) for value in values]
        parameters = dict(self.model.named_parameters())
        matrices = []
        for name, hyper in zip(NAMES, [v[:2], v[2:4], v[2:4], v[4:], v[4:]], strict=True):
            shape = parameters[name].shape
            if len(hyper) == 1:
                matrices.append(hyper[0] * torch.eye(shape.numel(), dtype=D))
            else:
                one = dense.filter_covariance(tuple(shape[2:]), *hyper)
                matrices.append(torch.kron(torch.eye(shape.numel() // len(one), dtype=D), one))
        return torch.block_diag(*matrices)

    def covariance(self, values: Any = VALUES, noise: float = NOISE) -> Tensor:
        return dense.posterior_covariance(self.jacobian, self.sigma(values), self.a, noise)

    def evidence(self, values: Any = VALUES, noise: float = NOISE) -> Tensor:
        return dense.log_evidence(self.y, self.f, self.theta, self.jacobian, self.sigma(values), self.a, noise)


@lru_cache
def case() -> Case:
    """The measurements are a draw from the tangent model, so that the trained weights are not its optimum."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Net().double().eval()
    x = torch.randn(1, 1, 4, 5, dtype=D, generator=seed(1))
    a = torch.randn(DY, DX, dtype=D, generator=seed(2)) / 5
    blank = Case(model, x, a, torch.zeros(DY, dtype=D))
    drawn = torch.linalg.cholesky(blank.sigma()) @ torch.randn(len(blank.theta), dtype=D, generator=seed(4))
    noise = NOISE**0.5 * torch.randn(DY, dtype=D, generator=seed(3))
    return replace(blank, y=a @ (blank.f + blank.jacobian @ (drawn - blank.theta)) + noise)


def fitted(**settings: Any) -> lw.inverse.InversePosterior:
    """The posterior of the case with the prior of ``VALUES`` and the noise given."""
    one = case()
    operator = settings.pop("operator", one.a)
    model = settings.pop("model", one.model)
    x = settings.pop("x", one.x)
    y = settings.pop("y", one.y)
    noise = settings.pop("noise_std", NOISE**0.5)
    prior = settings.pop("prior", lw.priors.filter_gp(blocks=BLOCKS))
    posterior = lw.inverse.fit(model, x, y, operator, prior=prior, noise_std=noise, **settings)
    if isinstance(prior, lw.priors.FilterGP):
        values = torch.tensor(VALUES, dtype=D)
        posterior = replace(posterior.with_problem(posterior.problem.with_precisions(values)), pairs=None)
    return posterior
