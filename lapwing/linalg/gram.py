"""Sums of products xᵀx that compute only one half of the symmetric matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lapwing.core.memory import fitting, runs

# Blocks narrower than this are not split further, for many and for few rows: few rows save less, so blocks are wider.
NARROWEST = {"cpu": (128, 192), "cuda": (384, 384)}
MANY = 512  # rows from which the narrower blocks are used
LOSS = 1e-3  # of the smallest eigenvalue, that products in the dtype of the rows may lose
PENDING = 32  # products that are added in the dtype of the rows before they are added to the sum
STRIP = 512  # rows that are mirrored at a time, which limits the extra memory; fewer if the byte budget is small


class Gram:
    """The running sum Σ xᵀx over calls of ``add``, in place.

    Splitting the columns in halves recursively and skipping the lower triangle saves up to half of the
    multiplications: 0.625 of a plain product at four blocks.

    Rows narrower than the sum are multiplied in its dtype, since rounding of the largest direction would drown the
    others. They are multiplied in their own, at half of the cost, once the sum so far has no small direction: then
    rounding is far below every one of them. The sum is looked at when its rows have doubled.

    >>> total = Gram(3, torch.float64, torch.device("cpu"))
    >>> total.add(torch.eye(3, dtype=torch.float64)[:2])
    >>> total.value().diagonal().tolist()
    [1.0, 1.0, 0.0]
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, groups: int = 1) -> None:
        self._sum = torch.zeros(groups, size, size, dtype=dtype, device=device)
        many, few = NARROWEST.get(device.type, NARROWEST["cuda"])
        self._many, self._few = (list(_upper(slice(0, size), narrowest)) for narrowest in (many, few))
        self._narrow: Tensor | None = None  # a sum in the dtype of the rows, not yet part of ``_sum``
        self._rows = self._pending = 0
        self._due = size + size // 4  # rows at which to look at the sum; no fewer can be enough

    def add(self, x: Tensor, exact: bool = False) -> None:
        """Add the products of the rows of x, (N, d) or (G, N, d); ``exact`` takes them in the dtype of the sum."""
        left = self._due - self._rows
        if not exact and self._may_narrow(x) and 0 < left < x.shape[-2]:
            self.add(x[..., :left, :])
            x = x[..., left:, :]
        total = self._sum if exact else self._taking(x, x.shape[-2])
        for rows in self._converted(x, x.ndim - 2, total.dtype):
            if x.ndim == 3 and x.shape[0] > 1:
                total.baddbmm_(rows.mT, rows)
                continue
            rows = rows[0] if x.ndim == 3 else rows
            for i, j in self._many if len(rows) >= MANY else self._few:
                total[0, i, j].addmm_(rows[:, i].mT, rows[:, j])

    def add_runs(self, x: Tensor) -> None:
        """Add R runs of T rows each, x (G, R, T, d), which are stored as (..., d, T), without transposing them."""
        total = self._taking(x, x.shape[1] * x.shape[2])
        for rows in self._converted(x, 1, total.dtype, more=x.shape[0] * x.shape[3] ** 2):
            total += torch.matmul(rows.mT, rows).sum(1)

    def _converted(self, x: Tensor, dim: int, dtype: torch.dtype, more: int = 0) -> Iterator[Tensor]:
        """Yield x in another dtype, in parts along a dimension that fit the byte budget.

        ``more`` numbers are needed beside each entry along it.
        """
        copied = 0 if x.dtype == dtype else x.numel() // max(1, x.shape[dim])
        for part in runs(x.shape[dim], torch.finfo(dtype).bits // 8 * (copied + more), x.device):
            yield x.narrow(dim, part.start, part.stop - part.start).to(dtype)

    def value(self) -> Tensor:
        """Return the symmetric sum, (G, d, d), or (d, d) for one group; not a copy, so a later ``add`` changes it."""
        return mirrored(self.total())

    def total(self) -> Tensor:
        """Return the sum (G, d, d) of which only the upper triangle is valid; not a copy."""
        self._flush()
        return self._sum

    def _may_narrow(self, x: Tensor) -> bool:
        return x.dtype == torch.float32 != self._sum.dtype

    def _taking(self, x: Tensor, rows: int) -> Tensor:
        """Return the sum that takes the rows x, so many for each group: the narrower one if rounding allows it."""
        if not self._may_narrow(x):
            return self._sum
        if self._rows >= self._due:
            self._flush()
            self._narrow = torch.zeros_like(self._sum, dtype=x.dtype) if _has_no_small(self._sum, x.dtype) else None
            self._due = self._rows * (2 if self._narrow is None else 8)
        self._rows += rows
        if self._narrow is None:
            return self._sum
        self._pending += 1
        if self._pending > PENDING:
            self._flush()
        return self._narrow

    def _flush(self) -> None:
        """Add what the narrower sum has taken."""
        if self._narrow is not None and self._pending:
            self._sum += self._narrow
            self._narrow.zero_()
        self._pending = 0


def mirrored(total: Tensor) -> Tensor:
    """Return the symmetric matrices with these upper triangles (G, d, d), in place; (d, d) for one group."""
    for corner, right, below in _strips(total):
        corner.copy_(corner.triu() + corner.triu(1).mT)
        below.copy_(right.mT)
    return total[0] if total.shape[0] == 1 else total


def _has_no_small(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Return whether rounding in this dtype is far below every eigenvalue of the matrices (G, d, d).

    Rounding of a product is relative to the diagonal: in units of it, a random matrix with a norm of about √d rounding
    units. Columns of zeros have no rounding. Only the upper triangle is read.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    root = torch.where(diagonal > 0, diagonal.rsqrt(), 1.0)
    scaled = (root.unsqueeze(-1) * matrix * root.unsqueeze(-2)).to(dtype)
    scaled.diagonal(dim1=-2, dim2=-1).add_(diagonal == 0)
    return _far_above_rounding(scaled)


def survives(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Return whether an eigendecomposition in this dtype keeps every eigenvalue of the matrices (..., d, d).

    Its rounding is relative to the largest eigenvalue, which the Frobenius norm bounds.
    """
    norm = torch.linalg.matrix_norm(matrix, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
    return _far_above_rounding((matrix / norm).to(dtype))


def _far_above_rounding(matrix: Tensor) -> bool:
    """Return whether no eigenvalue is near √d rounding units, by a Cholesky factor of the upper triangle. In place."""
    smallest = matrix.shape[-1] ** 0.5 * torch.finfo(matrix.dtype).eps / LOSS
    matrix.diagonal(dim1=-2, dim2=-1).sub_(smallest)
    return int(torch.linalg.cholesky_ex(matrix.mT).info.abs().max()) == 0


def symmetrise(matrix: Tensor) -> None:
    """Replace the matrix (..., d, d) by (M + Mᵀ) / 2, in place."""
    for corner, right, below in _strips(matrix):
        corner.copy_(0.5 * (corner + corner.mT))
        right.copy_(0.5 * (right + below.mT))
        below.copy_(right.mT)


def _strips(matrix: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield views for a few rows at a time: the block on the diagonal, the part right of it and the part below it."""
    row = 4 * matrix.element_size() * matrix.shape[:-1].numel()  # copies of a strip, for each of its rows
    step = fitting(STRIP, row, matrix.device)
    for start in range(0, matrix.shape[-1], step):
        here, rest = slice(start, start + step), slice(start + step, None)
        yield matrix[..., here, here], matrix[..., here, rest], matrix[..., rest, here]


def _upper(part: slice, narrowest: int) -> Iterator[tuple[slice, slice]]:
    """Yield the blocks of the upper triangle: recursively those of both halves, then the block between the halves."""
    if part.stop - part.start < 2 * narrowest:
        yield part, part
        return
    middle = (part.start + part.stop) // 2
    low, high = slice(part.start, middle), slice(middle, part.stop)
    yield from _upper(low, narrowest)
    yield from _upper(high, narrowest)
    yield low, high
