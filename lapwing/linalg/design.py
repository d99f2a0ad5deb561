"""A design matrix known by its products: what ridge regression, and everything like it, needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Part(Protocol):
    """Some rows of a design, for vectors as rows."""

    @property
    def rows(self) -> int: ...

    def forward(self, v: Tensor) -> Tensor:
        """X v for v (n, P): (n, rows)."""
        ...

    def back(self, u: Tensor) -> Tensor:
        """Xᵀ u for u (n, rows): (n, P)."""
        ...


class Design(Protocol):
    """A matrix X (rows, P) in parts. Parts come in the same order at every pass, with the same rows."""

    @property
    def size(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def like(self) -> Tensor:
        """An empty tensor of the dtype and device that products have."""
        ...

    def __iter__(self) -> Iterator[Part]: ...


@dataclass(frozen=True, eq=False)
class MatrixPart:
    """Rows of a matrix in memory."""

    matrix: Tensor

    @property
    def rows(self) -> int:
        return self.matrix.shape[0]

    def forward(self, v: Tensor) -> Tensor:
        return v.to(self.matrix) @ self.matrix.mT

    def back(self, u: Tensor) -> Tensor:
        return u.to(self.matrix) @ self.matrix


@dataclass(frozen=True, eq=False)
class MatrixDesign:
    """A matrix in memory, in parts of at most ``part`` rows."""

    matrix: Tensor
    part: int = 4096

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
        for rows in self.matrix.split(self.part):
            yield MatrixPart(rows)


@dataclass(frozen=True, eq=False)
class OperatorPart:
    """A design given by two functions."""

    rows: int
    forward: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class OperatorDesign:
    """Products given as functions of rows of vectors: ``forward`` (n, P) -> (n, rows), ``back`` the other way."""

    rows: int
    size: int
    forward: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]
    like: Tensor

    def __iter__(self) -> Iterator[Part]:
        yield OperatorPart(self.rows, self.forward, self.back)


def gram_product(design: Design, v: Tensor) -> Tensor:
    """Xᵀ X v for every row of v (n, P), summed in float64."""
    total = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    for part in design:
        total += part.back(part.forward(v))
    return total


def forward_product(design: Design, v: Tensor) -> Tensor:
    """X v for every row of v: (n, rows) in float64."""
    return torch.cat([part.forward(v).double() for part in design], 1)


def back_product(design: Design, u: Tensor) -> Tensor:
    """Xᵀ u for every row of u (n, rows): (n, P) in float64."""
    total, start = torch.zeros(len(u), design.size, dtype=torch.float64, device=u.device), 0
    for part in design:
        total += part.back(u[:, start : start + part.rows])
        start += part.rows
    return total


def kernel(design: Design, inverse: Tensor | None = None) -> Tensor:
    """X D Xᵀ (rows, rows) in float64, with D a diagonal (P,) or the identity. For few rows."""
    eye = torch.eye(design.rows, dtype=torch.float64, device=design.like.device)
    found = []
    for rows in eye.split(max(1, 2**27 // (8 * design.size))):
        wide = back_product(design, rows)
        found.append(forward_product(design, wide if inverse is None else wide * inverse))
    matrix = torch.cat(found)
    return 0.5 * (matrix + matrix.mT)
