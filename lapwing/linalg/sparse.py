"""Sparse matrices as operators: products with A and with its transpose, which autograd and torch.func pass through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.core.settings import Rule, integer, seen
from lapwing.core.switches import quiet
from lapwing.errors import DataError

INDICES = Rule(
    "a tensor (entries,) of integers",
    lambda v: isinstance(v, Tensor) and v.ndim == 1 and v.dtype in (torch.int32, torch.int64),
    DataError,
)
VALUES = Rule(
    "a tensor (entries,) of finite float32 or float64 numbers",
    lambda v: v.ndim == 1 and v.dtype in (torch.float32, torch.float64) and bool(v.isfinite().all()),
    DataError,
)


@dataclass(frozen=True, eq=False)
class SparseOperator:
    """A sparse matrix A (rows, size), kept in rows (CSR) together with its transpose. Vectors are rows.

    Both products are differentiable, any number of times: the backward pass of one is the other. They also pass
    ``torch.func``, which products of PyTorch's CSR tensors do not. The entries of A are constants.

    >>> entries = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 2]), torch.tensor([1.0, 2.0, 3.0])
    >>> operator = SparseOperator.from_entries(*entries, shape=(2, 3))
    >>> operator.forward(torch.ones(3)), operator.back(torch.ones(2))
    (tensor([1., 5.]), tensor([3., 0., 3.]))
    """

    matrix: Tensor
    transpose: Tensor

    @classmethod
    def from_entries(cls, row: Tensor, column: Tensor, value: Tensor, shape: tuple[int, int]) -> SparseOperator:
        """Build the operator from its entries, in any order. Entries of the same place are added up.

        Args:
            row: (entries,) integers below ``shape[0]``.
            column: (entries,) integers below ``shape[1]``.
            value: (entries,) float32 or float64; its dtype and device are those of the operator.
            shape: rows and columns of A.

        Raises:
            DataError: for indices out of range, lengths that differ, and values that are not finite.
        """
        rows, size = _checked_shape(shape)
        VALUES.check("value", value)
        places = [_checked_indices(*given, len(value)) for given in (("row", row, rows), ("column", column, size))]
        i, j = (place.to(value.device, torch.int64) for place in places)
        place, entry = torch.unique(i * size + j, return_inverse=True)
        total = value.new_zeros(len(place)).index_add_(0, entry, value.detach())
        turned, order = torch.sort(place % size * rows + place // size)
        return cls(_csr(place, total, (rows, size)), _csr(turned, total[order], (size, rows)))

    @property
    def rows(self) -> int:
        """The number of rows of A."""
        return self.matrix.shape[0]

    @property
    def size(self) -> int:
        """The number of columns of A."""
        return self.matrix.shape[1]

    @property
    def entries(self) -> int:
        """The number of stored entries of A."""
        return len(self.matrix.values())

    @property
    def like(self) -> Tensor:
        """An empty tensor of the dtype and device of A."""
        return self.matrix.values()[:0]

    def forward(self, v: Tensor) -> Tensor:
        """Return A v (..., rows) for every row of v (..., size)."""
        self._require(v, "v", self.size)
        product: Tensor = _Product.apply(v, self, False)
        return product

    def back(self, u: Tensor) -> Tensor:
        """Return Aᵀ u (..., size) for every row of u (..., rows)."""
        self._require(u, "u", self.rows)
        product: Tensor = _Product.apply(u, self, True)
        return product

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> SparseOperator:
        """Return the operator on another device or in another dtype, float32 or float64."""
        if dtype not in (None, torch.float32, torch.float64):
            raise DataError(f"dtype is {seen(dtype)}; expected torch.float32, torch.float64 or None.")
        matrix, transpose = (_moved(part, device, dtype) for part in (self.matrix, self.transpose))
        return SparseOperator(matrix, transpose)

    def dense(self) -> Tensor:
        """Return A (rows, size) as a dense tensor."""
        return self.matrix.to_dense()

    def _require(self, vectors: Any, name: str, width: int) -> None:
        dtype, device = self.matrix.dtype, self.matrix.device
        if not isinstance(vectors, Tensor) or vectors.ndim < 1 or vectors.shape[-1] != width:
            raise DataError(f"{name} is {seen(vectors)}; expected a tensor of shape (..., {width}).")
        if vectors.dtype != dtype or vectors.device != device:
            raise DataError(
                f"{name} has dtype {vectors.dtype} on {vectors.device}; expected {dtype} on {device}, as the operator. "
                "Move one of them with .to(...)."
            )


class _Product(torch.autograd.Function):
    """The product of rows (..., n) with A, or with its transpose, as an operation whose backward is the other one."""

    @staticmethod
    def forward(vectors: Tensor, operator: SparseOperator, transposed: bool) -> Tensor:
        matrix = operator.transpose if transposed else operator.matrix
        shape = (*vectors.shape[:-1], matrix.shape[0])
        if vectors.numel() == 0:
            return vectors.new_zeros(shape)
        return (matrix @ vectors.reshape(-1, matrix.shape[1]).mT).mT.reshape(shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.operator, ctx.transposed = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Product.apply(grads[0], ctx.operator, not ctx.transposed), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Product.apply(tangents[0], ctx.operator, ctx.transposed)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        vectors, operator, transposed = inputs
        return _Product.apply(vectors.movedim(in_dims[0], 0), operator, transposed), 0


def _checked_shape(shape: Any) -> tuple[int, int]:
    Rule("a pair (rows, columns)", lambda v: isinstance(v, tuple) and len(v) == 2).check("shape", shape)
    for name, extent in zip(("the number of rows", "the number of columns"), shape):
        integer().check(name, extent)
    return shape


def _checked_indices(name: str, indices: Any, limit: int, entries: int) -> Tensor:
    INDICES.check(name, indices)
    if len(indices) != entries:
        raise DataError(f"{name} has {len(indices)} entries and value has {entries}; expected the same number.")
    if entries and not 0 <= int(indices.min()) <= int(indices.max()) < limit:
        seen_range = f"{int(indices.min())} to {int(indices.max())}"
        raise DataError(f"{name} has indices from {seen_range}; expected 0 to {limit - 1}.")
    return indices


def _csr(place: Tensor, value: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the matrix whose entry number row * columns + column is ``place``, which is sorted."""
    starts = torch.searchsorted(place, torch.arange(shape[0] + 1, device=place.device) * shape[1])
    # Indices of 32 bits take half of the memory, and suffice for two thousand million entries.
    width = torch.int32 if max(len(place), *shape) < 2**31 else torch.int64
    return _csr_tensor(starts.to(width), (place % shape[1]).to(width), value, shape)


def _csr_tensor(starts: Tensor, columns: Tensor, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    with quiet:  # the first CSR tensor of a process warns that CSR is in beta state
        return torch.sparse_csr_tensor(starts, columns, value, shape, check_invariants=True)


def _moved(matrix: Tensor, device: Any, dtype: torch.dtype | None) -> Tensor:
    starts, columns = (part.to(device) for part in (matrix.crow_indices(), matrix.col_indices()))
    value = matrix.values().to(device=device, dtype=dtype)
    return _csr_tensor(starts, columns, value, tuple(matrix.shape))
