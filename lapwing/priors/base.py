"""A prior bound to the weights of a network, and the contract of priors with structured covariances.

The contract of Gaussian priors whose covariance is a sum of fixed matrices with coefficients, Σ = Σ_c coef_c S_c.

Products R Σ Rᵀ then follow from the fixed matrices R S_c Rᵀ for every value of the hyperparameters. A block is the
weights that share hyperparameters; each block has one or more classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.errors import FileError, NumericalError, UnsupportedError
from lapwing.networks.jacobians import Block
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.runtime.memory import runs
from lapwing.runtime.settings import Rule, is_real
from lapwing.runtime.state import SMALLEST, Array, Either, ListOf, Maybe, Real, State, Text
from lapwing.runtime.threads import normal_rows


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


Precisions = float | Tensor | Mapping[str, float]
RANGE = (1e-10, 1e12)  # precisions outside are no optimum, see ``in_range``
STARTS = (1e-6, 1e8)  # range of starting precisions, for weights that are very large or all at the prior mean


@runtime_checkable
class Prior(Protocol):
    """A Gaussian prior over weights, theta ~ N(mean, diag(precision)^-1).

    The classes behind ``isotropic()``, ``per_layer()`` and the like inherit from it, which are dataclasses with the
    fields ``precision`` and ``mean``, and so does ``BoundPrior``.
    """

    mean: float | Tensor  # a number, or one for each weight (P,)

    @property
    def needs_groups(self) -> bool:
        """Whether ``bound`` needs the groups of weights whose scale the network ignores."""
        return False

    @property
    def needs_curvature(self) -> bool:
        """Whether the prior takes its scale from the curvature and does not have it yet."""
        return False

    @classmethod
    def from_state(cls, state: State, network: Network) -> BoundPrior:
        """Build the bound prior of a class from ``BoundPrior.state``."""
        selection, size = network.selection, network.selection.size
        mean = Either(Array((1,)), Array((size,))) if "mean" in state.tensors else Real()
        fields = state.read(
            precision=Either(Array((), SMALLEST), Array((None,), SMALLEST)), mean=mean,
            members=Either(ListOf(Text(), 0), ListOf(Text(), len(selection.names))),
            scale=Maybe(Array((size,), SMALLEST)),
        )  # fmt: skip
        values, members = fields["precision"], fields["members"]
        given = cls(values, fields["mean"])  # type: ignore[call-arg]
        prior = given.restored(selection, values, members)
        if prior.members != members or prior.values.shape != values.shape:
            raise FileError(
                f"{cls.__name__} has precisions {tuple(values.shape)} and groups that are not those of the weights"
            )
        if fields["scale"] is not None and not given.needs_curvature:
            raise FileError(
                f"{cls.__name__} has a scale; expected one only for a prior that takes it from the curvature"
            )
        return prior if fields["scale"] is None else prior.scaled(fields["scale"])

    def restored(self, selection: Selection, values: Tensor, members: tuple[str, ...]) -> BoundPrior:
        """Return the prior of these weights with precisions and groups from a file."""
        return self.bound(selection, values, dict(zip(selection.names, members, strict=False)))

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        """Return the prior of these weights, on the device of ``like``, in float64 for every network.

        ``groups`` maps each parameter name to its group; only a prior that ``needs_groups`` uses it.
        """
        ...

    def structured(self, selection: Selection, like: Tensor) -> ClassCovariance:
        """Return the prior of these weights for ``lw.inverse``, which takes covariances that are not diagonal too."""
        return self.bound(selection, like)


@dataclass(frozen=True, eq=False)
class BlockPrior:
    """The precision on one block: ``value`` times ``scale``.

    ``value`` is a scalar if it is constant, else in the block's form. ``scale`` has the block's form too and does not
    change with the hyperparameters (only the g-prior has one), so that its effect on a curvature is computed once.
    """

    value: Tensor
    scale: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        return self.value if self.scale is None else self.value * self.scale


@dataclass(frozen=True, eq=False)
class BoundPrior(Prior, DiagonalCovariance):
    """A prior over the weights of one selection.

    There is one precision for all weights, one for each group of parameters, or one for each weight. ``given`` is the
    prior as the user gave it; its precisions are only the initial ones. ``scale`` (P,) is the g-prior's, from the
    curvature: the precision of a weight is multiplied by it. Create one with ``Prior.bound``.
    """

    given: Prior
    selection: Selection
    values: Tensor  # the precisions: (), (groups,) or (P,)
    counts: Tensor  # the number of weights that share each precision, float64: (1,), (groups,) or (P,)
    members: tuple[str, ...] = ()  # the group of each parameter; empty without groups
    mean: float | Tensor = 0.0
    scale: Tensor | None = None

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups, in the order of ``values``; empty for one precision or one for each weight."""
        return tuple(dict.fromkeys(self.members))

    @cached_property
    def _numbers(self) -> list[int]:
        """The number of the group of each parameter."""
        numbers = {group: number for number, group in enumerate(self.groups)}
        return [numbers[group] for group in self.members]

    @property
    def is_single(self) -> bool:
        """Whether the precision is one number times a fixed diagonal."""
        return self.values.ndim == 0

    @property
    def is_isotropic(self) -> bool:
        """Whether all weights have the same precision by construction."""
        return self.is_single and self.scale is None

    @property
    def needs_groups(self) -> bool:
        return self.given.needs_groups

    @property
    def needs_curvature(self) -> bool:
        return self.given.needs_curvature and self.scale is None

    @property
    def network_groups(self) -> Mapping[str, str] | None:
        """The group of each parameter by name, if the groups were derived from the network."""
        return dict(zip(self.selection.names, self.members, strict=True)) if self.needs_groups else None

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        if selection.names == self.selection.names:
            per_weight = not self.is_single and not self.members
            prior = bind(self.given, selection, self.values, like, self.members, per_weight)
        else:
            given: Any = self.given
            prior = replace(given, precision=self.values).bound(selection, like, groups)
        if self.scale is None:
            return prior
        if self.scale.numel() != selection.size:
            raise NumericalError(
                f"this g-prior has the curvature of {self.scale.numel()} weights already, and there are "
                f"{selection.size}; give g_prior() itself."
            )
        return prior.scaled(self.scale)

    def with_precision(self, precision: Tensor) -> BoundPrior:
        """Return the same prior with other precisions, of the same shape."""
        return replace(self, values=precision)

    def scaled(self, scale: Tensor) -> BoundPrior:
        """Return the prior with the precision of every weight multiplied by ``scale`` (P,)."""
        return replace(self, scale=scale.detach().to(self.values))

    @property
    def vector(self) -> Tensor:
        """The precision of every weight, (P,)."""
        each = self.values.expand(self.selection.size) if not self.members else self._spread()
        return each if self.scale is None else each * self.scale

    def _spread(self) -> Tensor:
        """Return the precision of the group of every weight, (P,)."""
        if self.selection.index is not None:
            return self.values[self._subnetwork_groups(self.selection.index)]
        values, sizes = self.values.unbind(), self.selection.sizes
        return torch.cat([values[group].expand(size) for group, size in zip(self._numbers, sizes, strict=True)])

    def _subnetwork_groups(self, index: Tensor) -> Tensor:
        """Return the number of the group of each entry of a subnetwork, (P,)."""
        ends = torch.tensor(self.selection.sizes, device=index.device).cumsum(0)
        parameters = torch.bucketize(index, ends, right=True)
        return torch.tensor(self._numbers, device=index.device)[parameters].to(self.values.device)

    def on(self, block: Block) -> BlockPrior:
        """Return the precision on a block."""
        scale = None if self.scale is None else block.arrange(self.selection.split(self.scale))
        if self.values.ndim == 0:
            return BlockPrior(self.values, scale)
        pairs = zip(self.selection.names, self._numbers, strict=True) if self.members else ()
        groups = {number for name, number in pairs if name in block.names}
        if len(groups) == 1:
            return BlockPrior(self.values[groups.pop()], scale)
        arranged = block.arrange(self.selection.split(self.vector))
        first = arranged.reshape(-1)[0]
        # Equal precisions that are being learned are kept as they are, so that each gets its gradient.
        is_constant = not arranged.requires_grad and bool((arranged == first).all())
        return BlockPrior(first if is_constant else arranged)

    def logdet(self) -> Tensor:
        """Return the log-determinant of the precision."""
        total = self.counts.to(self.values) @ self.values.reshape(-1).log()
        return total if self.scale is None else total + self.scale.log().sum()

    def penalty(self, theta: Tensor) -> Tensor:
        """Return (theta - mean)ᵀ A (theta - mean)."""
        return self.squares(theta) @ self.values.reshape(-1)

    def in_range(self, values: Collection[float], theta: Tensor) -> bool:
        """Return whether an optimum can be at these precisions: below 1e-10 or above 1e12 the evidence has none.

        A network for targets in small units has large weights and small precisions, so the lower limit is divided by
        the mean square of the weights.
        """
        size = float((theta - self.mean).detach().double().square().mean())
        return RANGE[0] < min(values) * max(1.0, size) and max(values) < RANGE[1]

    def squares(self, theta: Tensor) -> Tensor:
        """Return sums of squares of the weights that share a precision, times their scale."""
        squares = (theta.to(self.values) - self.mean).square()
        return self.summed(squares if self.scale is None else squares * self.scale)

    def summed(self, each: Tensor) -> Tensor:
        """Sum over the weights that share a precision: (P,) to (1,), (groups,) or (P,)."""
        if not self.members:
            return each if self.values.ndim else each.sum().reshape(1)
        total = each.new_zeros(len(self.groups))
        if self.selection.index is not None:
            return total.index_add(0, self._subnetwork_groups(self.selection.index).to(each.device), each)
        # One sum for each parameter: an index_add of single entries is slow on a GPU.
        sums = torch.stack([each[part].sum() for part in self.selection.slices.values()])
        return total.index_add(0, torch.tensor(self._numbers, device=each.device), sums)

    def state(self) -> State:
        """Return the prior as plain data. Its name is that of the class of ``given``, whose ``from_state`` reads it."""
        parts = {"precision": self.values.detach(), "mean": self.mean, "scale": self.scale}
        tensors = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
        mean = {} if "mean" in tensors else {"mean": self.mean}
        return State(type(self.given).__name__, {"members": list(self.members), **mean}, tensors)


