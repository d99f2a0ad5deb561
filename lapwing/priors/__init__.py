"""Gaussian priors over the weights as users give them (``lw.priors``).

A number given to a prior is a precision, 1 / variance. Tuners, which learn precisions, are in ``lapwing.tuners``.
Each prior is known to users by its name in lower case too: ``lw.priors.g_prior`` is ``GPrior``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from lapwing.errors import FileError, NumericalError, UnsupportedError
from lapwing.networks.selection import Selection
from lapwing.priors.base import BoundPrior, Precisions, Prior, bind
from lapwing.runtime.settings import POSITIVE, HasSettings, Rule, saved, setting

__all__ = [
    "FilterGP", "diagonal", "filter_gp", "g_prior", "grouped", "isotropic", "per_layer", "per_normalised_group",
]  # fmt: skip


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
        members = tuple(_matching(name, self.precisions) for name in selection.names)
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


def _matching(name: str, patterns: Mapping[str, float]) -> str:
    """Return the one pattern that matches the whole name of a parameter; refuse none or several."""
    try:
        matches = [pattern for pattern in patterns if re.fullmatch(pattern, name)]
    except re.error as error:
        raise UnsupportedError(
            f"grouped(): one of {list(patterns)} is not a regular expression: {error}; expected one."
        ) from error
    if len(matches) != 1:
        raise NumericalError(
            f"grouped(): the parameter {name!r} matches {len(matches)} of the patterns {list(patterns)}; expected one."
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


def _is_mapping(value: Any) -> bool:
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
