"""Sums of products xᵀx, without computing both halves of a symmetric matrix."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = {"cpu": 128, "cuda": 1024}  # below this a plain product is faster than splitting it


class Gram:
    """Accumulates Σ xᵀx over calls, in place.

    Splitting the columns in halves recursively and skipping the lower triangle saves up to half of the
    multiplications: 0.625 of a plain product at four blocks.

    >>> total = Gram(3, torch.float64, torch.device("cpu"))
    >>> total.add(torch.eye(3, dtype=torch.float64)[:2])
    >>> total.value().diagonal().tolist()
    [1.0, 1.0, 0.0]
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, groups: int = 1) -> None:
        self._sum = torch.zeros(groups, size, size, dtype=dtype, device=device)

    def add(self, x: Tensor) -> None:
        """Add the products of the rows of x, (N, d) or (G, N, d)."""
        x = x.to(self._sum.dtype)
        if x.ndim == 2:
            _add_upper(self._sum[0], x)
        elif x.shape[0] == 1:
            _add_upper(self._sum[0], x[0])
        else:
            self._sum.baddbmm_(x.mT, x)

    def add_runs(self, x: Tensor) -> None:
        """Add many short runs of rows x (G, R, T, d) that lie in memory as (..., d, T), without turning them."""
        self._sum += torch.matmul(x.mT, x).to(self._sum.dtype).sum(1)

    def value(self) -> Tensor:
        """The symmetric sum, (G, d, d), or (d, d) for one group."""
        upper = self._sum.triu()
        whole = upper + upper.triu(1).mT
        return whole[0] if whole.shape[0] == 1 else whole


def _add_upper(out: Tensor, x: Tensor) -> None:
    size = x.shape[1]
    if size < 2 * BLOCK.get(x.device.type, 1024):
        out.addmm_(x.mT, x)
        return
    half = size // 2
    _add_upper(out[:half, :half], x[:, :half])
    _add_upper(out[half:, half:], x[:, half:])
    out[:half, half:].addmm_(x[:, :half].mT, x[:, half:])
