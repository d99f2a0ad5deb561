"""Operators known by their products: symmetric ones, designs, and sparse matrices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from lapwing.errors import DataError, NumericalError
from lapwing.runtime.settings import FUNCTION, HasSettings, Rule, describe, integer, of_class, required
from lapwing.runtime.threads import normal, quiet

Product = Callable[[Tensor], Tensor]  # rows (K, P) -> rows (K, P), each row independent of the others

EPS = torch.finfo(torch.float64).eps
TINY = torch.finfo(torch.float64).tiny
CAUSES = (
    "Put the network in evaluation mode (dropout and batch statistics change what it computes), remove random "
    "augmentation and shuffling that drops data, and use deterministic kernels."
)


def identity(rows: Tensor) -> Tensor:
    """Return the rows: the product of the identity."""
    return rows


def apply_checked(product: Product, rows: Tensor) -> Tensor:
    """Return the images of the rows in float64; raise if they are not finite or have another shape."""
    image = product(rows)
    if image.shape != rows.shape:
        raise NumericalError(
            f"an operator mapped rows of shape {tuple(rows.shape)} to {tuple(image.shape)}; expected the same shape."
        )
    if not bool(torch.isfinite(image).all()):
        raise NumericalError("an operator's products are not finite; check the data and the weights.")
    return image.double()


def refuse_asymmetric_images(rows: Tensor, images: Tensor, tolerance: float = 1e-3) -> None:
    """Raise if u·Av and v·Au differ for two of the rows, whose images are given.

    The tolerance is relative to |u| |Av| + |v| |Au|. Takes no product; a single row cannot show asymmetry.
    """
    images = images / images.abs().max().clamp_min(torch.finfo(images.dtype).tiny)
    inner = rows @ images.mT
    sizes = rows.norm(dim=1)[:, None] * images.norm(dim=1)
    gap = (inner - inner.mT).abs() / (sizes + sizes.mT).clamp_min(torch.finfo(inner.dtype).tiny)
    if float(gap.max()) > tolerance:
        raise NumericalError(
            f"an operator is not symmetric: u·Av and v·Au differ by {float(gap.max()):.3g} of their size; expected "
            f"{tolerance:g}. {CAUSES}"
        )


def refuse_asymmetric(
    product: Product,
    size: int,
    *,
    generator: torch.Generator | None = None,
    tolerance: float = 1e-4,
    device: torch.device | None = None,
) -> None:
    """Raise unless u·Av = v·Au for a pair of random vectors and a second product equals the first.

    The second product gets the rows in reverse order, so an operator that mixes its rows is refused as well. The
    tolerance is relative to |Au| + |Av|. Cost: two products of two rows.

    >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> refuse_asymmetric(lambda v: v @ a, 2)
    """
    pair = normal((2, size), generator, torch.empty(0, dtype=torch.float64, device=device))
    first, second = apply_checked(product, pair), apply_checked(product, pair.flip(0)).flip(0)
    scale = float(first.norm(dim=1).sum())
    change = float((first - second).norm())
    if change > tolerance * scale:
        raise NumericalError(
            f"two calls to an operator with the same rows differ by {change / scale:.3g} of its size; expected "
            f"{tolerance:g}. {CAUSES}"
        )
    gap = float((pair[0] @ first[1] - pair[1] @ first[0]).abs())
    if gap > tolerance * scale:
        raise NumericalError(
            f"an operator is not symmetric: u·Av and v·Au differ by {gap / scale:.3g} of its size; expected "
            f"{tolerance:g}. {CAUSES}"
        )


@dataclass(frozen=True, eq=False)
class Solution:
    """The solution x (K, P) of A x = b for K right-hand sides, with its accuracy and cost.

    ``residuals`` (K,) are the relative residuals |b - A x| / |b|, and ``iterations`` is the number of iterations, of
    one product each. Conjugate gradients update the residual at each iteration and compute b - A x now and then; then
    ``residuals`` are the larger of the two and ``updated`` (K,) are the updated ones. Where there are updated ones,
    they decide on convergence: float64 rounding of A x can keep b - A x above a very small tolerance.
    """

    x: Tensor
    residuals: Tensor
    iterations: int
    tolerance: float
    updated: Tensor | None = None

    @property
    def converged(self) -> bool:
        """Whether the residual of every row is at most the tolerance."""
        return bool(((self.residuals if self.updated is None else self.updated) <= self.tolerance).all())

    def require_convergence(self, solver: str, advice: str) -> Solution:
        """Return this solution; raise a ``NumericalError`` with its residual if it has not converged."""
        if self.converged:
            return self
        raise NumericalError(
            f"{solver} stopped after {self.iterations} iterations with a relative residual of "
            f"{float(self.residuals.max()):.3g}; expected {self.tolerance:g}. {advice}"
        )


class DesignRows(Protocol):
    """Consecutive rows of a design matrix X. Vectors are rows."""

    @property
    def rows(self) -> int: ...

    def forward(self, v: Tensor) -> Tensor:
        """Return X v (n, rows) for v (n, P)."""
        ...

    def back(self, u: Tensor) -> Tensor:
        """Return Xᵀ u (n, P) for u (n, rows)."""
        ...

    def gram(self, v: Tensor) -> Tensor:
        """Return Xᵀ X v (n, P) for v (n, P)."""
        ...


class Design(Protocol):
    """A matrix X (rows, P) in parts, which come in the same order and with the same rows at every pass."""

    @property
    def size(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def like(self) -> Tensor:
        """An empty tensor of the dtype and device that products have."""
        ...

    @property
    def streamed(self) -> bool:
        """Whether every pass computes the parts again, so that they cannot be visited in another order."""
        ...

    def __iter__(self) -> Iterator[DesignRows]: ...


@dataclass(frozen=True, eq=False)
class OperatorPart:
    """Rows of a design given by two functions."""

    rows: int
    forward: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]

    def gram(self, v: Tensor) -> Tensor:
        return self.back(self.forward(v))


@dataclass(frozen=True, eq=False)
class MatrixDesign:
    """A matrix in memory, in parts of at most ``part`` rows."""

    matrix: Tensor
    part: int = 4096
    streamed: ClassVar[bool] = False

    @property
    def size(self) -> int:
        return self.matrix.shape[1]

    @property
    def rows(self) -> int:
        return self.matrix.shape[0]

    @property
    def like(self) -> Tensor:
        return self.matrix[:0, 0]

    def __iter__(self) -> Iterator[DesignRows]:
        for x in self.matrix.split(self.part):
            yield OperatorPart(len(x), partial(_times, matrix=x.mT), partial(_times, matrix=x))


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return the rows times a matrix, in its dtype and on its device."""
    return rows.to(matrix) @ matrix


