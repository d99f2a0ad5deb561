"""How a network is trained with the evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lapwing.errors import UnsupportedError
from lapwing.methods.full import Full
from lapwing.methods.kron import Kron
from lapwing.posteriors.protocols import Method
from lapwing.priors import isotropic, per_layer
from lapwing.priors.bound import Prior
from lapwing.tuners.ascend import Ascend
from lapwing.tuners.fixed_point import FixedPoint

Tuner = Callable[[Any], Any]
OPTIMISERS = {"adam": "betas", "sgd": "momentum", "lbfgs": "history_size"}  # a setting that only it has


@dataclass(frozen=True, eq=False)
class Recipe:
    """Train on the regularised loss; now and then fit a posterior and let ``update`` change prior and noise.

    From epoch ``burn_in`` on, every ``frequency`` epochs: curvature by ``method``, then ``update``. The penalty of the
    weights is that of the prior, over the number of data. The rate falls from ``rate`` to ``last_rate`` by a cosine.
    The weights and hyperparameters with the best evidence are kept (``keep_best=False``: the last).
    """

    epochs: int
    method: Method
    prior: Prior
    update: Tuner
    burn_in: int = 0
    frequency: int = 1
    optimiser: str = "adam"
    rate: float = 1e-3
    last_rate: float = 1e-6
    keep_best: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("method", self.method), ("prior", self.prior), ("update", self.update)):
            if isinstance(value, type):
                raise UnsupportedError(f"{name} is the class {value.__name__}; expected an object: call it.")
        if not isinstance(self.prior, Prior):
            raise UnsupportedError(f"prior is {self.prior!r}; expected per_layer(), isotropic() or the like.")
        if not hasattr(self.method, "fit") or not callable(self.update):
            raise UnsupportedError(
                f"method is {self.method!r} and update {self.update!r}; expected an object such as Kron() and a tuner."
            )
        if self.optimiser not in OPTIMISERS:
            raise UnsupportedError(f"optimiser is {self.optimiser!r}; expected one of {', '.join(OPTIMISERS)}.")
        if self.epochs < 1 or self.frequency < 1 or self.burn_in < 0:
            raise UnsupportedError(
                f"epochs is {self.epochs}, frequency {self.frequency} and burn_in {self.burn_in}; "
                "expected at least 1, 1 and 0."
            )
        if not 0 < self.last_rate <= self.rate < math.inf:
            raise UnsupportedError(f"rate is {self.rate} and last_rate {self.last_rate}; expected 0 < last <= first.")

    def updates_after(self, epoch: int) -> bool:
        """Whether prior and noise are updated once this epoch (from 0) is done; always after the last."""
        due = epoch >= self.burn_in and (epoch - self.burn_in) % self.frequency == 0
        return due or epoch == self.epochs - 1

    def rate_at(self, progress: float) -> float:
        """Of the optimiser, with progress from 0 to 1."""
        return self.last_rate + 0.5 * (self.rate - self.last_rate) * (1 + math.cos(math.pi * min(progress, 1.0)))

    def optimiser_for(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        chosen = list(parameters)
        if self.optimiser == "adam":
            return torch.optim.Adam(chosen, lr=self.rate)
        if self.optimiser == "sgd":
            return torch.optim.SGD(chosen, lr=self.rate, momentum=0.9, nesterov=True)
        # Its own limit on the change of the loss would stop it for good while the gradient is still large.
        return torch.optim.LBFGS(chosen, lr=1.0, max_iter=20, tolerance_change=0.0, line_search_fn="strong_wolfe")


def online(epochs: int = 100, **changes: Any) -> Recipe:
    """The online Kronecker evidence (Immer et al. 2021): hyper-steps on one log-precision for each layer.

    >>> online(epochs=20, burn_in=5).frequency
    1
    """
    recipe = Recipe(epochs=epochs, method=Kron(), prior=per_layer(1.0), update=Ascend())
    return replace(recipe, **changes)


def classic(epochs: int = 30, **changes: Any) -> Recipe:
    """The classic loop (MacKay 1992; Foresee and Hagan 1997): L-BFGS, and every cycle α = γ/|w|², β = (N - γ)/SSE.

    For networks small enough for the full curvature; ``prior=per_layer()`` gives every layer its own α.
    """
    recipe = Recipe(
        epochs=epochs,
        method=Full(),
        prior=isotropic(1.0),
        update=FixedPoint(max_steps=1),
        optimiser="lbfgs",
        keep_best=False,
    )
    return replace(recipe, **changes)
