"""The taps of a convolution kernel: their distances, and products of rows by pairs of taps of equal distance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class TapGrid:
    """The taps of a kernel of this shape; a weight that belongs to no kernel has the shape () and one tap.

    A pair of taps belongs to the class of its distance. The matrices S_c (taps, taps) have ones at the pairs of class c
    and zeros elsewhere, so that a covariance that depends on the distance alone is Σ_c coefficient_c S_c.

    >>> TapGrid((3, 3)).squares
    (0, 1, 2, 4, 5, 8)
    """

    shape: tuple[int, ...] = ()

    @property
    def taps(self) -> int:
        """The number of taps."""
        return math.prod(self.shape)

    @cached_property
    def square_table(self) -> tuple[tuple[int, ...], ...]:
        """The squared distance of every pair of taps; integers, so that equal distances are recognised."""
        places = list(itertools.product(*map(range, self.shape)))
        return tuple(tuple(sum((i - j) ** 2 for i, j in zip(a, b, strict=True)) for b in places) for a in places)

    @cached_property
    def squares(self) -> tuple[int, ...]:
        """The squared distance of each class, ascending from zero."""
        return tuple(sorted({square for line in self.square_table for square in line}))

    @cached_property
    def index(self) -> Tensor:
        """The class of every pair of taps, (taps, taps)."""
        numbers = {square: number for number, square in enumerate(self.squares)}
        return torch.tensor([[numbers[square] for square in line] for line in self.square_table])

    @cached_property
    def covers(self) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
        """For each class of two taps, taps with their partners: every unordered pair of the class appears once.

        Few taps are chosen (greedily those with most pairs left), because each of them costs one matrix product.
        """
        return tuple(tuple(_cover(self.square_table, square)) for square in self.squares[1:])

    def matrix(self, coefficients: Tensor) -> Tensor:
        """Return Σ_c coefficient_c S_c (taps, taps)."""
        return coefficients[self.index.to(coefficients.device)]

    def add_grams(self, rows: Tensor, totals: list[Tensor]) -> None:
        """Add R S_c Rᵀ to one total (n, n) for each class, for rows (n, F, taps); pairs of two taps are added once.

        A class of distance above zero gets the half X of its matrix X + Xᵀ: see ``covers``.
        """
        whole = rows.flatten(1)
        totals[0].addmm_(whole, whole.mT)
        if self.taps == 1:
            return
        by_tap = rows.permute(2, 0, 1).contiguous()
        for cover, total in zip(self.covers, totals[1:], strict=True):
            for tap, partners in cover:
                partner = by_tap[partners[0]] if len(partners) == 1 else by_tap[list(partners)].sum(0)
                total.addmm_(by_tap[tap], partner.mT)

    def squared_lengths(self, rows: Tensor) -> Tensor:
        """Return r S_c rᵀ (classes, n) for every row r of rows (n, F, taps)."""
        products = (rows.mT @ rows).flatten(1).mT  # (taps², n)
        total = products.new_zeros(len(self.squares), len(rows))
        return total.index_add_(0, self.index.flatten().to(rows.device), products)


@lru_cache(maxsize=256)
def tap_grid(shape: tuple[int, ...]) -> TapGrid:
    """Return the grid of a shape, the same object at every call: its tables are computed once."""
    return TapGrid(shape)


def _cover(table: tuple[tuple[int, ...], ...], square: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield taps with their partners at this squared distance; each pair appears once, and few taps are needed."""
    taps = range(len(table))
    left = [{b for b in taps if table[a][b] == square} for a in taps]
    while any(left):
        tap = max(taps, key=lambda a: len(left[a]))
        partners = tuple(sorted(left[tap]))
        for partner in partners:
            left[partner].discard(tap)
        left[tap] = set()
        yield tap, partners