@dataclass(frozen=True, eq=False)
class OperatorDesign(HasSettings):
    """A design matrix X (rows, size) given by two functions that multiply by X and by Xᵀ. Vectors are rows.

    Args:
        rows: the number of rows of X.
        size: the number of columns P of X.
        forward: maps v (n, P) to X v (n, rows), for any n.
        back: maps u (n, rows) to Xᵀ u (n, P), for any n.
        like: an empty tensor of the dtype and device that the functions take, float32 or float64.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> design = OperatorDesign(rows=3, size=2, forward=lambda v: v @ x.T, back=lambda u: u @ x, like=x[:0, 0])
    >>> forward_product(design, torch.ones(1, 2))
    tensor([[ 3.,  7., 11.]], dtype=torch.float64)
    """

    rows: int = required(integer())
    size: int = required(integer())
    forward: Callable[[Tensor], Tensor] = required(FUNCTION)
    back: Callable[[Tensor], Tensor] = required(FUNCTION)
    like: Tensor = required(of_class("a tensor", Tensor, DataError))
    streamed: ClassVar[bool] = False

    def __iter__(self) -> Iterator[DesignRows]:
        yield OperatorPart(self.rows, lambda v: self.forward(v.to(self.like)), lambda u: self.back(u.to(self.like)))


