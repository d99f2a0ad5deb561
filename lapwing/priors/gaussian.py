"""Gaussian priors over the weights. A number or tensor is always a precision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import NumericalError, UnsupportedError
from lapwing.networks.blocks import Block
from lapwing.networks.selection import Selection

Precisions = float | Tensor | Mapping[str, float]
SINGLE = ("isotropic", "g")  # one number for all weights


@dataclass(frozen=True, eq=False)
class BlockPrior:
    """The precision on one block: ``value`` times ``scale``.

    ``value`` is a scalar where it is constant, else in the block's own form; ``scale``, in that form too, does not
    change with the hyperparameters (the g-prior has one), so that what it does to a curvature is worked out once.
    """

    value: Tensor
    scale: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        return self.value if self.scale is None else self.value * self.scale


@dataclass(frozen=True, eq=False)
class Prior:
    """theta ~ N(mean, diag(precision)^-1), with one precision for all, for each group, or for each weight.

    A prior made by one of the functions below is bound to a selection by ``bound``; only then are its groups and
    sizes known and checked. ``scale`` (P,) multiplies the precisions: the g-prior's, from the curvature.
    """

    kind: str
    precision: Precisions
    mean: float | Tensor = 0.0
    selection: Selection | None = None
    members: tuple[str, ...] = ()  # the group of each parameter
    scale: Tensor | None = None
    _memo: dict[str, Tensor] = field(default_factory=dict, repr=False)  # what does not change with the precisions

    def bound(self, selection: Selection, like: Tensor, members: Mapping[str, str] | None = None) -> Prior:
        """The prior for these weights, on the device of ``like``; its numbers are float64 whatever the network is.

        ``members`` names the group of every parameter, where only the network can tell (``per_normalised_group``).
        """
        like = torch.empty(0, dtype=torch.float64, device=like.device)
        found = replace(self, selection=selection, members=self._members(selection, members), _memo={})
        precision = found._expanded(like)
        if not bool(torch.isfinite(precision).all()) or not bool((precision > 0).all()):
            raise NumericalError(
                f"prior precisions run from {precision.min().item():.3g} to {precision.max().item():.3g}; "
                "expected positive, finite numbers."
            )
        mean = self.mean
        if isinstance(mean, Tensor):
            mean = mean.detach().to(like).reshape(-1)
            if mean.numel() not in (1, selection.size):
                raise NumericalError(f"the prior mean has {mean.numel()} entries; expected 1 or {selection.size}.")
        if not bool(torch.isfinite(torch.as_tensor(mean)).all()):
            raise NumericalError("the prior mean holds NaN or infinity; expected finite numbers.")
        scale = None if self.scale is None else self.scale.to(like)
        if scale is not None and scale.numel() != selection.size:
            raise NumericalError(
                f"this g-prior has the curvature of {scale.numel()} weights already, and there are {selection.size}; "
                "give g_prior() itself."
            )
        return replace(found, precision=precision, mean=mean, scale=scale)

    def _members(self, selection: Selection, members: Mapping[str, str] | None) -> tuple[str, ...]:
        if self.selection is not None and self.selection.names == selection.names:
            return self.members  # bound before, by another fit
        if self.kind == "per_normalised_group":
            if members is None:
                raise UnsupportedError(
                    "the groups of per_normalised_group() are found by trying the network out; give it to fit()."
                )
            return tuple(members[name] for name in selection.names)
        if self.kind == "grouped":
            if not isinstance(self.precision, Mapping):
                raise UnsupportedError(
                    "this prior by patterns belongs to other weights already; give grouped({...}) itself."
                )
            return tuple(_matching(name, self.precision) for name in selection.names)
        return selection.layer_of() if self.kind == "per_layer" else ()

    def _expanded(self, like: Tensor) -> Tensor:
        given, selection = self.precision, self._selection
        if isinstance(given, Mapping):
            names = self.groups or selection.names
            missing, extra = set(names) - set(given), set(given) - set(names)
            if missing or extra:
                raise NumericalError(
                    f"prior precisions by name: missing {sorted(missing)}, unknown {sorted(extra)}; "
                    f"expected exactly {list(names)}."
                )
            values = torch.stack(
                [torch.as_tensor(given[name], dtype=like.dtype, device=like.device).reshape(()) for name in names]
            )
            if self.kind == "diagonal":
                return selection.picked(values.repeat_interleave(torch.tensor(selection.sizes, device=like.device)))
            return values
        values = torch.as_tensor(given, dtype=like.dtype, device=like.device)
        size = 1 if self.kind in SINGLE else len(self.groups) or selection.size
        if values.numel() not in (1, size):
            raise NumericalError(
                f"a {self.kind} prior got {values.numel()} precisions; expected 1 or {size}"
                + (f", one for each of {', '.join(self.groups)}." if self.groups else ".")
            )
        return values.reshape(()) if self.kind in SINGLE else values.reshape(-1).expand(size)

    def with_precision(self, precision: Tensor) -> Prior:
        """The same prior with other precisions, of the same shape."""
        return replace(self, precision=precision)

    @property
    def needs_curvature(self) -> bool:
        """Whether the prior takes its scale from the curvature and does not have it yet."""
        return self.kind == "g" and self.scale is None

    def scaled(self, scale: Tensor) -> Prior:
        """With the precision of every weight multiplied by ``scale`` (P,)."""
        return replace(self, scale=scale.detach().to(self.values))

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups, in the order of ``values``; none for one precision or one for each weight."""
        return tuple(dict.fromkeys(self.members))

    @property
    def values(self) -> Tensor:
        """The precisions: (), (groups,) or (P,)."""
        assert isinstance(self.precision, Tensor)
        return self.precision

    @property
    def group(self) -> Tensor | None:
        """For each weight the number of its group (P,); only for a prior by groups."""
        selection = self._selection
        if not self.members:
            return None
        if "group" not in self._memo:
            numbers = torch.tensor(self._numbers).repeat_interleave(torch.tensor(selection.sizes))
            self._memo["group"] = selection.picked(numbers).to(self.values.device)
        return self._memo["group"]

    @property
    def _numbers(self) -> list[int]:
        """The number of the group of each parameter."""
        order = {name: i for i, name in enumerate(self.groups)}
        return [order[name] for name in self.members]

    @property
    def _selection(self) -> Selection:
        if self.selection is None:
            raise UnsupportedError("this prior is not bound to weights yet; use it through fit().")
        return self.selection

    @property
    def vector(self) -> Tensor:
        """The precision of every weight, (P,)."""
        if self.kind in SINGLE:
            each = self.values.expand(self._selection.size)
        else:
            each = self.values if self.group is None else self.values[self.group]
        return each if self.scale is None else each * self.scale

    def on(self, block: Block) -> BlockPrior:
        """The precision on a block."""
        if self.scale is not None:
            return BlockPrior(self.values, block.arrange(self._selection.split(self.scale)))
        if self.kind in SINGLE:
            return BlockPrior(self.values)
        if self.members:
            mine = {group for name, group in zip(self._selection.names, self.members, strict=True)
                    if name in block.names}  # fmt: skip
            if len(mine) == 1:
                return BlockPrior(self.values[self.groups.index(mine.pop())])
        arranged = block.arrange(self._selection.split(self.vector))
        first = arranged.reshape(-1)[0]
        # Equal precisions that are being learned stay apart, each with its own slope.
        alike = not arranged.requires_grad and bool((arranged == first).all())
        return BlockPrior(first if alike else arranged)

    def logdet(self) -> Tensor:
        """The log-determinant of the precision."""
        own = self.values.log()
        total = self._selection.size * own if self.kind in SINGLE else self.counts @ own
        return total if self.scale is None else total + self.scale.log().sum()

    def penalty(self, theta: Tensor) -> Tensor:
        """(theta - mean)ᵀ A (theta - mean)."""
        return self.squares(theta) @ self.values.reshape(-1)

    @property
    def counts(self) -> Tensor:
        """How many weights share each precision: (1,), (groups,) or (P,)."""
        if "counts" not in self._memo:
            ones = torch.ones(self._selection.size, dtype=torch.float64, device=self.values.device)
            self._memo["counts"] = self.summed(ones)
        return self._memo["counts"]

    def squares(self, theta: Tensor) -> Tensor:
        """Sums of squares of the weights that share a precision, times their scale."""
        squares = (theta.to(self.values) - self.mean).square()
        return self.summed(squares if self.scale is None else squares * self.scale)

    def summed(self, each: Tensor) -> Tensor:
        """Sums over the weights that share a precision: (P,) to (1,), (groups,) or (P,)."""
        if self.kind in SINGLE:
            return each.sum().reshape(1)
        if not self.members:
            return each
        if self._selection.index is not None:
            assert self.group is not None
            return each.new_zeros(len(self.groups)).index_add(0, self.group, each)
        # Parameter by parameter: adding up single entries makes a GPU wait for itself.
        sums = torch.stack([each[part].sum() for part in self._selection.slices.values()])
        return each.new_zeros(len(self.groups)).index_add(0, torch.tensor(self._numbers, device=each.device), sums)


