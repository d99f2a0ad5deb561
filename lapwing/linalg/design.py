"""Design matrices known by their products, for ridge regression and similar problems, and checks of given ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lapwing.core.data import check_finite
from lapwing.core.random import normal
from lapwing.errors import DataError, NumericalError

WIDE = (torch.float32, torch.float64)


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

    def __iter__(self) -> Iterator[Part]:
        yield OperatorPart(self.rows, lambda v: self.forward(v.to(self.like)), lambda u: self.back(u.to(self.like)))


@dataclass(frozen=True, eq=False)
class ScaledDesign:
    """The design X diag(factor), for a factor (P,)."""

    design: Design
    factor: Tensor

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

    def __iter__(self) -> Iterator[Part]:
        return (self._scaled(part) for part in self.design)

    def _scaled(self, part: Part) -> Part:
        return OperatorPart(part.rows, lambda v: part.forward(v * self.factor), lambda u: part.back(u) * self.factor)


def refuse_unpaired(design: OperatorDesign, tolerance: float = 1e-4) -> None:
    """Raise unless u·Xv = v·Xᵀu for random vectors, and a second call of either product equals the first.

    The second call gets its rows in reverse order, so that a product which mixes them is refused as well.
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
    """Return the product in float64; raise if its shape is wrong, it is not finite, or a second call differs."""
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
            f"expected {tolerance:g}: the same matrix at every call, and rows that do not depend on each other."
        )
    return first.double()


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


def feature_design(features: Tensor | OperatorDesign) -> Design:
    """Return the design of features without gradients; a matrix in half precision becomes float32."""
    if isinstance(features, Tensor):
        x = checked_features(features.detach())
        return MatrixDesign(x if x.dtype in WIDE else x.float())
    if not isinstance(features, OperatorDesign):
        raise DataError(f"features are a {type(features).__name__}; expected a tensor or an OperatorDesign.")
    if features.like.dtype not in WIDE:
        raise DataError(
            f"the functions of an OperatorDesign take {features.like.dtype}; expected float32 or float64. Compute in "
            "one of them, and give a like=... of it."
        )
    return replace(features, forward=_detached(features.forward), back=_detached(features.back))


def checked_features(x: Tensor, columns: int | None = None) -> Tensor:
    """Return the features (rows, columns); raise unless they are a finite floating-point matrix of that width."""
    if not isinstance(x, Tensor):
        raise DataError(f"features are a {type(x).__name__}; expected a tensor (rows, {columns or 'columns'}).")
    if x.ndim != 2 or x.numel() == 0 or x.shape[1] != (columns or x.shape[1]):
        raise DataError(f"features have the shape {tuple(x.shape)}; expected (rows, {columns or 'columns'}).")
    if not x.dtype.is_floating_point:
        raise DataError(f"features are {x.dtype}; expected floating-point numbers.")
    check_finite(x.detach(), "features")
    return x


def checked_targets(targets: Tensor, design: Design) -> Tensor:
    """Return the targets (rows,) in float64 on the design's device; raise unless there is one number for each row."""
    if not isinstance(targets, Tensor):
        raise DataError(f"targets are a {type(targets).__name__}; expected a tensor ({design.rows},).")
    if targets.is_complex():
        raise DataError(f"targets are {targets.dtype}; expected real numbers.")
    y = targets.detach().reshape(-1).double().to(design.like.device)
    if len(y) != design.rows or targets.shape[:1] != (design.rows,):
        raise DataError(
            f"{design.rows} rows of features and targets {tuple(targets.shape)}; expected ({design.rows},)."
        )
    if not bool(torch.isfinite(y).all()):
        raise DataError("targets hold NaN or infinity; expected finite numbers.")
    return y


def _detached(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function with results that are checked to be real tensors and require no gradients."""

    def apply(v: Tensor) -> Tensor:
        image = function(v)
        if not isinstance(image, Tensor) or image.is_complex():
            seen = image.dtype if isinstance(image, Tensor) else f"a {type(image).__name__}"
            raise DataError(f"a function of an OperatorDesign gave {seen}; expected a tensor of real numbers.")
        return image.detach()

    return apply
