"""A mixture of posteriors over an ensemble: each network has error bars of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from lapwing.errors import UnsupportedError
from lapwing.methods.base import METHOD, MODELS, Conformance, Cost, Method, OverNetworks, Workload
from lapwing.methods.kron import Kron
from lapwing.posteriors.base import Posterior
from lapwing.posteriors.mixture import NetworksPosterior
from lapwing.runtime.settings import NONE, POSITIVE_VALUES, setting


@dataclass(frozen=True)
class MixtureOfLaplace(OverNetworks):
    """A mixture of Laplace approximations (Eschenhagen et al. 2021): ``method`` is fitted to every network.

    Each network is fitted as ``fit`` fits one: it learns its prior and noise, and is calibrated on validation data if
    there are some. A prediction is the average of the predictives of all networks, by their shares.

    Args:
        models: The other networks, trained and in evaluation mode; the first is the model that ``fit`` gets.
        method: The method that is fitted to each.
        shares: The weight of each network in the mixture, that of ``fit`` first; equal weights if None.

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, if there is no second network, or there are
            not as many shares as networks.
        ModelError: In ``fit``, if a network is no module, is in training mode, or has outputs of another shape.

    Cost: that of ``method`` for each network, in the fit and in a prediction.
    Exact when: never; it is a baseline.

    >>> from lapwing.api import fit
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> one, two = torch.nn.Linear(1, 1).eval(), torch.nn.Linear(1, 1).eval()
    >>> mixture = fit(one, [(x, x.sin())], "regression", method=MixtureOfLaplace([two]))
    >>> torch.allclose(mixture.predict(x).mean, (one(x) + two(x)) / 2)
    True
    """

    models: Sequence[nn.Module] = setting((), MODELS, repr=False)
    method: Method = setting(Kron(), METHOD)
    shares: Sequence[float] | None = setting(None, POSITIVE_VALUES | NONE)
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="it mixes the posteriors of several networks",
        small=lambda model: {"": MixtureOfLaplace([_other(model)])},
    )

    def networks(self, model: nn.Module) -> list[nn.Module]:
        networks = [model, *self.models]
        if len(networks) < 2:
            raise UnsupportedError("MixtureOfLaplace() has one network; expected others: models=[...].")
        if self.shares is not None and len(self.shares) != len(networks):
            raise UnsupportedError(
                f"shares has {len(self.shares)} numbers and there are {len(networks)} networks; expected one for each, "
                "that of the model given to fit() first."
            )
        return networks

    def combine(self, posteriors: Sequence[Posterior]) -> NetworksPosterior:
        shares = [1.0] * len(posteriors) if self.shares is None else [float(share) for share in self.shares]
        return NetworksPosterior.of(posteriors, [share / sum(shares) for share in shares])

    def cost(self, workload: Workload) -> Cost:
        count = 1 + len(self.models) if self.models else 5
        cost = self.method.cost(workload)
        if cost is None:
            return Cost.unsupported(f"{type(self.method).__name__} does not tell its cost")
        return cost.times(count, f"{count} networks; their training is not counted")

    def trial(self, workload: Workload) -> None:
        """Return None: without its networks there is nothing to time."""
        return


def _other(model: nn.Module) -> nn.Module:
    """Return a copy of the model with weights a little further from zero."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    return other
