"""The contract of priors, a prior bound to the weights of a network, and the kernel that it gives the outputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import FileError, NumericalError
from lapwing.networks.jacobians import Block, BlockJacobian, LayerJacobians
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.runtime.settings import SMALLEST, Array, Either, ListOf, Maybe, Real, Rule, State, Text, is_real

Precisions = float | Tensor | Mapping[str, float]
RANGE = (1e-10, 1e12)  # precisions outside are not an optimum, see ``in_range``
STARTS = (1e-6, 1e8)  # range of starting precisions, for weights that are very large or all at the prior mean


class Prior:
    """A Gaussian prior over weights, theta ~ N(mean, diag(precision)^-1).

    A class of priors is a frozen dataclass whose first fields are the precisions and ``mean``; it says in ``bound``
    which weights share a precision. A ``BoundPrior`` is a prior too.
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
        read = state.read(
            precision=Either(Array((), SMALLEST), Array((None,), SMALLEST)), mean=mean,
            members=Either(ListOf(Text(), 0), ListOf(Text(), len(selection.names))),
            scale=Maybe(Array((size,), SMALLEST)),
        )  # fmt: skip
        values, members = read["precision"], read["members"]
        prior = cls.from_stored(values, read["mean"], selection, members)
        if prior.members != members or prior.values.shape != values.shape:
            raise FileError(
                f"{cls.__name__} has precisions {tuple(values.shape)} and groups that are not those of the weights"
            )
        if read["scale"] is not None and not prior.given.needs_curvature:
            raise FileError(
                f"{cls.__name__} has a scale; expected one only for a prior that takes it from the curvature"
            )
        return prior if read["scale"] is None else prior.with_scale(read["scale"])

    @classmethod
    def from_stored(
        cls, values: Tensor, mean: float | Tensor, selection: Selection, members: tuple[str, ...]
    ) -> BoundPrior:
        """Return the prior of these weights with precisions and groups from a file."""
        return cls(values, mean).bound(selection, values, dict(zip(selection.names, members, strict=False)))  # type: ignore[call-arg]

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        """Return the prior of these weights, on the device of ``like``, in float64 for every network.

        ``groups`` maps each parameter name to its group; only a prior that ``needs_groups`` uses it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no bound(selection, like, groups)")

    def rebound(
        self, values: Tensor, selection: Selection, like: Tensor, groups: Mapping[str, str] | None
    ) -> BoundPrior:
        """Return the prior of other weights, with precisions that were given or learned for the first ones."""
        precisions = fields(self)[0].name  # type: ignore[arg-type]
        return replace(self, **{precisions: values}).bound(selection, like, groups)  # type: ignore[type-var]


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
class BoundPrior(Prior):
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
    def group_numbers(self) -> list[int]:
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
            prior = self.given.rebound(self.values, selection, like, groups)
        if self.scale is None:
            return prior
        if self.scale.numel() != selection.size:
            raise NumericalError(
                f"this g-prior has the curvature of {self.scale.numel()} weights already, and there are "
                f"{selection.size}; give g_prior() itself."
            )
        return prior.with_scale(self.scale)

    def with_precision(self, precision: Tensor) -> BoundPrior:
        """Return the same prior with other precisions, of the same shape."""
        return replace(self, values=precision)

    def with_scale(self, scale: Tensor) -> BoundPrior:
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
        return torch.cat([values[group].expand(size) for group, size in zip(self.group_numbers, sizes, strict=True)])

    def _subnetwork_groups(self, index: Tensor) -> Tensor:
        """Return the number of the group of each entry of a subnetwork, (P,)."""
        ends = torch.tensor(self.selection.sizes, device=index.device).cumsum(0)
        parameters = torch.bucketize(index, ends, right=True)
        return torch.tensor(self.group_numbers, device=index.device)[parameters].to(self.values.device)

    def on(self, block: Block) -> BlockPrior:
        """Return the precision on a block."""
        scale = None if self.scale is None else block.arrange(self.selection.split(self.scale))
        if self.values.ndim == 0:
            return BlockPrior(self.values, scale)
        pairs = zip(self.selection.names, self.group_numbers, strict=True) if self.members else ()
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
        return self.sum_groups(squares if self.scale is None else squares * self.scale)

    def sum_groups(self, each: Tensor) -> Tensor:
        """Sum over the weights that share a precision: (P,) to (1,), (groups,) or (P,)."""
        if not self.members:
            return each if self.values.ndim else each.sum().reshape(1)
        total = each.new_zeros(len(self.groups))
        if self.selection.index is not None:
            return total.index_add(0, self._subnetwork_groups(self.selection.index).to(each.device), each)
        # One sum for each parameter: an index_add of single entries is slow on a GPU.
        sums = torch.stack([each[part].sum() for part in self.selection.slices.values()])
        return total.index_add(0, torch.tensor(self.group_numbers, device=each.device), sums)

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
            values = selection.pick(values.repeat_interleave(torch.tensor(selection.sizes, device=like.device)))
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
    return replace(prior, counts=prior.sum_groups(like.new_ones(()).expand(size)).contiguous())


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
