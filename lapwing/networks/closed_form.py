"""The curvature of the last linear layer in closed form: its Jacobian is known, so it takes no backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg.bases import Basis
from lapwing.networks.jacobians import KroneckerRows


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """JᵀHJ of a linear map whose outputs are those of the network, Σ H_bt ⊗ a_bt a_btᵀ, without J.

    H of every position is diagonal, or has -Σ_m outer_m outer_mᵀ off its diagonal: one term for each of the M data
    that share a position, usually one. Memory: 1 + M numbers for each output, where C seeds have C.
    """

    a: Tensor  # (G, B, T, d_in)
    diagonal: Tensor  # (G, B T, d_out), float64
    outer: Tensor | None  # (G, M, B T, d_out), float64

    def kronecker_rows(self, reduce: bool, weights: Tensor | None = None) -> KroneckerRows:
        """Return what the two Kronecker factors are sums of. A datum has one position, so ``reduce`` pools inputs."""
        a = self.a if weights is None else self.a * weights.sqrt().to(self.a)[:, None, None]
        pooled = reduce and a.shape[2] > 1
        a = a.mean(2) if pooled else a.flatten(1, 2)
        number = a.shape[1] if weights is None else float(weights.sum()) * (a.shape[1] // len(weights))
        outer = None if self.outer is None else self.outer.flatten(1, 2)
        return KroneckerRows(a, None, outer, False, number, self.diagonal.sum(1))

    def squares(self) -> Tensor:
        """Return the diagonal of JᵀHJ, (G, d_out, d_in)."""
        a = self.a.flatten(1, 2)
        return torch.bmm(self.diagonal.mT.to(a), a.square())

    def squares_in(self, out: Basis, inp: Basis) -> Tensor:
        """Return the diagonal of JᵀHJ in these bases, the mean over the directions of each part: (G, m_out, m_in)."""
        total = self.diagonal if self.outer is None else self.diagonal + self.outer.square().sum(1)
        rotated = out.diagonal_of(total)
        if self.outer is not None:
            each = [out.pooled(out.coordinates(term).square()) for term in self.outer.unbind(1)]
            rotated = rotated - torch.stack(each).sum(0)
        a = inp.pooled(inp.lengths(self.a.flatten(1, 2)).double().square())
        return torch.bmm(rotated.clamp_min(0).mT, a)

    def pairs(self, rows: slice, first: Tensor, second: Tensor) -> Tensor:
        """Return the entries of H for pairs of outputs at some of the B T positions, (rows, pairs), for one group."""
        diagonal = self.diagonal[0, rows]
        if self.outer is None:
            return torch.where(first == second, diagonal[:, first], 0.0)
        outer = self.outer[0, :, rows]
        return torch.where(first == second, diagonal[:, first], -(outer[..., first] * outer[..., second]).sum(0))
