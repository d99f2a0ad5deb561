"""Priors with several precisions: by layer, by pattern, by what the network ignores, or one for each weight."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.state import State, saved
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior, Precisions, bind, stored_mean
from lapwing.priors.sharing import NotShared, SharedByGroup


@saved
@dataclass(frozen=True, eq=False)
class PerLayer:
    """One precision for each layer."""

    precision: Precisions = 1.0
    mean: float | Tensor = 0.0
    needs_groups: ClassVar[bool] = False
    needs_curvature: ClassVar[bool] = False

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, SharedByGroup(selection, selection.layer_of()), self.precision, like)

    def with_precision(self, precision: Tensor) -> PerLayer:
        return replace(self, precision=precision)

    @classmethod
    def from_state(cls, state: State, network: Network) -> BoundPrior:
        return _restored(cls(state.tensors["precision"], stored_mean(state)), state, network)


@saved
@dataclass(frozen=True, eq=False)
class Grouped:
    """One precision for each pattern of parameter names."""

    precision: Mapping[str, float]
    mean: float | Tensor = 0.0
    needs_groups: ClassVar[bool] = False
    needs_curvature: ClassVar[bool] = False

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        members = tuple(_matching(name, self.precision) for name in selection.names)
        return bind(self, SharedByGroup(selection, members), self.precision, like)

    def with_precision(self, precision: Tensor) -> Grouped:
        """Raise: without a selection it is not known which precision belongs to which pattern."""
        raise UnsupportedError("this prior by patterns belongs to other weights already; give grouped({...}) itself.")

    @classmethod
    def from_state(cls, state: State, network: Network) -> BoundPrior:
        names = dict.fromkeys(state.settings["members"])  # a group has its pattern as its name
        precisions = dict(zip(names, state.tensors["precision"].tolist(), strict=True))
        return _restored(cls(precisions, stored_mean(state)), state, network)


@saved
@dataclass(frozen=True, eq=False)
class PerNormalisedGroup:
    """One precision for each group of weights whose scale the network ignores, and one for the rest."""

    precision: Precisions = 1.0
    mean: float | Tensor = 0.0
    needs_groups: ClassVar[bool] = True
    needs_curvature: ClassVar[bool] = False

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        if groups is None:
            raise UnsupportedError(
                "the groups of per_normalised_group() are found by evaluating the network; give the prior to fit()."
            )
        members = tuple(groups[name] for name in selection.names)
        return bind(self, SharedByGroup(selection, members), self.precision, like)

    def with_precision(self, precision: Tensor) -> PerNormalisedGroup:
        return replace(self, precision=precision)

    @classmethod
    def from_state(cls, state: State, network: Network) -> BoundPrior:
        return _restored(cls(state.tensors["precision"], stored_mean(state)), state, network)


def _restored(given: PerLayer | Grouped | PerNormalisedGroup, state: State, network: Network) -> BoundPrior:
    """Return the prior with the groups that were stored."""
    sharing = SharedByGroup(network.selection, tuple(state.settings["members"]))
    return bind(given, sharing, state.tensors["precision"], torch.empty(0, device=network.device))


def _matching(name: str, patterns: Mapping[str, float]) -> str:
    """Return the one pattern that matches the whole name of a parameter; refuse none or several."""
    try:
        matches = [pattern for pattern in patterns if re.fullmatch(pattern, name)]
    except re.error as error:
        raise UnsupportedError(f"grouped(): one of {list(patterns)} is no regular expression: {error}.") from error
    if len(matches) != 1:
        raise NumericalError(
            f"grouped(): the parameter {name!r} matches {len(matches)} of the patterns {list(patterns)}; expected one."
        )
    return matches[0]


def per_layer(precisions: Precisions = 1.0, mean: float | Tensor = 0.0) -> PerLayer:
    """Return a prior with one precision for each layer.

    A layer is the module that owns a parameter: the weight and the bias of an ``nn.Linear`` share one precision.

    Args:
        precisions: A number for all layers, a vector with one for each layer, in the order of the parameters, or a
            mapping from the names of all layers to a number for each.
        mean: The prior mean: a number, or a vector with one entry for each selected weight (P,).

    Returns:
        The prior, for ``fit(prior=...)``, ``train`` or ``posterior.with_prior(...)``.

    Raises:
        NumericalError: when the prior is used, if a precision is not positive and finite, or numbers or names do not
            fit the layers.

    >>> import lapwing as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh(), torch.nn.Linear(1, 1))
    >>> x = torch.tensor([[-1.0], [3.0]])
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=lw.per_layer({"0": 1.0, "2": 9.0})).prior.vector
    tensor([1., 1., 9., 9.], dtype=torch.float64)
    """
    return PerLayer(precisions, mean)


def grouped(precisions: Mapping[str, float], mean: float | Tensor = 0.0) -> Grouped:
    """Return a prior with one precision for each group of parameters, chosen by patterns of their names.

    Args:
        precisions: A mapping from regular expressions to numbers. An expression must match whole names, and every
            selected parameter must match exactly one.
        mean: The prior mean: a number, or a vector with one entry for each selected weight (P,).

    Returns:
        The prior, for ``fit(prior=...)``, ``train`` or ``posterior.with_prior(...)``.

    Raises:
        UnsupportedError: if ``precisions`` is not a mapping, or empty; when the prior is used, if a pattern is not a
            regular expression.
        NumericalError: when the prior is used, if a precision is not positive and finite, a parameter matches no
            pattern or several, or a pattern matches no parameter.

    >>> import lapwing as lw
    >>> x, net = torch.tensor([[-1.0], [3.0]]), torch.nn.Linear(1, 1)
    >>> prior = lw.grouped({r".*weight": 1.0, r".*bias": 0.5})
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=prior).prior.vector
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    if not isinstance(precisions, Mapping) or not precisions:
        raise UnsupportedError(
            f"grouped() got {precisions!r}; expected a mapping from patterns of parameter names to precisions, "
            'for example {".*weight": 1.0, ".*bias": 0.1}.'
        )
    return Grouped(precisions, mean)


