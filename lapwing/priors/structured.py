"""The contract of Gaussian priors whose covariance is a sum of fixed matrices with coefficients, Σ = Σ_c coef_c S_c.

Products R Σ Rᵀ then follow from the fixed matrices R S_c Rᵀ for every value of the hyperparameters. A block is the
weights that share hyperparameters; each block has one or more classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.core.memory import runs
from lapwing.core.random import normal_rows
from lapwing.errors import UnsupportedError
from lapwing.networks.selection import Selection
from lapwing.priors.taps import TapGrid, tap_grid

COPIES = 3  # of float64 rows that a product by taps holds: the rows, by taps, and sums over partners


@dataclass(frozen=True)
class PriorPart:
    """One parameter: its taps, and the number of the class that each distance between them belongs to."""

    grid: TapGrid
    classes: tuple[int, ...]

    def folded(self, rows: Tensor) -> Tensor:
        """Return rows (n, m) of some or all filters of the parameter as (n, F, taps)."""
        return rows.reshape(len(rows), -1, self.grid.taps)

    def in_double(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield rows (n, m) as (n, some filters, taps) in float64, under the byte budget."""
        folded = self.folded(rows)
        each = COPIES * 8 * len(rows) * self.grid.taps
        for some in runs(folded.shape[1], each, rows.device):
            yield folded[:, some].double()


