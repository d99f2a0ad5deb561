"""Gaussian priors over the weights: their contract, those that users give (``lw.priors``), one bound to a network.

A number given to a prior is a precision, 1 / variance. Tuners, which learn precisions, are in ``lapwing.tuners``.
Each prior is known to users by its name in lower case too: ``lw.priors.g_prior`` is ``GPrior``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.errors import FileError, NumericalError, UnsupportedError
from lapwing.networks.jacobians import Block, BlockJacobian
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.networks.tangent import LayerJacobians
from lapwing.runtime.settings import POSITIVE, HasSettings, Rule, is_real, refuse_other_calls, setting
from lapwing.runtime.states import SMALLEST, Array, Either, ListOf, Maybe, Real, State, Text, saved

__all__ = [
    "FilterGP", "diagonal", "filter_gp", "g_prior", "grouped", "isotropic", "per_layer", "per_normalised_group",
]  # fmt: skip

Precisions = float | Tensor | Mapping[str, float]
PRECISION_RANGE = (1e-10, 1e12)  # precisions outside are not an optimum, see ``in_range``
START_RANGE = (1e-6, 1e8)  # range of starting precisions, for weights that are very large or all at the prior mean


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
        return PRECISION_RANGE[0] < min(values) * max(1.0, size) and max(values) < PRECISION_RANGE[1]

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


def _numbers(name: str, given: object, like: Tensor) -> Tensor:
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
    return group_starting_precisions(prior, theta, rows).clamp(*START_RANGE)


def group_starting_precisions(prior: BoundPrior, theta: Tensor, rows: float) -> Tensor:
    """Return one precision for each group from its weights alone; infinite for weights at the prior mean.

    A group whose weights are k times as large gets a precision k² times as small.
    """
    guess = _share(theta, rows) * prior.counts / prior.squares(theta.double())
    return guess.reshape(prior.values.shape)


def single_starting_precision(theta: Tensor, rows: float) -> Tensor:
    """Return one precision for all weights, ()."""
    return (_share(theta, rows) * theta.numel() / theta.double().square().sum()).clamp(*START_RANGE)


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


@saved
@dataclass(frozen=True, eq=False)
class Isotropic(Prior):
    """A prior with one precision for all weights.

    Args:
        precision: One over the prior variance of every weight, positive.
        mean: The prior mean: a number, or a vector with one entry for each selected weight (P,).

    Raises:
        NumericalError: when the prior is used, if the precision is not one positive, finite number or the mean does
            not fit the weights.

    >>> import torch
    >>> import lapwing as lw
    >>> x, net = torch.tensor([[-1.0], [3.0]]), torch.nn.Linear(1, 1)
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=lw.isotropic(2.0)).prior.vector
    tensor([2., 2.], dtype=torch.float64)
    """

    precision: float | Tensor = 1.0
    mean: float | Tensor = 0.0

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, selection, self.precision, like)


@saved
@dataclass(frozen=True, eq=False)
class GPrior(Prior):
    """A prior whose precision is g times the curvature of each weight: A = g diag(H), H at unit dispersion.

    Predictions do not change if a weight and the layer after it are rescaled such that the network computes the same
    function, and there is one number to learn instead of one for each group. A weight with nearly no curvature gets at
    least a thousandth of the median curvature of its layer.

    Args:
        g: The factor, positive.
        mean: The prior mean: a number, or a vector with one entry for each selected weight (P,).

    Raises:
        NumericalError: when the prior is used, if g is not one positive, finite number or the mean does not fit the
            weights.
        UnsupportedError: when the prior is used with a method that computes no curvature of its own.

    >>> import torch
    >>> import lapwing as lw
    >>> x, net = torch.tensor([[-1.0], [3.0]]), torch.nn.Linear(1, 1)
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=lw.priors.g_prior(0.5)).prior.vector.detach()
    tensor([5., 1.], dtype=torch.float64)
    """

    g: float | Tensor = 1.0
    mean: float | Tensor = 0.0
    needs_curvature: ClassVar[bool] = True

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, selection, self.g, like)


@saved
@dataclass(frozen=True, eq=False)
class PerLayer(Prior):
    """A prior with one precision for each layer.

    A layer is the module that owns a parameter: the weight and the bias of an ``nn.Linear`` share one precision.

    Args:
        precisions: A number for all layers, a vector with one for each layer, in the order of the parameters, or a
            mapping from the names of all layers to a number for each.
        mean: The prior mean: a number, or a vector with one entry for each selected weight (P,).

    Raises:
        NumericalError: when the prior is used, if a precision is not positive and finite, or numbers or names do not
            fit the layers.

    >>> import torch
    >>> import lapwing as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh(), torch.nn.Linear(1, 1))
    >>> x = torch.tensor([[-1.0], [3.0]])
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=lw.per_layer({"0": 1.0, "2": 9.0})).prior.vector
    tensor([1., 1., 9., 9.], dtype=torch.float64)
    """

    precisions: Precisions = 1.0
    mean: float | Tensor = 0.0

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, selection, self.precisions, like, selection.layer_of())


@saved
@dataclass(frozen=True, eq=False)
class Grouped(Prior):
    """A prior with one precision for each group of parameters, chosen by patterns of their names.

    Args:
        precisions: A mapping from regular expressions to numbers. An expression must match whole names, and every
            selected parameter must match exactly one.
        mean: The prior mean: a number, or a vector with one entry for each selected weight (P,).

    Raises:
        UnsupportedError: if ``precisions`` is not a mapping, or empty; when the prior is used, if a pattern is not a
            regular expression.
        NumericalError: when the prior is used, if a precision is not positive and finite, a parameter matches no
            pattern or several, or a pattern matches no parameter.

    >>> import torch
    >>> import lapwing as lw
    >>> x, net = torch.tensor([[-1.0], [3.0]]), torch.nn.Linear(1, 1)
    >>> prior = lw.grouped({r".*weight": 1.0, r".*bias": 0.5})
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=prior).prior.vector
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """

    precisions: Mapping[str, float]
    mean: float | Tensor = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.precisions, Mapping) or not self.precisions:
            raise UnsupportedError(
                f"grouped() got {self.precisions!r}; expected a mapping from patterns of parameter names to "
                'precisions, for example {".*weight": 1.0, ".*bias": 0.1}.'
            )

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        members = tuple(match_pattern(name, self.precisions, "grouped", NumericalError) for name in selection.names)
        return bind(self, selection, self.precisions, like, members)

    def rebound(
        self, values: Tensor, selection: Selection, like: Tensor, groups: Mapping[str, str] | None
    ) -> BoundPrior:
        raise UnsupportedError("this prior by patterns belongs to other weights already; give grouped({...}) itself.")

    @classmethod
    def from_stored(
        cls, values: Tensor, mean: float | Tensor, selection: Selection, members: tuple[str, ...]
    ) -> BoundPrior:
        groups = tuple(dict.fromkeys(members))
        if values.shape != (len(groups),) or not groups:
            raise FileError(f"{cls.__name__} stores precisions of shape {tuple(values.shape)} for {len(groups)} groups")
        given = cls(dict(zip(groups, values.tolist(), strict=True)), mean)
        return bind(given, selection, values, values, members)  # by the stored groups: patterns may have matched more


def match_pattern(name: str, patterns: Collection[str], prior: str, refused: type[ValueError]) -> str:
    """Return the one pattern of a prior that matches the whole name of a parameter; refuse none or several."""
    try:
        matches = [pattern for pattern in patterns if re.fullmatch(pattern, name)]
    except re.error as error:
        raise UnsupportedError(
            f"{prior}(): one of {list(patterns)} is not a regular expression: {error}; expected one."
        ) from error
    if len(matches) != 1:
        raise refused(
            f"{prior}(): the parameter {name!r} matches {len(matches)} of the patterns {list(patterns)}; expected one."
        )
    return matches[0]


@saved
@dataclass(frozen=True, eq=False)
class PerNormalisedGroup(Prior):
    """A prior with one precision for each group of weights whose scale the network ignores, one for the rest.

    The size of a weight that a normalisation follows does not change the function of the network, but with one
    precision for all weights it would change the error bars. ``fit`` finds the groups by rescaling weights and
    evaluating the network; ``check`` shows them. Together with ``LinearMode`` the predictions do not depend on those
    sizes (Antorán et al. 2022).

    Args:
        precisions: A number for all groups, a vector with one for each group, in the order of the parameters, or a
            mapping from the names of all groups to a number for each.
        mean: The prior mean: a number, or a vector with one entry for each selected weight (P,).

    Raises:
        NumericalError: when the prior is used, if a precision is not positive and finite, or numbers or names do not
            fit the groups.
        UnsupportedError: when the prior is used where no network can be evaluated: in ``train``, or in ``with_prior``
            of a posterior that was fitted with another prior.

    >>> import torch
    >>> import lapwing as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    >>> x = torch.randn(8, 2)
    >>> lw.fit(net, [(x, x[:, :1])], "regression", prior=lw.priors.per_normalised_group()).prior.groups
    ('0', 'rest')
    """

    precisions: Precisions = 1.0
    mean: float | Tensor = 0.0
    needs_groups: ClassVar[bool] = True

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        if groups is None:
            raise UnsupportedError(
                "the groups of per_normalised_group() come from runs of the network; give the prior to fit()."
            )
        members = tuple(groups[name] for name in selection.names)
        return bind(self, selection, self.precisions, like, members)


@saved
@dataclass(frozen=True, eq=False)
class DiagonalPrior(Prior):
    """A prior with one precision for each weight.

    Args:
        precisions: A number for all weights, a vector with one for each selected weight (P,), or a mapping from the
            names of all selected parameters to a number for each.
        mean: The prior mean: a number, or a vector (P,).

    Raises:
        NumericalError: when the prior is used, if a precision is not positive and finite, or numbers or names do not
            fit the weights.

    >>> import torch
    >>> import lapwing as lw
    >>> x, net = torch.tensor([[-1.0], [3.0]]), torch.nn.Linear(1, 1)
    >>> prior = lw.priors.diagonal({"weight": 1.0, "bias": 0.5})
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=prior).prior.vector
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """

    precisions: Precisions = 1.0
    mean: float | Tensor = 0.0

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, selection, self.precisions, like, per_weight=True)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(t, str) for p in value.items() for t in p)


BLOCKS = Rule("a mapping from regular expressions to names of blocks, or None", lambda v: _is_mapping(v) or v is None)


@dataclass(frozen=True)
class FilterGP(HasSettings, Prior):
    """A prior whose filters are smooth: a Gaussian process over the taps of each convolution kernel.

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

    Raises:
        UnsupportedError: if a number is not positive and finite or ``blocks`` is not a mapping of texts; when the prior
            is used, if a parameter matches no pattern or several, or anywhere but in ``lw.inverse``.

    >>> import lapwing as lw
    >>> lw.priors.filter_gp(variance=2.0, length_scale=0.3).length_scale
    0.3
    """

    variance: float = setting(1.0, POSITIVE)
    length_scale: float = setting(0.5, POSITIVE)
    blocks: Mapping[str, str] | None = setting(None, BLOCKS)
    mean: float | Tensor = field(default=0.0, init=False)

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        raise UnsupportedError(
            "filter_gp() has a covariance between the taps of a kernel; expected a prior with a diagonal precision, "
            "such as lw.per_layer(). lw.inverse.fit(model, x, y, operator) takes filter_gp()."
        )


isotropic, per_layer, grouped, diagonal = Isotropic, PerLayer, Grouped, DiagonalPrior
per_normalised_group, g_prior, filter_gp = PerNormalisedGroup, GPrior, FilterGP


refuse_other_calls(globals())
