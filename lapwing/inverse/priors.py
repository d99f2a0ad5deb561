"""Priors whose covariance is a sum of fixed matrices with coefficients, Σ = Σ_c coef_c S_c.

Products R Σ Rᵀ then follow from the fixed matrices R S_c Rᵀ for every value of the hyperparameters. A block is the
weights that share hyperparameters; each block has one or more classes. Either Σ is diagonal, or ``filter_gp()``
correlates neighbouring taps of one filter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from lapwing.errors import UnsupportedError
from lapwing.linalg.dense import cholesky
from lapwing.networks.selection import Selection
from lapwing.priors import BoundPrior, FilterGP, Prior, match_pattern
from lapwing.runtime.memory import chunks


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


COPIES = 3  # of float64 rows that a product by taps holds: the rows, by taps, and sums over partners


@dataclass(frozen=True)
class PriorPart:
    """One parameter: its taps, and the number of the class that each distance between them belongs to."""

    grid: TapGrid
    classes: tuple[int, ...]

    def fold(self, rows: Tensor) -> Tensor:
        """Return rows (n, m) of some or all filters of the parameter as (n, F, taps)."""
        return rows.reshape(len(rows), -1, self.grid.taps)

    def in_double(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield rows (n, m) as (n, some filters, taps) in float64, under the byte budget."""
        folded = self.fold(rows)
        each = COPIES * 8 * len(rows) * self.grid.taps
        for some in chunks(folded.shape[1], each, rows.device):
            yield folded[:, some].double()