def isotropic(precision: float | Tensor = 1.0, mean: float | Tensor = 0.0) -> Prior:
    """One precision for all weights.

    >>> weights = Selection(("a.weight", "b.weight"), ((1, 2), (1, 1)))
    >>> isotropic(2.0).bound(weights, torch.empty(0)).vector
    tensor([2., 2., 2.], dtype=torch.float64)
    """
    return Prior("isotropic", precision, mean)


def per_layer(precisions: Precisions = 1.0, mean: float | Tensor = 0.0) -> Prior:
    """One precision for each layer: a number for all, one for each, or a mapping from layer names.

    >>> weights = Selection(("a.weight", "b.weight"), ((1, 2), (1, 1)))
    >>> per_layer({"a": 1.0, "b": 9.0}).bound(weights, torch.empty(0)).vector
    tensor([1., 1., 9.], dtype=torch.float64)
    """
    return Prior("per_layer", precisions, mean)


def diagonal(precisions: Precisions = 1.0, mean: float | Tensor = 0.0) -> Prior:
    """One precision for each weight: a number, a vector (P,), or a mapping from parameter names.

    >>> weights = Selection(("a.weight", "b.weight"), ((1, 2), (1, 1)))
    >>> diagonal(torch.tensor([1.0, 2.0, 3.0])).bound(weights, torch.empty(0)).vector
    tensor([1., 2., 3.], dtype=torch.float64)
    """
    return Prior("diagonal", precisions, mean)


