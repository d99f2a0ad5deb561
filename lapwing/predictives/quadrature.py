"""Gauss-Hermite nodes under a Gaussian belief."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian


@lru_cache(maxsize=4)
def _rule(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights for a standard normal, by the eigenvalues of the Jacobi matrix (Golub and Welsch)."""
    off = torch.arange(1, count, dtype=torch.float64).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return values, vectors[0].square()


def gauss_hermite(belief: FunctionGaussian, count: int = 64) -> tuple[Tensor, Tensor]:
    """Values of f (B, C, count) and their weights (count,), which sum to one."""
    nodes, weights = _rule(count)
    nodes, weights = nodes.to(belief.mean), weights.to(belief.mean)
    assert math.isclose(float(weights.sum()), 1.0, abs_tol=1e-2)
    return belief.mean.unsqueeze(-1) + belief.std.unsqueeze(-1) * nodes, weights