class ClassCovariance:
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
        raise NotImplementedError

    @property
    def class_blocks(self) -> tuple[int, ...]:
        """The number of the block of each class; the first class of a block is that of single weights."""
        raise NotImplementedError

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the blocks; empty if there is one block of all weights."""
        raise NotImplementedError

    def coefficients(self) -> Tensor:
        """Return the coefficient of each class, (classes,)."""
        raise NotImplementedError

    def multiply(self, v: Tensor) -> Tensor:
        """Return Σ v."""
        raise NotImplementedError

    def root(self, v: Tensor) -> Tensor:
        """Return L v, where L Lᵀ = Σ."""
        raise NotImplementedError

    def limits(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest log hyperparameters, in the order of ``values``, flat.

        ``low`` and ``high`` (blocks,) are the smallest and largest variances of a weight of each block.
        """
        raise NotImplementedError

    def class_grams(self, n: int, pieces: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Return the fixed matrices R S_c Rᵀ, (classes, n, n) in float64, for n rows R over the weights, by pieces.

        Each piece is the name of a parameter and rows (n, m) over all of its entries, or over the entries of some of
        its filters (slices along its first dimension). Only one piece is needed at a time; pieces that are left out
        count as zero. Products of float32 rows are in float64 too: rounding would else make the weighted sum of the
        matrices indefinite. Cost: for a 3 × 3 kernel as much as 28 products (n, F) by (F, n), with F filters.
        """
        total = self.values.new_zeros(len(self.class_blocks), n, n)
        for part, rows in self._parts_of(pieces):
            for some in part.in_double(rows):
                part.grid.add_grams(some, [total[number] for number in part.classes])
        for number in self._halved:
            total[number] += total[number].mT.clone()
        return total

    @cached_property
    def _halved(self) -> tuple[int, ...]:
        """The classes of pairs of two different taps: ``TapGrid.add_grams`` adds only half of their matrices."""
        pairs = ((n, s) for part in self.parts for n, s in zip(part.classes, part.grid.squares, strict=True))
        return tuple(sorted({number for number, square in pairs if square}))

    def _parts_of(self, pieces: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[PriorPart, Tensor]]:
        """Yield the rows of each piece with the part of the parameter that they belong to."""
        parts = dict(zip(self.selection.names, self.parts, strict=True))
        return ((parts[name], rows) for name, rows in pieces)

    def gram(self, n: int, pieces: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Return R Σ Rᵀ (n, n) in float64 for these hyperparameters; pieces as for ``class_grams``."""
        total, coefficients = self.values.new_zeros(n, n), self.coefficients().detach()
        for part, rows in self._parts_of(pieces):
            matrix = part.grid.matrix(coefficients[list(part.classes)])
            for some in part.in_double(rows):
                total.addmm_((some @ matrix.to(some)).flatten(1), some.flatten(1).mT)
        return 0.5 * (total + total.mT)

    def class_lengths(self, pieces: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Return r S_c rᵀ (classes, n) for every row r; pieces as for ``class_grams``."""
        total: Tensor | None = None
        for part, rows in self._parts_of(pieces):
            if total is None:
                total = rows.new_zeros(len(self.class_blocks), len(rows))
            total[list(part.classes)] += part.grid.squared_lengths(part.fold(rows))
        assert total is not None, "at least one piece"
        return total


@dataclass(frozen=True, eq=False)
class DiagonalCovariance(BoundPrior, ClassCovariance):
    """A prior with a diagonal precision and one value for each group.

    There is one class for each precision, with the coefficient 1 / precision.
    """

    @classmethod
    def of(cls, prior: BoundPrior) -> DiagonalCovariance:
        """Return the prior; raise unless its covariance has a few classes."""
        if prior.scale is not None or prior.selection.index is not None or (prior.values.ndim and not prior.members):
            raise UnsupportedError(
                "the covariance of this prior is not a sum of a few fixed matrices: it has one precision for each "
                "weight, a scale from the curvature, or single weights of parameters; expected isotropic(), "
                "per_layer() or grouped() over whole parameters."
            )
        return cls(prior.given, prior.selection, prior.values, prior.counts, prior.members, prior.mean)

    @cached_property
    def parts(self) -> tuple[PriorPart, ...]:
        groups = self.group_numbers or [0] * len(self.selection.names)
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

    def root(self, v: Tensor) -> Tensor:
        return v / self.vector.sqrt().to(v)


def same_classes(one: ClassCovariance, other: ClassCovariance) -> bool:
    """Return whether two priors have the same fixed matrices S_c over the same parameters."""
    return (
        one.selection.names == other.selection.names
        and one.selection.shapes == other.selection.shapes
        and one.parts == other.parts
        and one.class_blocks == other.class_blocks
    )


JITTER = 1e-6  # added to the variance of every tap, relative, so that long length-scales can be factorised
MOST_TAPS = 1024  # a larger array with three dimensions is hardly a kernel
LENGTHS = (1e-2, 1e4)  # in taps; below, taps are independent, and above, they are equal
STARTS = (1e-8, 1e6)  # factors of the variances, for weights that are all zero or very large


def _block_name(given: FilterGP, name: str) -> str:
    """Return the name of the block of a parameter."""
    if given.blocks is None:  # one for each parameter; that of a layer's weight has the name of the layer
        return name.removesuffix(".weight")
    return given.blocks[match_pattern(name, given.blocks, "filter_gp", UnsupportedError)]


def _grid(name: str, shape: tuple[int, ...]) -> TapGrid:
    """Return the taps of a parameter; raise if they are too many for a kernel."""
    grid = tap_grid(tuple(shape[2:]) if math.prod(shape[2:]) > 1 else ())
    if grid.taps > MOST_TAPS:
        raise UnsupportedError(
            f"filter_gp() reads the parameter {name!r} of shape {shape} as kernels of {grid.taps} taps; expected at "
            f"most {MOST_TAPS}. Choose other weights: weights=lw.named(pattern)."
        )
    return grid


@dataclass(frozen=True)
class FilterBlock:
    """Kernels, one grid of taps for each parameter, that share a variance and, with several taps, a length-scale."""

    name: str
    grids: tuple[TapGrid, ...]

    @cached_property
    def squares(self) -> tuple[int, ...]:
        """The squared distances of all kernels, one for each class of the block."""
        return tuple(sorted({square for grid in self.grids for square in grid.squares}))

    @property
    def n_values(self) -> int:
        """The number of hyperparameters: variance and length-scale, or the variance alone."""
        return 2 if len(self.squares) > 1 else 1

    def coefficients(self, values: Tensor, slopes: bool = False) -> Tensor:
        """Return the covariance of two taps for each class, from the hyperparameters of this block.

        With ``slopes`` return its derivative in the log length-scale; zero without one.
        """
        if len(values) == 1:
            return torch.zeros_like(values) if slopes else values
        ratios = torch.tensor(self.squares, dtype=values.dtype, device=values.device).sqrt() / values[1]
        if slopes:
            return values[0] * torch.exp(-ratios) * ratios
        jitter = torch.zeros_like(ratios)
        jitter[0] = JITTER
        return values[0] * (torch.exp(-ratios) + jitter)


@dataclass(frozen=True, eq=False)
class BoundFilterGP(ClassCovariance):
    """A Gaussian process over the taps of the kernels of one selection. ``class_covariance`` makes one.

    Σ is block-diagonal: one matrix (taps, taps) for every filter, the same for all filters of a parameter.
    ``values`` (D,) are variances and length-scales in the order of ``names``.
    """

    given: FilterGP
    selection: Selection
    members: tuple[str, ...]  # the block of each parameter
    blocks: tuple[FilterBlock, ...]
    values: Tensor
    mean: float | Tensor = field(default=0.0, init=False)

    @classmethod
    def of(cls, given: FilterGP, selection: Selection, like: Tensor) -> BoundFilterGP:
        """Return the prior of these weights, on the device of ``like``."""
        if selection.index is not None:
            raise UnsupportedError(
                "filter_gp() got single weights; expected whole parameters: lw.all_weights or lw.named(pattern)."
            )
        members = tuple(_block_name(given, name) for name in selection.names)
        grids = tuple(map(_grid, selection.names, selection.shapes))
        blocks = tuple(
            FilterBlock(name, tuple(grid for grid, member in zip(grids, members, strict=True) if member == name))
            for name in dict.fromkeys(members)
        )
        values = [value for block in blocks for value in (given.variance, given.length_scale)[: block.n_values]]
        numbers = torch.tensor(values, dtype=torch.float64, device=like.device)
        return cls(given, selection, members, blocks, numbers)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each hyperparameter."""
        kinds = ("variance", "length_scale")
        return tuple(f"{block.name}.{kind}" for block in self.blocks for kind in kinds[: block.n_values])

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the blocks."""
        return tuple(block.name for block in self.blocks)

    @cached_property
    def class_blocks(self) -> tuple[int, ...]:
        return tuple(number for number, block in enumerate(self.blocks) for _ in block.squares)

    @cached_property
    def parts(self) -> tuple[PriorPart, ...]:
        pairs = [(block.name, square) for block in self.blocks for square in block.squares]
        numbers = {pair: number for number, pair in enumerate(pairs)}
        grids = [_grid(*pair) for pair in zip(self.selection.names, self.selection.shapes, strict=True)]
        return tuple(
            PriorPart(grid, tuple(numbers[member, square] for square in grid.squares))
            for grid, member in zip(grids, self.members, strict=True)
        )

    def coefficients(self) -> Tensor:
        return self._by_class(slopes=False)

    @cached_property
    def length_blocks(self) -> tuple[int, ...]:
        """The number of each class's block among the blocks that have a length-scale; -1 if it has none."""
        having = [number for number, block in enumerate(self.blocks) if block.n_values == 2]
        return tuple(having.index(number) if number in having else -1 for number in self.class_blocks)

    def coefficient_slopes(self) -> Tensor:
        """Return the derivative of each coefficient in the log length-scale of its block, (classes,)."""
        return self._by_class(slopes=True)

    def _by_class(self, slopes: bool) -> Tensor:
        values = self.values.split([block.n_values for block in self.blocks])
        return torch.cat([b.coefficients(v, slopes) for b, v in zip(self.blocks, values, strict=True)])

    @property
    def _matrices(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The covariance (taps, taps) of the taps of one filter of each parameter in float64, and its lower factor."""
        # A graph to the values is not kept: it may be used once, and a call without gradients would keep none.
        return self._compute() if self.values.requires_grad else self._kept_matrices

    def _compute(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return covariances and factors; parameters with equal ones share them."""
        coefficients = self.coefficients()
        matrices = {part: part.grid.matrix(coefficients[list(part.classes)]) for part in dict.fromkeys(self.parts)}
        roots = {part: cholesky(matrix, "a filter under filter_gp()") for part, matrix in matrices.items()}
        return tuple(matrices[part] for part in self.parts), tuple(roots[part] for part in self.parts)

    _kept_matrices = cached_property(_compute)

    def _filters(self, v: Tensor) -> Iterator[Tensor]:
        """Yield the entries of each parameter as filters, (K, F, taps)."""
        for part, rows in zip(self.parts, v.split(self.selection.sizes, -1), strict=True):
            yield part.fold(rows)

    def _map_filters(self, v: Tensor, matrices: tuple[Tensor, ...]) -> Tensor:
        """Return M w for every filter w of the rows, with the matrix M of its parameter."""
        rows = v.reshape(-1, self.selection.size)
        parts = [w @ m.to(w).mT for w, m in zip(self._filters(rows), matrices, strict=True)]
        return torch.cat([part.flatten(1) for part in parts], 1).reshape(v.shape)

    def multiply(self, v: Tensor) -> Tensor:
        return self._map_filters(v, self._matrices[0])

    def root(self, v: Tensor) -> Tensor:
        return self._map_filters(v, self._matrices[1])

    def penalty(self, theta: Tensor) -> Tensor:
        """Return θᵀ Σ⁻¹ θ for θ (P,)."""
        return self.penalties(theta).sum()

    def penalties(self, theta: Tensor) -> Tensor:
        """Return the part of the penalty that each parameter has."""
        terms = []
        for filters, factor in zip(self._filters(theta[None].double()), self._matrices[1], strict=True):
            moments = filters[0].mT @ filters[0]  # small, so that gradients in the values pass through it alone
            terms.append(torch.cholesky_solve(moments, factor).diagonal().sum())
        return torch.stack(terms)

    def with_trained_scale(self, theta: Tensor, rows: int) -> BoundFilterGP:
        """Return the prior with variances of the size of the trained weights, where a search for better ones starts.

        The penalty of each block becomes half of the number of its weights that ``rows`` data can determine.
        """
        share = 0.5 * min(1.0, rows / self.selection.size)
        penalties, values, number = self.penalties(theta).detach(), self.values.clone(), 0
        for block in self.blocks:
            of_block = [i for i, member in enumerate(self.members) if member == block.name]
            weights = sum(self.selection.sizes[i] for i in of_block)
            values[number] *= (penalties[of_block].sum() / (share * weights)).clamp(*STARTS)
            number += block.n_values
        return replace(self, values=values)

    def limits(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        ends = torch.stack([low, high]).log()
        lengths = ends.new_tensor(LENGTHS).log()
        pairs = [torch.stack([ends[:, i], lengths], 1)[:, : block.n_values] for i, block in enumerate(self.blocks)]
        smallest, largest = torch.cat(pairs, 1)
        return smallest, largest


def class_covariance(given: Prior, selection: Selection, like: Tensor) -> ClassCovariance:
    """Return the prior of these weights, on the device of ``like``; raise unless its covariance has a few classes.

    >>> import lapwing as lw
    >>> kernel = Selection(("up.weight", "up.bias"), ((2, 1, 3, 3), (2,)))
    >>> prior = class_covariance(lw.priors.filter_gp(variance=2.0), kernel, torch.empty(0))
    >>> prior.groups
    ('up', 'up.bias')
    >>> prior.multiply(torch.eye(20))[0, :3]
    tensor([2.0000, 0.2707, 0.0366])
    """
    if isinstance(given, FilterGP):
        return BoundFilterGP.of(given, selection, like)
    return DiagonalCovariance.of(given.bound(selection, like))
