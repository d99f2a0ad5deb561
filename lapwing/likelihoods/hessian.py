"""The Hessian of the loss in the outputs of a datum, in a form that takes two numbers for each output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OutputHessian:
    """H of every datum in its outputs f: ``diagonal`` on the diagonal and -outer outerᵀ off it.

    The diagonal is stored as it is, not as the difference that it would be: p (1 - p) has all its digits where p is
    nearly one. Without ``outer`` H is diagonal. Memory: at most two numbers for each output, where a root has C.

    >>> p = torch.tensor([[0.5, 0.25, 0.25]])
    >>> OutputHessian(p * (1 - p), p).dense()[0]
    tensor([[ 0.2500, -0.1250, -0.1250],
            [-0.1250,  0.1875, -0.0625],
            [-0.1250, -0.0625,  0.1875]])
    """

    diagonal: Tensor  # (B, [T,] C)
    outer: Tensor | None = None  # (B, [T,] C)

    def only(self, output: int) -> OutputHessian:
        """Return it with the entry of one output alone, for a diagonal H."""
        assert self.outer is None, "outputs of a loss that couples them have no Hessian of their own"
        kept = torch.zeros_like(self.diagonal)
        kept[..., output] = self.diagonal[..., output]
        return OutputHessian(kept)

    def dense(self) -> Tensor:
        """Return H as a matrix, (B, [T,] C, C). For tests and small C."""
        if self.outer is None:
            return torch.diag_embed(self.diagonal)
        matrix = -self.outer.unsqueeze(-1) * self.outer.unsqueeze(-2)
        matrix.diagonal(dim1=-2, dim2=-1).copy_(self.diagonal)
        return matrix