def bind(
    given: Prior,
    selection: Selection,
    precision: Precisions,
    like: Tensor,
    members: tuple[str, ...] = (),
    per_weight: bool = False,
) -> BoundPrior:
    """Return the bound prior with these precisions and the mean of ``given``, on the device of ``like``.

    There is one precision for each group if ``members`` names the group of each parameter, one for each weight if
    ``per_weight``, otherwise one for all weights.

    Raises:
        NumericalError: if a precision is not positive and finite, a mean is not finite, or their number is wrong.
    """
    size, groups = selection.size, tuple(dict.fromkeys(members))
    like = torch.empty(0, dtype=torch.float64, device=like.device)
    if isinstance(precision, Mapping):
        values = _in_order(precision, selection.names if per_weight else groups, like)
        if per_weight:
            values = selection.picked(values.repeat_interleave(torch.tensor(selection.sizes, device=like.device)))
    else:
        shape = (size,) if per_weight else (len(groups),) if groups else ()
        values = _in_shape(_numbers("the prior precision", precision, like), shape, groups, given)
    if not bool(torch.isfinite(values).all()) or not bool((values > 0).all()):
        raise NumericalError(
            f"prior precisions run from {values.min().item():.3g} to {values.max().item():.3g}; "
            "expected positive, finite numbers."
        )
    mean = given.mean
    if not is_real(mean):
        mean = _numbers("the prior mean", mean, like).detach()
        if mean.ndim > 1 or mean.numel() not in (1, size):
            raise NumericalError(f"the prior mean has {mean.numel()} entries; expected 1 or {size}, in one dimension.")
        mean = mean.reshape(-1)
    if not bool(torch.isfinite(torch.as_tensor(mean)).all()):
        raise NumericalError("the prior mean holds NaN or infinity; expected finite numbers.")
    prior = BoundPrior(given, selection, values, like, members, mean)
    return replace(prior, counts=prior.summed(like.new_ones(()).expand(size)).contiguous())


