"""The Jacobian of a block that is kept whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.networks.blocks import BlockJacobian, KroneckerRows, whole_between
from lapwing.networks.halves import product

if TYPE_CHECKING:
    from lapwing.networks.linear_jacobian import LinearJacobian


@dataclass(frozen=True, eq=False)
class DenseJacobian:
    """A Jacobian that is kept whole, j (B, K, p)."""

    j: Tensor

    @property
    def batch(self) -> int:
        return self.j.shape[0]

    @property
    def positions(self) -> int:
        return 1

    @property
    def nbytes(self) -> int:
        return self.j.nbytes

    @property
    def remark(self) -> str:
        return ""

    def to(self, dtype: torch.dtype) -> DenseJacobian:
        return DenseJacobian(self.j.to(dtype))

    def joined(self, other: BlockJacobian) -> DenseJacobian:
        return DenseJacobian(self.j + other.whole())

    def rotated(self, out: Tensor, inp: Tensor | None) -> DenseJacobian:
        raise AssertionError("a Jacobian that is kept whole has no factors to rotate")

    def kronecker_rows(self, reduce: bool) -> KroneckerRows:
        raise AssertionError("a Jacobian that is kept whole has no Kronecker factors")

    def single_map(self) -> LinearJacobian | None:
        return None

    def whole(self) -> Tensor:
        return self.j

    def squares(self) -> Tensor:
        return self.j.square().sum((0, 1))

    def weighted(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        rows, weights = self.j.reshape(self.batch, tokens, -1, self.j.shape[-1]), weights.reshape(-1)
        return (rows * weights) @ rows.mT if full else (rows.square() * weights).sum(-1)

    def cross(self, weights: Tensor) -> Tensor:
        return self.between(self, weights)

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        return whole_between(self, other, weights)

    def jvp(self, v: Tensor) -> Tensor:
        return product(v.reshape(len(v), -1), self.j.flatten(0, 1).mT).reshape(len(v), *self.j.shape[:2])

    def vjp(self, u: Tensor) -> Tensor:
        return product(u.flatten(1), self.j.flatten(0, 1))

    def formed(self, count: int) -> DenseJacobian:
        return self

    def compact(self) -> DenseJacobian:
        return self

    def compact_numbers(self) -> int:
        return self.j.numel()
