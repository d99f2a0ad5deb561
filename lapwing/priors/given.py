"""Priors as users give them: one precision for all weights, one for each group, one for each weight, or a g-prior."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lapwing.errors import NumericalError, UnsupportedError
from lapwing.networks.selection import Selection
from lapwing.priors.base import BoundPrior, Precisions, Prior, bind
from lapwing.runtime.state import saved


@saved
@dataclass(frozen=True, eq=False)
class Isotropic(Prior):
    """One precision for all weights."""

    precision: float | Tensor = 1.0
    mean: float | Tensor = 0.0

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, selection, self.precision, like)


def isotropic(precision: float | Tensor = 1.0, mean: float | Tensor = 0.0) -> Isotropic:
    """Return a prior with one precision for all weights.

    Args:
        precision: One over the prior variance of every weight, positive.
        mean: The prior mean: a number, or a vector with one entry for each selected weight (P,).

    Returns:
        The prior, for ``fit(prior=...)``, ``train`` or ``posterior.with_prior(...)``.

    Raises:
        NumericalError: when the prior is used, if the precision is not one positive, finite number or the mean does
            not fit the weights.

    >>> import torch
    >>> import lapwing as lw
    >>> x, net = torch.tensor([[-1.0], [3.0]]), torch.nn.Linear(1, 1)
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=lw.isotropic(2.0)).prior.vector
    tensor([2., 2.], dtype=torch.float64)
    """
    return Isotropic(precision, mean)


@saved
@dataclass(frozen=True, eq=False)
class GPrior(Prior):
    """The precision of every weight is g, here ``precision``, times its curvature: A = g diag(H)."""

    precision: float | Tensor = 1.0
    mean: float | Tensor = 0.0
    needs_curvature: ClassVar[bool] = True

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, selection, self.precision, like)


def g_prior(g: float | Tensor = 1.0, mean: float | Tensor = 0.0) -> GPrior:
    """Return a prior whose precision is g times the curvature of each weight: A = g diag(H), H at unit dispersion.

    Predictions do not change if a weight and the layer after it are rescaled such that the network computes the same
    function, and there is one number to learn instead of one for each group. A weight with nearly no curvature gets at
    least a thousandth of the median curvature of its layer.

    Args:
        g: The factor, positive.
        mean: The prior mean: a number, or a vector with one entry for each selected weight (P,).

    Returns:
        The prior, for ``fit(prior=...)`` or ``posterior.with_prior(...)``.

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
    return GPrior(g, mean)


@saved
@dataclass(frozen=True, eq=False)
class PerLayer(Prior):
    """One precision for each layer."""

    precision: Precisions = 1.0
    mean: float | Tensor = 0.0

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, selection, self.precision, like, selection.layer_of())


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

    >>> import torch
    >>> import lapwing as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh(), torch.nn.Linear(1, 1))
    >>> x = torch.tensor([[-1.0], [3.0]])
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=lw.per_layer({"0": 1.0, "2": 9.0})).prior.vector
    tensor([1., 1., 9., 9.], dtype=torch.float64)
    """
    return PerLayer(precisions, mean)


@saved
@dataclass(frozen=True, eq=False)
class Grouped(Prior):
    """One precision for each pattern of parameter names."""

    precision: Mapping[str, float] | Tensor
    mean: float | Tensor = 0.0

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        if not isinstance(self.precision, Mapping):  # without names: these were learned or stored for other weights
            raise UnsupportedError(
                "this prior by patterns belongs to other weights already; give grouped({...}) itself."
            )
        members = tuple(_matching(name, self.precision) for name in selection.names)
        return bind(self, selection, self.precision, like, members)

    def restored(self, selection: Selection, values: Tensor, members: tuple[str, ...]) -> BoundPrior:
        return bind(self, selection, values, values, members)  # files have the groups, not the patterns


def _matching(name: str, patterns: Mapping[str, float]) -> str:
    """Return the one pattern that matches the whole name of a parameter; refuse none or several."""
    try:
        matches = [pattern for pattern in patterns if re.fullmatch(pattern, name)]
    except re.error as error:
        raise UnsupportedError(
            f"grouped(): one of {list(patterns)} is no regular expression: {error}; expected such."
        ) from error
    if len(matches) != 1:
        raise NumericalError(
            f"grouped(): the parameter {name!r} matches {len(matches)} of the patterns {list(patterns)}; expected one."
        )
    return matches[0]


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

    >>> import torch
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


@saved
@dataclass(frozen=True, eq=False)
class PerNormalisedGroup(Prior):
    """One precision for each group of weights whose scale the network ignores, and one for the rest."""

    precision: Precisions = 1.0
    mean: float | Tensor = 0.0
    needs_groups: ClassVar[bool] = True

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        if groups is None:
            raise UnsupportedError(
                "the groups of per_normalised_group() come from runs of the network; give the prior to fit()."
            )
        members = tuple(groups[name] for name in selection.names)
        return bind(self, selection, self.precision, like, members)


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

    >>> import torch
    >>> import lapwing as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    >>> x = torch.randn(8, 2)
    >>> lw.fit(net, [(x, x[:, :1])], "regression", prior=lw.priors.per_normalised_group()).prior.groups
    ('0', 'rest')
    """
    return PerNormalisedGroup(precisions, mean)


@saved
@dataclass(frozen=True, eq=False)
class DiagonalPrior(Prior):
    """One precision for each weight."""

    precision: Precisions = 1.0
    mean: float | Tensor = 0.0

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, selection, self.precision, like, per_weight=True)


def diagonal(precisions: Precisions = 1.0, mean: float | Tensor = 0.0) -> DiagonalPrior:
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

    >>> import torch
    >>> import lapwing as lw
    >>> x, net = torch.tensor([[-1.0], [3.0]]), torch.nn.Linear(1, 1)
    >>> prior = lw.priors.diagonal({"weight": 1.0, "bias": 0.5})
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=prior).prior.vector
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    return DiagonalPrior(precisions, mean)