def grouped(precisions: Mapping[str, float], mean: float | Tensor = 0.0) -> Prior:
    """One precision for each group: a mapping from patterns (regular expressions) of parameter names.

    Every parameter must match one pattern, and only one.

    >>> grouped({r".*weight": 1.0, r".*bias": 1e-3}).kind
    'grouped'
    """
    if not isinstance(precisions, Mapping) or not precisions:
        raise UnsupportedError(
            f"grouped() got {precisions!r}; expected a mapping from patterns of parameter names to precisions, "
            'for example {".*weight": 1.0, ".*bias": 0.1}.'
        )
    return Prior("grouped", precisions, mean)


def per_normalised_group(precisions: Precisions = 1.0, mean: float | Tensor = 0.0) -> Prior:
    """One precision for each group of weights whose scale the network ignores, and one for the rest.

    In a normalised network the size of a weight before a norm is an accident of training, and with one precision
    for all it would decide the error bars. The groups are found by trying the network out; ``check`` shows them.
    Together with ``LinearMode`` the predictions do not depend on those sizes (Antorán et al. 2022).
    """
    return Prior("per_normalised_group", precisions, mean)


def g_prior(g: float | Tensor = 1.0, mean: float | Tensor = 0.0) -> Prior:
    """The precision of every weight is g times its curvature: A = g diag(H), with H at unit dispersion.

    Predictions do not change when a weight and what follows it are rescaled so that the network stays the same,
    with one number to learn instead of one for each group. A weight that the data hardly see gets at least a
    thousandth of the median of its layer.

    >>> from lapwing.api import fit
    >>> x, net = torch.tensor([[-1.0], [3.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, 2 * x)], "regression", prior=g_prior(0.5)).prior.vector.detach()
    tensor([5., 1.], dtype=torch.float64)
    """
    return Prior("g", g, mean)


def _matching(name: str, patterns: Mapping[str, float]) -> str:
    try:
        found = [pattern for pattern in patterns if re.fullmatch(pattern, name)]
    except re.error as error:
        raise UnsupportedError(f"grouped(): one of {list(patterns)} is no regular expression: {error}.") from error
    if len(found) != 1:
        raise NumericalError(
            f"grouped(): the parameter {name!r} matches {len(found)} of the patterns {list(patterns)}; expected one."
        )
    return found[0]
