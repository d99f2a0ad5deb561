"""The linear operator A between an image and its measurements, given as a matrix, as an object or as the identity."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lapwing.core.inputs import check_finite
from lapwing.core.settings import seen
from lapwing.errors import DataError
from lapwing.linalg.design import OperatorDesign
from lapwing.linalg.features import WIDE, refuse_unpaired
from lapwing.linalg.sparse import SparseOperator


@runtime_checkable
class LinearOperator(Protocol):
    """A matrix A (rows, size) known by its products. Vectors are rows.

    ``lw.linear.OperatorDesign`` is one. An operator that also has ``to(device=, dtype=)`` is moved to the device and
    dtype of the computation.

    >>> import lapwing as lw
    >>> matrix = torch.tensor([[1.0, 2.0, 3.0]])
    >>> one = lw.linear.OperatorDesign(1, 3, lambda v: v @ matrix.T, lambda u: u @ matrix, matrix[:0, 0])
    >>> one.forward(torch.ones(2, 3)).flatten().tolist()
    [6.0, 6.0]
    """

    @property
    def rows(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def like(self) -> Tensor:
        """An empty tensor of the dtype and device that products take."""
        ...

    def forward(self, v: Tensor) -> Tensor:
        """Return A v (n, rows) for v (n, size)."""
        ...

    def back(self, u: Tensor) -> Tensor:
        """Return Aᵀ u (n, size) for u (n, rows)."""
        ...


@runtime_checkable
class Movable(Protocol):
    """An operator that can be moved to another device and dtype."""

    def to(self, device: Any = None, dtype: Any = None) -> Any: ...


def moved_copy(operator: Movable, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the operator on a device and in a dtype; a module, which ``to`` would change in place, is copied."""
    operator = copy.deepcopy(operator) if isinstance(operator, nn.Module) else operator
    return operator.to(device=device, dtype=dtype)


@dataclass(frozen=True, eq=False)
class Observation:
    """The operator with products that take and return the dtype and device of their rows; None is the identity."""

    operator: LinearOperator | None
    rows: int
    size: int

    @classmethod
    def of(cls, operator: Any, size: int, like: Tensor) -> Observation:
        """Check what a user gives as operator against ``size`` entries of the output.

        Raises:
            DataError: If it is no operator, or its width is wrong.
            NumericalError: If ``back`` is not the transpose of ``forward``.
        """
        if operator is None:
            return cls(None, size, size)
        if isinstance(operator, Tensor):
            operator = _matrix_operator(operator, like)
        if isinstance(operator, type) or not isinstance(operator, LinearOperator):
            raise DataError(
                f"the operator is {_described(operator)}; expected a matrix (dy, {size}), an object with rows, size, "
                "like, forward and back, such as lw.linear.OperatorDesign, or None for the identity."
            )
        if operator.like.dtype not in WIDE:
            raise DataError(f"the operator takes {operator.like.dtype}; expected float32 or float64.")
        if operator.size != size:
            raise DataError(
                f"the operator takes {operator.size} numbers and the network returns {size}; expected as many."
            )
        if isinstance(operator, Movable):
            operator = moved_copy(operator, like.device, like.dtype)
        design = OperatorDesign(operator.rows, size, operator.forward, operator.back, operator.like)
        refuse_unpaired(design)
        return cls(operator, operator.rows, size)

    def forward(self, v: Tensor) -> Tensor:
        """Return A v (K, dy) for rows v (K, dx)."""
        if self.operator is None:
            return v
        operator = self._in_dtype(v.dtype)
        return operator.forward(v.to(operator.like)).detach().to(v)

    def back(self, u: Tensor) -> Tensor:
        """Return Aᵀ u (K, dx) for rows u (K, dy)."""
        if self.operator is None:
            return u
        operator = self._in_dtype(u.dtype)
        return operator.back(u.to(operator.like)).detach().to(u)

    def _in_dtype(self, dtype: torch.dtype) -> LinearOperator:
        """Return the operator for vectors of this dtype: in float64 if it can be, since covariances need the digits."""
        assert self.operator is not None
        return self._double if dtype == torch.float64 else self.operator

    @cached_property
    def _double(self) -> LinearOperator:
        operator: Any = self.operator
        narrow = operator.like.dtype != torch.float64 and isinstance(operator, Movable)
        wide: LinearOperator = moved_copy(operator, operator.like.device, torch.float64) if narrow else operator
        return wide

    def basis(self, part: slice, like: Tensor) -> Tensor:
        """Return some rows of A, (K, dx)."""
        rows = like.new_zeros(part.stop - part.start, self.rows)
        rows[:, part] = torch.eye(len(rows), dtype=like.dtype, device=like.device)
        return self.back(rows)

    def sandwich(self, matrix: Tensor) -> Tensor:
        """Return A M Aᵀ for a symmetric matrix M (dx, dx)."""
        if self.operator is None:
            return matrix
        outer = self.forward(self.forward(matrix).mT)
        return 0.5 * (outer + outer.mT)


def _described(operator: Any) -> str:
    """Describe what is no operator; an array by its type alone."""
    return f"a {type(operator).__name__}" if hasattr(operator, "__array__") else seen(operator)


@dataclass(frozen=True, eq=False)
class MatrixOperator:
    """A matrix in memory as an operator."""

    matrix: Tensor

    @property
    def rows(self) -> int:
        return self.matrix.shape[0]

    @property
    def size(self) -> int:
        return self.matrix.shape[1]

    @property
    def like(self) -> Tensor:
        return self.matrix[:0, 0]

    def forward(self, v: Tensor) -> Tensor:
        return v @ self.matrix.mT

    def back(self, u: Tensor) -> Tensor:
        return u @ self.matrix

    def to(self, device: Any = None, dtype: Any = None) -> MatrixOperator:
        return MatrixOperator(self.matrix.to(device=device, dtype=dtype))


def _matrix_operator(matrix: Tensor, like: Tensor) -> LinearOperator:
    """Return the operator of a dense or sparse matrix, on the device and in the dtype of ``like``."""
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise DataError(f"the operator is a tensor of shape {tuple(matrix.shape)}; expected a matrix (dy, dx).")
    if matrix.is_complex():
        raise DataError(f"the operator is {matrix.dtype}; expected real numbers.")
    if matrix.layout is not torch.strided:
        entries = matrix.detach().to_sparse_coo().coalesce()
        check_finite(entries.values(), "the operator")
        row, column = entries.indices()
        return SparseOperator.from_entries(row, column, entries.values().to(like), (matrix.shape[0], matrix.shape[1]))
    check_finite(matrix, "the operator")
    return MatrixOperator(matrix.detach().to(like, copy=True))  # later changes of the matrix do not matter
