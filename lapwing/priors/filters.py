"""A Gaussian process over the taps of convolution kernels: neighbouring taps of one filter are correlated."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import UnsupportedError
from lapwing.linalg.dense import cholesky
from lapwing.networks.jacobians import Block, BlockJacobian, LayerJacobians
from lapwing.networks.selection import Selection
from lapwing.priors.base import BlockPrior, BoundPrior, ClassCovariance, Prior, PriorPart, TapGrid, tap_grid
from lapwing.runtime.settings import POSITIVE, Rule


def prior_kernel(jacobians: LayerJacobians, prior: BoundPrior, other: LayerJacobians | None = None) -> Tensor:
    r"""Return K = J A⁻¹ J'ᵀ between all inputs and seeds of two batches, (B K, B' K'), or of one batch with itself.

    Computed layer by layer, without forming the Jacobian if the layers allow it. A layer with one precision is divided
    by it at the end. Differentiable in the precisions, and in the inputs if the Jacobians are.
    """
    selection = jacobians.selection
    total: Tensor | None = None
    for block, part, other_part in block_pairs(jacobians, other):
        block_prior = prior.on(block)
        value, weights = block_prior.value.to(jacobians.dtype), None
        if block_prior.scale is not None or selection.index is not None or value.ndim:
            weights = _inverse(block_prior, block, selection, jacobians.dtype)
        kernel = part.between(other_part, weights)
        kernel = kernel / value if value.ndim == 0 else kernel
        total = kernel if total is None else total + kernel
    assert total is not None
    return total


def block_pairs(
    one: LayerJacobians, other: LayerJacobians | None
) -> Iterator[tuple[Block, BlockJacobian, BlockJacobian]]:
    """Iterate over the blocks of two batches together; for one batch each block is formed once."""
    if other is None or other is one:
        yield from ((block, part, part) for block, part in one)
        return
    for (block, part), (_, other_part) in zip(one, other, strict=True):
        yield block, part, other_part


def _inverse(prior: BlockPrior, block: Block, selection: Selection, dtype: torch.dtype) -> Tensor:
    """Return one over the precision in the block's form, zero for entries that are not selected.

    A scalar ``prior.value`` is left out; the caller divides by it.
    """
    ones = torch.ones(selection.size, dtype=dtype, device=prior.value.device)
    inverse = block.arrange(selection.split(ones))
    if prior.scale is not None:
        inverse = inverse / prior.scale.to(inverse).clamp_min(torch.finfo(dtype).tiny)
    if prior.value.ndim == 0:
        return inverse
    each = torch.where(inverse > 0, prior.value.to(inverse), 1)  # entries that are not selected have no precision
    return inverse / each


JITTER = 1e-6  # added to the variance of every tap, relative, so that long length-scales can be factorised
MOST_TAPS = 1024  # a larger array with three dimensions is hardly a kernel
LENGTHS = (1e-2, 1e4)  # in taps; below, taps are independent, and above, they are equal
STARTS = (1e-8, 1e6)  # factors of the variances, for weights that are all zero or very large
BLOCKS = Rule("a mapping from regular expressions to names of blocks, or None", lambda v: _is_mapping(v) or v is None)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(t, str) for p in value.items() for t in p)


@dataclass(frozen=True)
class FilterGP(Prior):
    """A Gaussian process over the taps of each filter, as users give it; see ``filter_gp``.

    >>> import lapwing as lw
    >>> lw.priors.filter_gp(variance=2.0, length_scale=0.3).length_scale
    0.3
    """

    variance: float = 1.0
    length_scale: float = 0.5
    blocks: Mapping[str, str] | None = None
    mean: float | Tensor = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        POSITIVE.check("variance", self.variance)
        POSITIVE.check("length_scale", self.length_scale)
        BLOCKS.check("blocks", self.blocks)

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        raise UnsupportedError(
            "filter_gp() has a covariance between the taps of a kernel; expected a prior with a diagonal precision, "
            "such as lw.per_layer(). lw.inverse.fit(model, x, y, operator) takes filter_gp()."
        )

    def structured(self, selection: Selection, like: Tensor) -> BoundFilterGP:
        if selection.index is not None:
            raise UnsupportedError(
                "filter_gp() got single weights; expected whole parameters: lw.all_weights or lw.named(pattern)."
            )
        members = tuple(self._block(name) for name in selection.names)
        grids = tuple(map(_grid, selection.names, selection.shapes))
        blocks = tuple(
            FilterBlock(name, tuple(grid for grid, member in zip(grids, members, strict=True) if member == name))
            for name in dict.fromkeys(members)
        )
        values = [value for block in blocks for value in (self.variance, self.length_scale)[: block.n_values]]
        numbers = torch.tensor(values, dtype=torch.float64, device=like.device)
        return BoundFilterGP(self, selection, members, blocks, numbers)

    def _block(self, name: str) -> str:
        """Return the name of the block of a parameter."""
        if self.blocks is None:  # one for each parameter; that of a layer's weight has the name of the layer
            return name.removesuffix(".weight")
        try:
            matches = {pattern for pattern in self.blocks if re.fullmatch(pattern, name)}
        except re.error as error:
            raise UnsupportedError(
                f"filter_gp(): one of {list(self.blocks)} is no regular expression: {error}; expected such."
            ) from error
        if len(matches) != 1:
            raise UnsupportedError(
                f"filter_gp(): the parameter {name!r} matches {len(matches)} of the patterns {list(self.blocks)}; "
                "expected one."
            )
        return self.blocks[matches.pop()]


def filter_gp(
    variance: float = 1.0, length_scale: float = 0.5, blocks: Mapping[str, str] | None = None
) -> FilterGP:  # fmt: skip
    """Return a prior whose filters are smooth: a Gaussian process over the taps of each convolution kernel.

    For every pair of channels the taps w of a kernel are N(0, σ² K) with K = exp(-distance / ℓ) + 1e-6 δ (Matérn-½ over
    the positions of the taps). Each block has one variance σ² and one length-scale ℓ. A parameter with three or more
    dimensions is a kernel (channels, channels, *taps); weights of other parameters, and of kernels with one tap, are
    independent, with a variance alone.

    Only ``lw.inverse.fit`` takes it: other methods assume a diagonal precision.

    Args:
        variance: The variance σ² of every weight, where a search for better ones starts.
        length_scale: ℓ, in taps; such a start too.
        blocks: A mapping from regular expressions to names of blocks. An expression must match whole names of
            parameters, every selected parameter must match exactly one, and expressions may share a block. By default
            every parameter is a block.

    Returns:
        The prior, for ``lw.inverse.fit(prior=...)``.

    Raises:
        UnsupportedError: if a number is not positive and finite or ``blocks`` is no such mapping; when the prior is
            used, if a parameter matches no pattern or several, or anywhere but in ``lw.inverse``.

    >>> kernel = Selection(("up.weight", "up.bias"), ((2, 1, 3, 3), (2,)))
    >>> prior = filter_gp(variance=2.0).structured(kernel, torch.empty(0))
    >>> prior.names
    ('up.variance', 'up.length_scale', 'up.bias.variance')
    >>> prior.multiply(torch.eye(20))[0, :3]
    tensor([2.0000, 0.2707, 0.0366])
    """
    return FilterGP(variance, length_scale, blocks)


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

    def coefficients(self, values: Tensor) -> Tensor:
        """Return the covariance of two taps for each class, from the hyperparameters of this block."""
        if len(values) == 1:
            return values
        ratios = self._distances(values) / values[1]
        jitter = torch.zeros_like(ratios)
        jitter[0] = JITTER
        return values[0] * (torch.exp(-ratios) + jitter)

    def slopes(self, values: Tensor) -> Tensor:
        """Return the derivative of each coefficient in the log length-scale; zero without one."""
        if len(values) == 1:
            return torch.zeros_like(values)
        ratios = self._distances(values) / values[1]
        return values[0] * torch.exp(-ratios) * ratios

    def _distances(self, like: Tensor) -> Tensor:
        return torch.tensor(self.squares, dtype=like.dtype, device=like.device).sqrt()


@dataclass(frozen=True, eq=False)
class BoundFilterGP(ClassCovariance):
    """A Gaussian process over the taps of the kernels of one selection. ``FilterGP.structured`` makes one.

    Σ is block-diagonal: one matrix (taps, taps) for every filter, the same for all filters of a parameter.
    ``values`` (D,) are variances and length-scales in the order of ``names``.
    """

    given: FilterGP
    selection: Selection
    members: tuple[str, ...]  # the block of each parameter
    blocks: tuple[FilterBlock, ...]
    values: Tensor
    mean: float | Tensor = field(default=0.0, init=False)

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
    def class_distances(self) -> tuple[float, ...]:
        """The distance of the pairs of taps of each class."""
        return tuple(math.sqrt(square) for block in self.blocks for square in block.squares)

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
        sizes = [block.n_values for block in self.blocks]
        return torch.cat([b.coefficients(v) for b, v in zip(self.blocks, self.values.split(sizes), strict=True)])

    @cached_property
    def length_blocks(self) -> tuple[int, ...]:
        """The number of each class's block among the blocks that have a length-scale; -1 if it has none."""
        having = [number for number, block in enumerate(self.blocks) if block.n_values == 2]
        return tuple(having.index(number) if number in having else -1 for number in self.class_blocks)

    def coefficient_slopes(self) -> Tensor:
        """Return the derivative of each coefficient in the log length-scale of its block, (classes,)."""
        sizes = [block.n_values for block in self.blocks]
        return torch.cat([b.slopes(v) for b, v in zip(self.blocks, self.values.split(sizes), strict=True)])

    @property
    def covariances(self) -> tuple[Tensor, ...]:
        """The covariance of the taps of one filter (taps, taps) of each parameter, in float64."""
        return self._matrices[0]

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The lower Cholesky factor of each of ``covariances``."""
        return self._matrices[1]

    @property
    def _matrices(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        # A graph to the values is not kept: it may be used once, and a call without gradients would keep none.
        return self._computed() if self.values.requires_grad else self._kept

    @cached_property
    def _kept(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self._computed()

    def _computed(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return ``covariances`` and ``factors``; parameters with equal ones share them."""
        coefficients = self.coefficients()
        matrices = {part: part.grid.matrix(coefficients[list(part.classes)]) for part in dict.fromkeys(self.parts)}
        roots = {part: cholesky(matrix, "a filter under filter_gp()") for part, matrix in matrices.items()}
        return tuple(matrices[part] for part in self.parts), tuple(roots[part] for part in self.parts)

    def _filters(self, v: Tensor) -> Iterator[Tensor]:
        """Yield the entries of each parameter as filters, (K, F, taps)."""
        for part, rows in zip(self.parts, v.split(self.selection.sizes, -1), strict=True):
            yield part.folded(rows)

    def _mapped(self, v: Tensor, matrices: tuple[Tensor, ...]) -> Tensor:
        """Return M w for every filter w of the rows, with the matrix M of its parameter."""
        rows = v.reshape(-1, self.selection.size)
        parts = [w @ m.to(w).mT for w, m in zip(self._filters(rows), matrices, strict=True)]
        return torch.cat([part.flatten(1) for part in parts], 1).reshape(v.shape)

    def multiply(self, v: Tensor) -> Tensor:
        return self._mapped(v, self.covariances)

    def root(self, v: Tensor) -> Tensor:
        return self._mapped(v, self.factors)

    def root_transposed(self, v: Tensor) -> Tensor:
        return self._mapped(v, tuple(factor.mT for factor in self.factors))

    def solve(self, v: Tensor) -> Tensor:
        # In float64: the inverse of a smooth kernel has entries up to 1e6 that cancel.
        rows = v.reshape(-1, self.selection.size)
        parts = [
            torch.cholesky_solve(w.double().reshape(-1, w.shape[-1]).mT, factor).mT.reshape(len(w), -1)
            for w, factor in zip(self._filters(rows), self.factors, strict=True)
        ]
        return torch.cat(parts, 1).reshape(v.shape).to(v.dtype)

    def logdet(self) -> Tensor:
        counts = [size // part.grid.taps for size, part in zip(self.selection.sizes, self.parts, strict=True)]
        halves = [n * factor.diagonal().log().sum() for n, factor in zip(counts, self.factors, strict=True)]
        return -2 * torch.stack(halves).sum()

    def penalty(self, theta: Tensor) -> Tensor:
        return self.penalties(theta).sum()

    def penalties(self, theta: Tensor) -> Tensor:
        """Return the part of the penalty that each parameter has."""
        terms = []
        for filters, factor in zip(self._filters(theta[None].double()), self.factors, strict=True):
            moments = filters[0].mT @ filters[0]  # small, so that gradients in the values pass through it alone
            terms.append(torch.cholesky_solve(moments, factor).diagonal().sum())
        return torch.stack(terms)

    def started(self, theta: Tensor, rows: int) -> BoundFilterGP:
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