def _in_order(precisions: Mapping[str, float], names: tuple[str, ...], like: Tensor) -> Tensor:
    """Return precisions given by name in the order of ``names``; refuse missing and unknown names."""
    if not names:
        raise NumericalError(f"one precision for all weights got {len(precisions)} names; expected a number.")
    missing, unknown = set(names) - set(precisions), set(precisions) - set(names)
    if missing or unknown:
        raise NumericalError(
            f"prior precisions by name: missing {sorted(missing)}, unknown {sorted(unknown)}; "
            f"expected exactly {list(names)}."
        )
    scalars = [_numbers(f"the prior precision of {name!r}", precisions[name], like) for name in names]
    if any(scalar.numel() != 1 for scalar in scalars):
        raise NumericalError(f"prior precisions by name: expected one number for each of {list(names)}.")
    return torch.stack([scalar.reshape(()) for scalar in scalars])


def _numbers(name: str, given: Any, like: Tensor) -> Tensor:
    """Return numbers that a user gave, with the dtype and device of ``like``; raise for anything else."""
    kinds = (torch.bool, torch.complex64, torch.complex128)
    real = lambda v: torch.as_tensor(v).dtype not in kinds and not torch.as_tensor(v).is_meta
    Rule("a number, or a list or tensor of them", real, NumericalError).check(name, given)
    return torch.as_tensor(given, dtype=like.dtype, device=like.device)


