"""Orthonormal rows that reveal their rank."""

from __future__ import annotations

import torch
from torch import Tensor


def thin_svd(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows (K, P) = left · diag(singular) · right, by a QR first: K is small where P is not."""
    tall, small = torch.linalg.qr(rows.mT)
    left, singular, turn = torch.linalg.svd(small.mT, full_matrices=False)
    return left, singular, turn @ tall.mT


def orthonormal_rows(rows: Tensor, *, cut: float, against: Tensor | None = None) -> tuple[Tensor, Tensor]:
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
        basis = basis - (basis @ against.mT) @ against
        tall, small = torch.linalg.qr(basis.mT)
        basis = tall.mT * small.diagonal().sign()[:, None]
    return left * singular, basis