class ClassCovariance(Protocol):
    """A Gaussian prior θ ~ N(mean, Σ) over selected weights, with Σ = Σ_c coef_c(values) S_c for fixed matrices S_c.

    Vectors are rows (K, P) of any floating dtype, in the order of the selection. Everything is differentiable in
    ``values``, positive hyperparameters in float64.
    """

    selection: Selection
    values: Tensor
    mean: float | Tensor

    @property
    def parts(self) -> tuple[PriorPart, ...]:
        """One part for each parameter of the selection."""
        ...

    @property
    def class_blocks(self) -> tuple[int, ...]:
        """The number of the block of each class; the first class of a block is that of single weights."""
        ...

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the blocks; empty if there is one block of all weights."""
        ...

    def coefficients(self) -> Tensor:
        """Return the coefficient of each class, (classes,)."""
        ...

    def multiply(self, v: Tensor) -> Tensor:
        """Return Σ v."""
        ...

    def solve(self, v: Tensor) -> Tensor:
        """Return Σ⁻¹ v."""
        ...

    def root(self, v: Tensor) -> Tensor:
        """Return L v, where L Lᵀ = Σ."""
        ...

    def root_transposed(self, v: Tensor) -> Tensor:
        """Return Lᵀ v, where L Lᵀ = Σ."""
        ...

    def logdet(self) -> Tensor:
        """Return the log-determinant of the precision Σ⁻¹."""
        ...

    def penalty(self, theta: Tensor) -> Tensor:
        """Return (θ - mean)ᵀ Σ⁻¹ (θ - mean) for θ (P,)."""
        ...

    def limits(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest log hyperparameters, in the order of ``values``, flat.

        ``low`` and ``high`` (blocks,) are the smallest and largest variances of a weight of each block.
        """
        ...

    def samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the weights minus their mean, (n, P), in float64."""
        like = torch.empty(0, dtype=torch.float64, device=self.values.device)
        return self.root(normal_rows(n, self.selection.size, generator, like))

    def class_grams(self, pieces: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Return the fixed matrices R S_c Rᵀ, (classes, n, n) in float64, for n rows R over the weights, by pieces.

        Each piece is the name of a parameter and rows (n, m) over all of its entries, or over the entries of some of
        its filters (slices along its first dimension). Only one piece is needed at a time; pieces that are left out
        count as zero. Products of float32 rows are in float64 too: rounding would else make the weighted sum of the
        matrices indefinite. Cost: for a 3 × 3 kernel as much as 28 products (n, F) by (F, n), with F filters.
        """
        parts = dict(zip(self.selection.names, self.parts, strict=True))
        total: Tensor | None = None
        for name, rows in pieces:
            part = parts[name]
            if total is None:
                total = rows.new_zeros(len(self.class_blocks), len(rows), len(rows), dtype=torch.float64)
            for some in part.in_double(rows):
                part.grid.add_grams(some, [total[number] for number in part.classes])
        assert total is not None, "at least one piece"
        for number in self._halved:
            total[number] += total[number].mT.clone()
        return total

    @cached_property
    def _halved(self) -> tuple[int, ...]:
        """The classes of pairs of two taps, of which ``TapGrid.add_grams`` adds each once."""
        pairs = ((n, s) for part in self.parts for n, s in zip(part.classes, part.grid.squares, strict=True))
        return tuple(sorted({number for number, square in pairs if square}))

    def gram(self, pieces: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Return R Σ Rᵀ (n, n) in float64 for these hyperparameters; pieces as for ``class_grams``."""
        parts, coefficients = dict(zip(self.selection.names, self.parts, strict=True)), self.coefficients().detach()
        total: Tensor | None = None
        for name, rows in pieces:
            part = parts[name]
            if total is None:
                total = rows.new_zeros(len(rows), len(rows), dtype=torch.float64)
            matrix = part.grid.matrix(coefficients[list(part.classes)])
            for some in part.in_double(rows):
                total.addmm_((some @ matrix.to(some)).flatten(1), some.flatten(1).mT)
        assert total is not None, "at least one piece"
        return 0.5 * (total + total.mT)

    def class_lengths(self, pieces: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Return r S_c rᵀ (classes, n) for every row r; pieces as for ``class_grams``."""
        parts = dict(zip(self.selection.names, self.parts, strict=True))
        total: Tensor | None = None
        for name, rows in pieces:
            if total is None:
                total = rows.new_zeros(len(self.class_blocks), len(rows))
            part = parts[name]
            total[list(part.classes)] += part.grid.squared_lengths(part.folded(rows))
        assert total is not None, "at least one piece"
        return total


class DiagonalCovariance(ClassCovariance, Protocol):
    """The members of ``ClassCovariance`` for a prior with a diagonal precision and one value for each group.

    There is one class for each precision, with the coefficient 1 / precision.
    """

    members: tuple[str, ...]
    scale: Tensor | None

    @property
    def vector(self) -> Tensor:
        """The precision of every weight, (P,)."""
        ...

    @property
    def groups(self) -> tuple[str, ...]: ...

    @cached_property
    def parts(self) -> tuple[PriorPart, ...]:
        if self.scale is not None or self.selection.index is not None or (self.values.ndim and not self.members):
            raise UnsupportedError(
                "the covariance of this prior is no sum of a few fixed matrices: it has one precision for each weight, "
                "a scale from the curvature, or single weights of parameters; expected isotropic(), per_layer() or "
                "grouped() over whole parameters."
            )
        numbers = {group: number for number, group in enumerate(self.groups)}
        groups = [numbers[group] for group in self.members] or [0] * len(self.selection.names)
        return tuple(PriorPart(tap_grid(()), (number,)) for number in groups)

    @property
    def class_blocks(self) -> tuple[int, ...]:
        return tuple(range(self.values.numel()))

    def coefficients(self) -> Tensor:
        return self.values.reshape(-1).reciprocal()

    def limits(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return -high.log(), -low.log()

    def multiply(self, v: Tensor) -> Tensor:
        return v / self.vector.to(v)

    def solve(self, v: Tensor) -> Tensor:
        return v * self.vector.to(v)

    def root(self, v: Tensor) -> Tensor:
        return v / self.vector.sqrt().to(v)

    def root_transposed(self, v: Tensor) -> Tensor:
        return self.root(v)


def same_classes(one: Any, other: Any) -> bool:
    """Return whether two priors have the same fixed matrices S_c over the same parameters."""
    return (
        one.selection.names == other.selection.names
        and one.selection.shapes == other.selection.shapes
        and one.parts == other.parts
        and one.class_blocks == other.class_blocks
    )
