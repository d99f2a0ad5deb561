"""Orthonormal bases of rows, with their numerical rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OrthonormalRows:
    """Orthonormal rows (d, P) in one or more blocks: adding a block copies nothing.

    >>> rows = OrthonormalRows((torch.eye(3)[:1],)).extended(torch.eye(3)[2:])
    >>> len(rows), rows.coordinates(torch.tensor([[1.0, 2.0, 3.0]]))
    (2, tensor([[1., 3.]]))
    """

    blocks: tuple[Tensor, ...]

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def extended(self, block: Tensor) -> OrthonormalRows:
        """Return these rows followed by another block (k, P), orthonormal to them."""
        return OrthonormalRows((*self.blocks, block))

    def coordinates(self, v: Tensor) -> Tensor:
        """Return the inner products (n, d) of every row of v (n, P) with the rows."""
        return torch.cat([v @ block.mT for block in self.blocks], 1)

    def combined(self, y: Tensor) -> Tensor:
        """Return the combinations (n, P) of the rows with coefficients y (n, d)."""
        first, *rest = zip(y.split([len(block) for block in self.blocks], 1), self.blocks, strict=True)
        total = first[0] @ first[1]
        for part, block in rest:
            total.addmm_(part, block)
        return total

    def removed(self, v: Tensor) -> Tensor:
        """Return the part of v (n, P) that is orthogonal to the rows."""
        return v - self.combined(self.coordinates(v))


def thin_svd(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (left, singular, right) with rows (K, P) = left · diag(singular) · right; a QR first, since K is small."""
    tall, small = torch.linalg.qr(rows.mT)
    left, singular, turn = torch.linalg.svd(small.mT, full_matrices=False)
    return left, singular, turn @ tall.mT


def orthonormal_rows(rows: Tensor, *, cut: float, against: OrthonormalRows | None = None) -> tuple[Tensor, Tensor]:
    """Return (mix, basis) with rows = mix[:, :k] · basis (k, P), without singular values up to ``cut``.

    ``mix`` (K, min(K, P)) has the columns of the directions that were left out too: mix[:, k:] is their part of the
    rows. Rows that are orthogonal to ``against`` are made so once more after normalisation, which amplifies rounding.

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
