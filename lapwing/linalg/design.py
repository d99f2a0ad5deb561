"""A design matrix known by its products: what ridge regression, and everything like it, needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lapwing.core.random import normal
from lapwing.errors import DataError, NumericalError


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

    def gram(self, v: Tensor) -> Tensor:
        """Xᵀ X v for v (n, P): (n, P)."""
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

    def gram(self, v: Tensor) -> Tensor:
        return self.back(self.forward(v))


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

    def gram(self, v: Tensor) -> Tensor:
        return self.back(self.forward(v))


@dataclass(frozen=True, eq=False)
class OperatorDesign:
    """Products given as functions of rows of vectors: ``forward`` (n, P) -> (n, rows), ``back`` the other way.

    ``like`` is an empty tensor of the dtype and device that the functions take.
    """

    rows: int
    size: int
    forward: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]
    like: Tensor

    def __iter__(self) -> Iterator[Part]:
        yield OperatorPart(self.rows, lambda v: self.forward(v.to(self.like)), lambda u: self.back(u.to(self.like)))


def refuse_unpaired(design: OperatorDesign, tolerance: float = 1e-4) -> None:
    """Raise unless u·Xv = v·Xᵀu for chance vectors, and a second call of either product repeats the first.

    The second call gets its rows in the other order, so that a product which mixes them is found as well.
    """
    like, gen = torch.empty(0, dtype=torch.float64, device=design.like.device), torch.Generator().manual_seed(0)
    (part,) = design
    v, u = normal((2, design.size), gen, like), normal((2, design.rows), gen, like)
    forward = _repeated(part.forward, v, design.rows, "forward", tolerance)
    back = _repeated(part.back, u, design.size, "back", tolerance)
    gap, scale = float(((u * forward).sum(1) - (v * back).sum(1)).norm()), float(forward.norm() + back.norm())
    if gap > tolerance * scale:
        raise NumericalError(
            f"back is not the transpose of forward: u·Xv and v·Xᵀu differ by {gap / scale:.3g} of their size; expected "
            f"{tolerance:g}. Check the two functions of the OperatorDesign."
        )


def _repeated(product: Callable[[Tensor], Tensor], rows: Tensor, width: int, name: str, tolerance: float) -> Tensor:
    first = product(rows)
    if first.shape != (len(rows), width):
        raise DataError(
            f"{name} of an OperatorDesign made {tuple(first.shape)} of rows {tuple(rows.shape)}; expected "
            f"({len(rows)}, {width}): vectors are rows."
        )
    if not bool(torch.isfinite(first).all()):
        raise NumericalError(f"{name} of an OperatorDesign gave NaN or infinity; expected finite numbers.")
    gap, scale = float((first - product(rows.flip(0)).flip(0)).norm()), float(first.norm())
    if gap > tolerance * scale:
        raise NumericalError(
            f"two calls of {name} of an OperatorDesign with the same rows differ by {gap / scale:.3g} of their size; "
            f"expected {tolerance:g}: the same matrix at every call, and rows apart from each other."
        )
    return first.double()


def gram_product(design: Design, v: Tensor) -> Tensor:
    """Xᵀ X v for every row of v (n, P), summed in float64."""
    total: Tensor | None = None
    for part in design:
        total = part.gram(v).double() if total is None else total.add_(part.gram(v))
    return torch.zeros_like(v, dtype=torch.float64) if total is None else total


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
