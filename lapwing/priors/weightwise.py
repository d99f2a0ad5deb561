"""The prior with one precision for each weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.state import State, saved
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior, Precisions, bind, stored_mean
from lapwing.priors.sharing import NotShared


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
