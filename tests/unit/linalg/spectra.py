"""Dense symmetric matrices with a given spectrum, and their products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

D = torch.float64
Product = Callable[[Tensor], Tensor]


def operator(values: Tensor) -> Tensor:
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=D))
    matrix = basis @ torch.diag(values) @ basis.T
    return 0.5 * (matrix + matrix.T)


def product(matrix: Tensor, dtype: torch.dtype = D) -> Product:
    narrow = matrix.to(dtype)
    return lambda rows: rows.to(dtype) @ narrow


class Counted:
    """A product that counts its calls and their rows."""

    def __init__(self, matrix: Tensor, dtype: torch.dtype = D) -> None:
        self.calls = self.rows = 0
        self._product = product(matrix, dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        self.calls, self.rows = self.calls + 1, self.rows + len(rows)
        return self._product(rows)


SPECTRA = {
    "flat": torch.linspace(3, 0.1, 120, dtype=D),
    "steep": torch.logspace(2, -6, 120, dtype=D),
    "low rank": torch.cat([torch.logspace(2, -2, 30, dtype=D), torch.zeros(90, dtype=D)]),
    "clusters": torch.tensor([9.0, 4.0, 1.0], dtype=D).repeat_interleave(40),
}
