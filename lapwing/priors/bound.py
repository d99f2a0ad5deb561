"""A prior as the user gives it, and the same prior bound to the weights of a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.core.state import State
from lapwing.errors import NumericalError
from lapwing.networks.jacobians import Block
from lapwing.networks.selection import Selection
from lapwing.priors.sharing import Sharing

Precisions = float | Tensor | Mapping[str, float]
STARTS = (1e-6, 1e8)  # range of starting precisions, for weights that are very large or all at the prior mean


@runtime_checkable
class Prior(Protocol):
    """A Gaussian prior over weights, theta ~ N(mean, diag(precision)^-1).

    The classes behind ``isotropic()``, ``per_layer()`` and the like fulfil it, and so does ``BoundPrior``. A class that
    is to be saved also has ``from_state(state, network)``, which returns the bound prior again.
    """

    @property
    def mean(self) -> float | Tensor:
        """The prior mean: a number, or one for each weight (P,)."""
        ...

    @property
    def needs_groups(self) -> bool:
        """Whether ``bound`` needs the groups of weights whose scale the network ignores."""
        ...

    @property
    def needs_curvature(self) -> bool:
        """Whether the prior takes its scale from the curvature and does not have it yet."""
        ...

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        """Return the prior of these weights, on the device of ``like``, in float64 for every network.

        ``groups`` maps each parameter name to its group; only a prior that ``needs_groups`` uses it.
        """
        ...

    def with_precision(self, precision: Tensor) -> Prior:
        """Return the same prior with other precisions."""
        ...


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
class BoundPrior:
    """A prior over the weights of one selection: the precision of a weight is that of its share, times its scale.

    ``given`` is the prior as the user gave it; its precisions are only the initial ones. ``scale`` (P,) is the
    g-prior's, from the curvature. Create one with ``Prior.bound``.
    """

    given: Prior
    sharing: Sharing
    values: Tensor  # the precisions: (), (groups,) or (P,)
    mean: float | Tensor = 0.0
    scale: Tensor | None = None

    @property
    def selection(self) -> Selection:
        return self.sharing.selection

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups, in the order of ``values``; empty for one precision or one for each weight."""
        return self.sharing.groups

    @property
    def members(self) -> tuple[str, ...]:
        """The group of each parameter; empty without groups."""
        return self.sharing.members

    @property
    def is_single(self) -> bool:
        """Whether the precision is one number times a fixed diagonal."""
        return self.sharing.is_single

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
            prior = bind(self.given, self.sharing.over(selection), self.values, like)
        else:
            prior = self.given.with_precision(self.values).bound(selection, like, groups)
        if self.scale is None:
            return prior
        if self.scale.numel() != selection.size:
            raise NumericalError(
                f"this g-prior has the curvature of {self.scale.numel()} weights already, and there are "
                f"{selection.size}; give g_prior() itself."
            )
        return prior.scaled(self.scale.to(like.device))

    def with_precision(self, precision: Tensor) -> BoundPrior:
        """Return the same prior with other precisions, of the same shape."""
        return replace(self, values=precision)

    def scaled(self, scale: Tensor) -> BoundPrior:
        """Return the prior with the precision of every weight multiplied by ``scale`` (P,)."""
        return replace(self, scale=scale.detach().to(self.values))

    @property
    def vector(self) -> Tensor:
        """The precision of every weight, (P,)."""
        each = self.sharing.spread(self.values)
        return each if self.scale is None else each * self.scale

    def on(self, block: Block) -> BlockPrior:
        """Return the precision on a block."""
        if self.scale is not None:
            return BlockPrior(self.values, block.arrange(self.selection.split(self.scale)))
        constant = self.sharing.constant_on(block, self.values)
        if constant is not None:
            return BlockPrior(constant)
        arranged = block.arrange(self.selection.split(self.vector))
        first = arranged.reshape(-1)[0]
        # Equal precisions that are being learned are kept as they are, so that each gets its gradient.
        is_constant = not arranged.requires_grad and bool((arranged == first).all())
        return BlockPrior(first if is_constant else arranged)

    def logdet(self) -> Tensor:
        """Return the log-determinant of the precision."""
        total = self.sharing.logdet(self.values)
        return total if self.scale is None else total + self.scale.log().sum()

    def penalty(self, theta: Tensor) -> Tensor:
        """Return (theta - mean)ᵀ A (theta - mean)."""
        return self.squares(theta) @ self.values.reshape(-1)

    @property
    def counts(self) -> Tensor:
        """The number of weights that share each precision: (1,), (groups,) or (P,)."""
        return self.sharing.counts(self.values.device)

    def squares(self, theta: Tensor) -> Tensor:
        """Return sums of squares of the weights that share a precision, times their scale."""
        squares = (theta.to(self.values) - self.mean).square()
        return self.summed(squares if self.scale is None else squares * self.scale)

    def summed(self, each: Tensor) -> Tensor:
        """Sum over the weights that share a precision: (P,) to (1,), (groups,) or (P,)."""
        return self.sharing.summed(each)

    def state(self) -> State:
        """Return the prior as plain data. Its name is that of the class of ``given``, whose ``from_state`` reads it."""
        tensors = {"precision": self.values.detach()}
        settings: dict[str, Any] = {"members": list(self.members)}
        if isinstance(self.mean, Tensor):
            tensors["mean"] = self.mean
        else:
            settings["mean"] = self.mean
        if self.scale is not None:
            tensors["scale"] = self.scale
        return State(type(self.given).__name__, settings, tensors)


