"""Orthonormal rows that reveal their rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OrthonormalRows:
    """Orthonormal rows (d, P) in blocks, at least one: more are added without a copy, and no two sums hold them twice.

    >>> rows = OrthonormalRows((torch.eye(3)[:1],)).extended(torch.eye(3)[2:])
    >>> len(rows), rows.coordinates(torch.tensor([[1.0, 2.0, 3.0]]))
    (2, tensor([[1., 3.]]))
    """

    blocks: tuple[Tensor, ...]

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def extended(self, block: Tensor) -> OrthonormalRows:
        return OrthonormalRows((*self.blocks, block))

    def coordinates(self, v: Tensor) -> Tensor:
        """What the rows hold of every row of v (n, P): (n, d)."""
        return torch.cat([v @ block.mT for block in self.blocks], 1)

    def combined(self, y: Tensor) -> Tensor:
        """The combinations of the rows with coefficients y (n, d): (n, P)."""
        first, *rest = zip(y.split([len(block) for block in self.blocks], 1), self.blocks, strict=True)
        total = first[0] @ first[1]
        for part, block in rest:
            total.addmm_(part, block)
        return total

    def removed(self, v: Tensor) -> Tensor:
        """v without what the rows hold of it."""
        return v - self.combined(self.coordinates(v))

    def whole(self) -> Tensor:
        """All of them in one tensor, which is a copy."""
        return torch.cat(self.blocks)


def thin_svd(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows (K, P) = left · diag(singular) · right, by a QR first: K is small where P is not."""
    tall, small = torch.linalg.qr(rows.mT)
    left, singular, turn = torch.linalg.svd(small.mT, full_matrices=False)
    return left, singular, turn @ tall.mT


def orthonormal_rows(rows: Tensor, *, cut: float, against: OrthonormalRows | None = None) -> tuple[Tensor, Tensor]:
    """``(mix, basis)`` with rows = mix[:, :k] · basis (k, P); singular values up to ``cut`` are not in the basis.

    ``mix`` (K, min(K, P)) has the columns of those directions too, so mix[:, k:] is what is missing. Rows that were
    projected off ``against`` are projected once more after their normalisation, which undoes what it blew up.

    >>> mix, basis = orthonormal_rows(torch.tensor([[2.0, 0.0], [4.0, 0.0]], dtype=torch.float64), cut=1e-12)
    >>> len(basis), (mix[:, :1] @ basis).round(decimals=6).abs()
    (1, tensor([[2., 0.],
            [4., 0.]], dtype=torch.float64))
    """
    left, singular, right = thin_svd(rows)
    basis = right[singular > cut]
    if against is not None and len(basis) and len(against):
        basis = against.removed(basis)
        tall, small = torch.linalg.qr(basis.mT)
        basis = tall.mT * small.diagonal().sign()[:, None]
    return left * singular, basis