def per_normalised_group(precisions: Precisions = 1.0, mean: float | Tensor = 0.0) -> PerNormalisedGroup:
    """Return a prior with one precision for each group of weights whose scale the network ignores, one for the rest.

    The size of a weight that a normalisation follows does not change the function of the network, but with one
    precision for all weights it would change the error bars. ``fit`` finds the groups by rescaling weights and
    evaluating the network; ``check`` shows them. Together with ``LinearMode`` the predictions do not depend on those
    sizes (Antorán et al. 2022).

    Args:
        precisions: A number for all groups, a vector with one for each group, in the order of the parameters, or a
            mapping from the names of all groups to a number for each.
        mean: The prior mean: a number, or a vector with one entry for each selected weight (P,).

    Returns:
        The prior, for ``fit(prior=...)``.

    Raises:
        NumericalError: when the prior is used, if a precision is not positive and finite, or numbers or names do not
            fit the groups.
        UnsupportedError: when the prior is used where no network can be evaluated: in ``train``, or in ``with_prior``
            of a posterior that was fitted with another prior.

    >>> import lapwing as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    >>> x = torch.randn(8, 2)
    >>> lw.fit(net, [(x, x[:, :1])], "regression", prior=lw.priors.per_normalised_group()).prior.groups
    ('0', 'rest')
    """
    return PerNormalisedGroup(precisions, mean)


@saved
@dataclass(frozen=True, eq=False)
class Diagonal:
    """One precision for each weight."""

    precision: Precisions = 1.0
    mean: float | Tensor = 0.0
    needs_groups: ClassVar[bool] = False
    needs_curvature: ClassVar[bool] = False

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, NotShared(selection), self.precision, like)

    def with_precision(self, precision: Tensor) -> Diagonal:
        return replace(self, precision=precision)

    @classmethod
    def from_state(cls, state: State, network: Network) -> BoundPrior:
        prior = cls(state.tensors["precision"], stored_mean(state))
        return prior.bound(network.selection, torch.empty(0, device=network.device))


def diagonal(precisions: Precisions = 1.0, mean: float | Tensor = 0.0) -> Diagonal:
    """Return a prior with one precision for each weight.

    Args:
        precisions: A number for all weights, a vector with one for each selected weight (P,), or a mapping from the
            names of all selected parameters to a number for each.
        mean: The prior mean: a number, or a vector (P,).

    Returns:
        The prior, for ``fit(prior=...)``, ``train`` or ``posterior.with_prior(...)``.

    Raises:
        NumericalError: when the prior is used, if a precision is not positive and finite, or numbers or names do not
            fit the weights.

    >>> import lapwing as lw
    >>> x, net = torch.tensor([[-1.0], [3.0]]), torch.nn.Linear(1, 1)
    >>> prior = lw.priors.diagonal({"weight": 1.0, "bias": 0.5})
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=prior).prior.vector
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    return Diagonal(precisions, mean)