def stored_mean(state: State) -> float | Tensor:
    """Return the mean that ``BoundPrior.state`` stored: a tensor or a number."""
    mean: float | Tensor = state.tensors["mean"] if "mean" in state.tensors else state.settings["mean"]
    return mean


def bind(given: Prior, sharing: Sharing, precision: Precisions, like: Tensor) -> BoundPrior:
    """Return the bound prior with these precisions and the mean of ``given``, on the device of ``like``.

    Raises:
        NumericalError: if a precision is not positive and finite, a mean is not finite, or their number is wrong.
    """
    like = torch.empty(0, dtype=torch.float64, device=like.device)
    values = _values(precision, sharing, like, type(given).__name__)
    if not bool(torch.isfinite(values).all()) or not bool((values > 0).all()):
        raise NumericalError(
            f"prior precisions run from {values.min().item():.3g} to {values.max().item():.3g}; "
            "expected positive, finite numbers."
        )
    mean, size = given.mean, sharing.selection.size
    if isinstance(mean, Tensor):
        mean = mean.detach().to(like).reshape(-1)
        if mean.numel() not in (1, size):
            raise NumericalError(f"the prior mean has {mean.numel()} entries; expected 1 or {size}.")
    if not bool(torch.isfinite(torch.as_tensor(mean)).all()):
        raise NumericalError("the prior mean holds NaN or infinity; expected finite numbers.")
    return BoundPrior(given, sharing, values, mean)


def _values(precision: Precisions, sharing: Sharing, like: Tensor, name: str) -> Tensor:
    """Return the precisions as a tensor in the shape of the sharing."""
    if isinstance(precision, Mapping):
        return sharing.named(precision, like)
    values = torch.as_tensor(precision, dtype=like.dtype, device=like.device)
    size = sharing.shape.numel()
    if values.numel() not in (1, size):
        expected = "1" if size == 1 else f"1 or {size}"
        raise NumericalError(
            f"the prior {name} got {values.numel()} precisions; expected {expected}"
            + (f", one for each of {', '.join(sharing.groups)}." if sharing.groups else ".")
        )
    return values.reshape(-1).expand(size).reshape(sharing.shape)


def starting_precisions(prior: BoundPrior, theta: Tensor, rows: int) -> Tensor:
    """Return precisions near the optimum of the evidence, where a search for better ones starts.

    They are γ / |w|² with γ at half of its largest value, in the shape of ``prior.values``. ``theta`` (P,) are the
    trained weights and ``rows`` is the number of data times the number of outputs.
    """
    if prior.values.numel() == theta.numel():  # one for each weight: a single square says nothing
        return single_starting_precision(theta, rows).to(prior.values).expand(prior.values.shape).clone()
    return group_starting_precisions(prior, theta, rows).clamp(*STARTS)


def group_starting_precisions(prior: BoundPrior, theta: Tensor, rows: int) -> Tensor:
    """Return one precision for each group from its own weights alone; infinite for weights at the prior mean.

    A group whose weights are k times as large gets a precision k² times as small.
    """
    guess = _share(theta, rows) * prior.counts / prior.squares(theta.double())
    return guess.reshape(prior.values.shape)


def single_starting_precision(theta: Tensor, rows: int) -> Tensor:
    """Return one precision for all weights, ()."""
    return (_share(theta, rows) * theta.numel() / theta.double().square().sum()).clamp(*STARTS)


def _share(theta: Tensor, rows: int) -> float:
    """Return half of the largest share of the weights that the data can determine."""
    return 0.5 * min(1.0, rows / theta.numel())
