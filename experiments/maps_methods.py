"""The methods of the maps: one trained network with many kinds of error bars, under one prior precision."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

import lapwing as lw
from experiments.pinned import EVIDENCE
from lapwing.demo.training import TrainingSettings, train_mlp

SAMPLED = "sampled network"
RULES = ("variance", "curvature")  # a subnetwork has the weights with the largest; both from the diagonal posterior
RECIPE = TrainingSettings(epochs=10**6, max_steps=2000, batch_size=128)


@dataclass(frozen=True)
class Choices:
    """Settings of the methods: sizes of subnetworks as shares of all weights, networks, rate of dropout, draws."""

    shares: tuple[float, ...] = (0.01, 0.1, 0.5)
    members: int = 5
    dropout: float = 0.1
    draws: int = 200

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of all methods, in the order of tables and pictures."""
        return (
            "plain", "ensemble", "MC dropout", "last layer", "full", "Kron", "diagonal", SAMPLED,
            *self.subnetworks, "default",
        )  # fmt: skip

    @property
    def subnetworks(self) -> dict[str, tuple[str, float]]:
        """The rule and the share of every subnetwork, by the name of the method."""
        return {f"subnetwork {100 * share:g} %, {rule}": (rule, share) for rule in RULES for share in self.shares}


@dataclass(frozen=True, eq=False)
class Maps:
    """Data, the network trained on them, and posteriors on it.

    The exact posterior learns the prior precision, and for regression the noise, by its evidence. All Laplace methods
    take them, so that they differ in the structure of the covariance alone. "sampled network" puts weights drawn from
    the exact posterior into the network itself; "default" is what ``lw.fit`` gives without any choice. MC dropout has a
    network to itself, trained with dropout.
    """

    x: Tensor
    y: Tensor
    outputs: int
    recipe: TrainingSettings
    choices: Choices
    seed: int

    @property
    def _likelihood(self) -> Any:
        return lw.Gaussian() if self.y.is_floating_point() else lw.Categorical()

    @cached_property
    def network(self) -> nn.Sequential:
        """The network that all methods share."""
        return train_mlp(self.x, self.y, self.outputs, self.recipe, self.seed)

    @cached_property
    def full(self) -> lw.Fitted:
        """The exact posterior, from the rows of the Jacobian: the same as ``Full`` and faster for few data."""
        tuner = lw.tuners.MaximiseEvidence(noise=True) if self.y.is_floating_point() else EVIDENCE
        return lw.fit(
            self.network, (self.x, self.y), self._likelihood, method=lw.KernelSpace(), tuner=tuner, progress=False
        )

    @cached_property
    def _shared(self) -> dict[str, Any]:
        """The likelihood and prior of all Laplace methods."""
        likelihood = self._likelihood
        if self.y.is_floating_point():
            likelihood = lw.Gaussian(noise_std=float(self.full.likelihood.dispersion) ** 0.5)
        return {"likelihood": likelihood, "prior": lw.isotropic(float(self.full.prior.values))}

    def _laplace(self, method: Any, weights: Any = None) -> lw.Fitted:
        return lw.fit(self.network, (self.x, self.y), method=method, weights=weights, progress=False, **self._shared)

    def _fit(self, method: Any, network: nn.Module | None = None) -> lw.Fitted:
        model = self.network if network is None else network
        return lw.fit(model, (self.x, self.y), self._likelihood, method=method, progress=False)

    def _ensemble(self) -> lw.Fitted:
        first = 1000 * (self.seed + 1)  # no other repetition trains a network with these seeds
        seeds = range(first, first + self.choices.members - 1)
        return self._fit(
            lw.baselines.Ensemble([train_mlp(self.x, self.y, self.outputs, self.recipe, seed) for seed in seeds])
        )

    def _dropout(self) -> lw.Fitted:
        recipe = replace(self.recipe, dropout=self.choices.dropout)
        network = train_mlp(self.x, self.y, self.outputs, recipe, self.seed)
        return self._fit(lw.baselines.MCDropout(self.choices.draws), network)

    def _subnetwork(self, rule: str, share: float) -> lw.Fitted:
        posterior: Any = self._laplace(lw.Diagonal()).posterior
        values = posterior.precision.variances() if rule == "variance" else posterior.curvature.diagonal()
        return self._laplace(lw.KernelSpace(), lw.subnetwork(largest(values, max(1, round(share * len(values))))))

    def fits(self) -> Mapping[str, Callable[[], lw.Fitted]]:
        """Return a function for every method, which fits its posterior."""
        methods: dict[str, Callable[[], lw.Fitted]] = {
            "plain": lambda: self._fit(lw.baselines.MapOnly()),
            "ensemble": self._ensemble,
            "MC dropout": self._dropout,
            "last layer": lambda: self._laplace(lw.Full(), lw.last_layer),
            "full": lambda: self._laplace(lw.KernelSpace()),
            "Kron": lambda: self._laplace(lw.Kron()),
            "diagonal": lambda: self._laplace(lw.Diagonal()),
            SAMPLED: lambda: self._laplace(lw.KernelSpace()),
            "default": lambda: self._fit(None),
        }
        for name, chosen in self.choices.subnetworks.items():
            methods[name] = partial(self._subnetwork, *chosen)
        return {name: methods[name] for name in self.choices.methods}

    def timed(self, name: str) -> tuple[lw.Fitted, float]:
        """Fit a method; return its posterior and the seconds beyond the training of the network that all share.

        Learning the shared precision is counted for no method.
        """
        _ = self.full  # trains the network and learns the precision, before the clock starts
        start = time.perf_counter()
        fitted = self.fits()[name]()
        return fitted, time.perf_counter() - start


def largest(values: Tensor, count: int) -> Tensor:
    """Return the positions of the largest values, in rising order, (count,).

    >>> import torch
    >>> largest(torch.tensor([0.1, 0.5, 0.2, 0.4]), 2)
    tensor([1, 3])
    """
    return values.topk(count).indices.sort().values
