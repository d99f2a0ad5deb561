"""A dense operator for the tests."""

from __future__ import annotations

import torch
from torch import Tensor

SEED = 5


class Dense:
    """A matrix (dy, dx) with the members of an operator."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def forward(self, v: Tensor, /) -> Tensor:
        return v @ self.matrix.mT

    def back(self, v: Tensor, /) -> Tensor:
        return v @ self.matrix


def normals(*shape: int, seed: int = SEED, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