@dataclass(frozen=True, eq=False)
class DerivedDesign:
    """A design made from another one, part by part. Classes define ``derive``."""

    design: Design

    def derive(self, part: DesignRows, rows: slice) -> DesignRows:
        """Return the part made from one of the other design, which has these of its rows."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[DesignRows]:
        return itertools.starmap(self.derive, parts_with_rows(self.design))

    @property
    def size(self) -> int:
        return self.design.size

    @property
    def rows(self) -> int:
        return self.design.rows

    @property
    def like(self) -> Tensor:
        return self.design.like

    @property
    def streamed(self) -> bool:
        return self.design.streamed


@dataclass(frozen=True, eq=False)
class ScaledDesign(DerivedDesign):
    """The design X diag(factor), for a factor (P,)."""

    factor: Tensor

    def derive(self, part: DesignRows, rows: slice) -> DesignRows:
        return OperatorPart(part.rows, lambda v: part.forward(v * self.factor), lambda u: part.back(u) * self.factor)


@dataclass(frozen=True, eq=False)
class DeflatedDesign(DerivedDesign):
    """The design X (I - UᵀU) without the directions of the orthonormal rows U (r, P), for vectors orthogonal to U."""

    vectors: Tensor

    def outside(self, v: Tensor) -> Tensor:
        """Return the part of v (n, P) that is orthogonal to U, in float64."""
        v = v.double()
        return v - (v @ self.vectors.mT) @ self.vectors

    def derive(self, part: DesignRows, rows: slice) -> DesignRows:
        return OperatorPart(part.rows, part.forward, lambda u: self.outside(part.back(u)))


def gram_product(design: Iterable[DesignRows], v: Tensor) -> Tensor:
    """Return Xᵀ X v (n, P) for every row of v (n, P), summed in float64."""
    total: Tensor | None = None
    for part in design:
        total = part.gram(v).double() if total is None else total.add_(part.gram(v))
    return torch.zeros_like(v, dtype=torch.float64) if total is None else total


def forward_product(design: Design, v: Tensor) -> Tensor:
    """Return X v (n, rows) for every row of v (n, P), in float64."""
    return torch.cat([part.forward(v).double() for part in design], 1)


def back_product(design: Design, u: Tensor) -> Tensor:
    """Return Xᵀ u (n, P) for every row of u (n, rows), in float64."""
    total = torch.zeros(len(u), design.size, dtype=torch.float64, device=u.device)
    for part, rows in parts_with_rows(design):
        total += part.back(u[:, rows])
    return total


def parts_with_rows(design: Design) -> Iterator[tuple[DesignRows, slice]]:
    """Yield the parts of one pass, each with the slice of rows that it covers."""
    start = 0
    for part in design:
        yield part, slice(start, start + part.rows)
        start += part.rows


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
        rows, size = _check_shape(shape)
        VALUES.check("value", value)
        places = [_check_indices(*given, len(value)) for given in (("row", row, rows), ("column", column, size))]
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
            raise DataError(f"dtype is {describe(dtype)}; expected torch.float32, torch.float64 or None.")
        matrix, transpose = (_move(part, device, dtype) for part in (self.matrix, self.transpose))
        return SparseOperator(matrix, transpose)

    def dense(self) -> Tensor:
        """Return A (rows, size) as a dense tensor."""
        return self.matrix.to_dense()

    def _require(self, vectors: object, name: str, width: int) -> None:
        dtype, device = self.matrix.dtype, self.matrix.device
        if not isinstance(vectors, Tensor) or vectors.ndim < 1 or vectors.shape[-1] != width:
            raise DataError(f"{name} is {describe(vectors)}; expected a tensor of shape (..., {width}).")
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


def _check_shape(shape: Any) -> tuple[int, int]:
    Rule("a pair (rows, columns)", lambda v: isinstance(v, tuple) and len(v) == 2).check("shape", shape)
    for name, extent in zip(("the number of rows", "the number of columns"), shape):
        integer().check(name, extent)
    return shape


def _check_indices(name: str, indices: Any, limit: int, entries: int) -> Tensor:
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


def _move(matrix: Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    starts, columns = (part.to(device) for part in (matrix.crow_indices(), matrix.col_indices()))
    value = matrix.values().to(device=device, dtype=dtype)
    return _csr_tensor(starts, columns, value, tuple(matrix.shape))