def _in_shape(values: Tensor, shape: tuple[int, ...], groups: tuple[str, ...], given: Prior) -> Tensor:
    """Return the precisions in this shape, one number repeated; refuse another number of them."""
    size = math.prod(shape)
    if values.numel() not in (1, size):
        expected = "1" if size == 1 else f"1 or {size}"
        raise NumericalError(
            f"the prior {type(given).__name__} got {values.numel()} precisions; expected {expected}"
            + (f", one for each of {', '.join(groups)}." if groups else ".")
        )
    return values.reshape(-1).expand(size).reshape(shape)


def starting_precisions(prior: BoundPrior, theta: Tensor, rows: float) -> Tensor:
    """Return precisions near the optimum of the evidence, where a search for better ones starts.

    They are γ / |w|² with γ at half of its largest value, in the shape of ``prior.values``. ``theta`` (P,) are the
    trained weights and ``rows`` is the number of data times the number of outputs.
    """
    if prior.values.numel() == theta.numel():  # one for each weight: a single square says nothing
        return single_starting_precision(theta, rows).to(prior.values).expand(prior.values.shape).clone()
    return group_starting_precisions(prior, theta, rows).clamp(*STARTS)


def group_starting_precisions(prior: BoundPrior, theta: Tensor, rows: float) -> Tensor:
    """Return one precision for each group from its weights alone; infinite for weights at the prior mean.

    A group whose weights are k times as large gets a precision k² times as small.
    """
    guess = _share(theta, rows) * prior.counts / prior.squares(theta.double())
    return guess.reshape(prior.values.shape)


def single_starting_precision(theta: Tensor, rows: float) -> Tensor:
    """Return one precision for all weights, ()."""
    return (_share(theta, rows) * theta.numel() / theta.double().square().sum()).clamp(*STARTS)


def _share(theta: Tensor, rows: float) -> float:
    """Return half of the largest share of the weights that the data can determine."""
    return 0.5 * min(1.0, rows / theta.numel())
