"""Linear problems with their exact answers, for the tests of ``lw.linear``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.linalg.operators import MatrixDesign
from lapwing.linalg.ridge import Ridge
from tests.references.ridge import Linear

D = torch.float64
SHAPES = {"tall": (90, 30), "wide": (25, 70), "square": (30, 30)}
GIVEN: dict[str, Any] = {"precision": 0.7, "noise_std": 0.4}


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def problem(shape: str | tuple[int, int] = "tall", noise: float = 0.3, number: int = 1) -> Linear:
    """Features of unequal size, weights of unit variance."""
    rows, size = SHAPES[shape] if isinstance(shape, str) else shape
    gen = seed(number)
    x = torch.randn(rows, size, dtype=D, generator=gen) * torch.logspace(0.3, -0.7, size, dtype=D)
    signal = x @ torch.randn(size, dtype=D, generator=gen)
    return Linear(x, signal + noise * torch.randn(rows, dtype=D, generator=gen))


def steep() -> Linear:
    """Eigenvalues of the Gram matrix that fall by four decades."""
    gen = seed(0)
    x = torch.randn(420, 300, dtype=D, generator=gen) * torch.logspace(0, -2, 300, dtype=D)
    return Linear(x, x @ torch.randn(300, dtype=D, generator=gen) + 0.1 * torch.randn(420, dtype=D, generator=gen))


def operator(x: Tensor) -> lw.linear.OperatorDesign:
    return lw.linear.OperatorDesign(*x.shape, lambda v: v @ x.T, lambda u: u @ x, x[:0, 0])


def noise(x: Tensor, samples: int, number: int = 0) -> Ridge:
    """The noise of a fit with this seed, with ε."""
    return Ridge.draw(MatrixDesign(x), samples, seed(number), keep=True)


X, Y = problem().x, problem().y
