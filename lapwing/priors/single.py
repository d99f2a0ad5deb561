"""Priors with one number to learn: the isotropic prior and the g-prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.state import State, saved
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior, bind, stored_mean
from lapwing.priors.sharing import SharedByAll


@saved
@dataclass(frozen=True, eq=False)
class Isotropic:
    """One precision for all weights."""

    precision: float | Tensor = 1.0
    mean: float | Tensor = 0.0
    needs_groups: ClassVar[bool] = False
    needs_curvature: ClassVar[bool] = False

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, SharedByAll(selection), self.precision, like)

    def with_precision(self, precision: Tensor) -> Isotropic:
        return replace(self, precision=precision)

    @classmethod
    def from_state(cls, state: State, network: Network) -> BoundPrior:
        prior = cls(state.tensors["precision"], stored_mean(state))
        return prior.bound(network.selection, torch.empty(0, device=network.device))


@saved
@dataclass(frozen=True, eq=False)
class GPrior:
    """The precision of every weight is g times its curvature: A = g diag(H)."""

    g: float | Tensor = 1.0
    mean: float | Tensor = 0.0
    needs_groups: ClassVar[bool] = False
    needs_curvature: ClassVar[bool] = True

    def bound(self, selection: Selection, like: Tensor, groups: Mapping[str, str] | None = None) -> BoundPrior:
        return bind(self, SharedByAll(selection), self.g, like)

    def with_precision(self, precision: Tensor) -> GPrior:
        return replace(self, g=precision)

    @classmethod
    def from_state(cls, state: State, network: Network) -> BoundPrior:
        prior = cls(state.tensors["precision"], stored_mean(state))
        bound = prior.bound(network.selection, torch.empty(0, device=network.device))
        return bound.scaled(state.tensors["scale"]) if "scale" in state.tensors else bound


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

    >>> import lapwing as lw
    >>> x, net = torch.tensor([[-1.0], [3.0]]), torch.nn.Linear(1, 1)
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=lw.isotropic(2.0)).prior.vector
    tensor([2., 2.], dtype=torch.float64)
    """
    return Isotropic(precision, mean)


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

    >>> import lapwing as lw
    >>> x, net = torch.tensor([[-1.0], [3.0]]), torch.nn.Linear(1, 1)
    >>> lw.fit(net, [(x, 2 * x)], "regression", prior=lw.priors.g_prior(0.5)).prior.vector.detach()
    tensor([5., 1.], dtype=torch.float64)
    """
    return GPrior(g, mean)
