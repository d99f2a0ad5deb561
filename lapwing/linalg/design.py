"""Design matrices known by their products, for ridge regression and similar problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lapwing.core.settings import FUNCTION, Rule, integer, require
from lapwing.errors import DataError


class Part(Protocol):
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

    def __iter__(self) -> Iterator[Part]: ...


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

    def __iter__(self) -> Iterator[Part]:
        for x in self.matrix.split(self.part):
            yield OperatorPart(len(x), partial(_times, matrix=x.mT), partial(_times, matrix=x))


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return the rows times a matrix, in its dtype and on its device."""
    return rows.to(matrix) @ matrix


@dataclass(frozen=True, eq=False)
class OperatorDesign:
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

    rows: int
    size: int
    forward: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]
    like: Tensor
    streamed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(
            self,
            rows=integer(),
            size=integer(),
            forward=FUNCTION,
            back=FUNCTION,
            like=Rule("a tensor", lambda v: isinstance(v, Tensor), DataError),
        )

    def __iter__(self) -> Iterator[Part]:
        yield OperatorPart(self.rows, lambda v: self.forward(v.to(self.like)), lambda u: self.back(u.to(self.like)))


@dataclass(frozen=True, eq=False)
class DerivedDesign:
    """The members that a design made from another one has in common with it."""

    design: Design

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

    def __iter__(self) -> Iterator[Part]:
        return (self._scaled(part) for part in self.design)

    def _scaled(self, part: Part) -> Part:
        return OperatorPart(part.rows, lambda v: part.forward(v * self.factor), lambda u: part.back(u) * self.factor)


@dataclass(frozen=True, eq=False)
class DeflatedDesign(DerivedDesign):
    """The design X (I - UᵀU) without the directions of the orthonormal rows U (r, P), for vectors orthogonal to U."""

    vectors: Tensor

    def __iter__(self) -> Iterator[Part]:
        return (self._deflated(part) for part in self.design)

    def outside(self, v: Tensor) -> Tensor:
        """Return the part of v (n, P) that is orthogonal to U, in float64."""
        v = v.double()
        return v - (v @ self.vectors.mT) @ self.vectors

    def _deflated(self, part: Part) -> Part:
        return OperatorPart(part.rows, part.forward, lambda u: self.outside(part.back(u)))


def gram_product(design: Design, v: Tensor) -> Tensor:
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
    for part, rows in located_parts(design):
        total += part.back(u[:, rows])
    return total


def located_parts(design: Design) -> Iterator[tuple[Part, slice]]:
    """Yield the parts of one pass, each with the slice of rows that it covers."""
    start = 0
    for part in design:
        yield part, slice(start, start + part.rows)
        start += part.rows
