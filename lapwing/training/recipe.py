"""Recipes: how a network is trained while the evidence chooses its regularisation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from lapwing.core.settings import FLAG, FUNCTION, NONE, POSITIVE, Rule, one_of, require, require_integer
from lapwing.core.state import State, on_device
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.methods.full import Full
from lapwing.methods.kron import Kron
from lapwing.methods.map_only import MapOnly
from lapwing.methods.protocol import Method
from lapwing.priors import isotropic, per_layer
from lapwing.priors.bound import BoundPrior, Prior
from lapwing.training.optimisers import OPTIMISERS
from lapwing.tuners.evidence import Ascend
from lapwing.tuners.fixed_point import FixedPoint
from lapwing.tuners.protocol import Tuner


@dataclass(frozen=True, eq=False)
class Recipe:
    """The settings of ``train``: train on the regularised loss, and update prior and noise after some of the epochs.

    The loss has the prior's penalty of the weights, divided by the number of data. An update fits a posterior by
    ``method`` at the present weights and applies ``update`` to it. ``online``, ``classic`` and ``fixed`` make the usual
    recipes.

    Cost: training, and for each update a fit of ``method`` and the cost of ``update``.

    Args:
        epochs: The number of passes over the data.
        method: The method that computes the evidence, such as ``Kron()``.
        prior: The prior to start from, such as ``per_layer()``.
        update: A tuner, such as ``lw.tuners.Ascend()``; None keeps prior and noise as they are.
        burn_in: The first epoch (from 0) after which prior and noise are updated.
        frequency: The number of epochs between updates from then on; always after the last.
        optimiser: "adam", "sgd" or "lbfgs" (all data in one step).
        rate: The first learning rate; it falls to ``last_rate`` by a cosine. Not used by L-BFGS.
        last_rate: The last learning rate.
        keep_best: Whether the result has the weights and hyperparameters with the best evidence, or the last ones.
        seed: The seed of all random numbers in training.

    Raises:
        UnsupportedError: If a setting is out of range or of the wrong kind.

    >>> recipe = Recipe(10, Full(), isotropic(1.0), FixedPoint(max_steps=1), burn_in=4, frequency=3)
    >>> [epoch for epoch in range(10) if recipe.updates_after(epoch)]
    [4, 7, 9]
    """

    epochs: int
    method: Method
    prior: Prior
    update: Tuner | None
    burn_in: int = 0
    frequency: int = 1
    optimiser: str = "adam"
    rate: float = 1e-3
    last_rate: float = 1e-6
    keep_best: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        instance = lambda kind: lambda v: isinstance(v, kind) and not isinstance(v, type | nn.Module)
        require(
            self,
            method=Rule("an object such as lw.Kron()", instance(Method)),
            prior=Rule("an object such as lw.per_layer()", instance(Prior)),
            update=Rule("a tuner, such as lw.tuners.Ascend()", FUNCTION.holds) | NONE,
        )
        require(self, optimiser=one_of(OPTIMISERS))
        require_integer("epochs", self.epochs)
        require_integer("frequency", self.frequency)
        require_integer("burn_in", self.burn_in, least=0)
        POSITIVE.check("rate", self.rate)
        POSITIVE.check("last_rate", self.last_rate)
        if self.last_rate > self.rate:
            raise UnsupportedError(f"rate is {self.rate} and last_rate {self.last_rate}; expected 0 < last <= first.")
        FLAG.check("keep_best", self.keep_best)
        require_integer("seed", self.seed, least=0)

    @property
    def full_batch(self) -> bool:
        """Whether a step of the optimiser uses all data and no learning rate."""
        return OPTIMISERS[self.optimiser].full_batch

    def updates_after(self, epoch: int) -> bool:
        """Return whether prior and noise are updated after this epoch.

        Args:
            epoch: The number of the epoch, from 0.

        Returns:
            True for every ``frequency``-th epoch from ``burn_in`` on, and for the last; never without a tuner.
        """
        if self.update is None:
            return False
        due = epoch >= self.burn_in and (epoch - self.burn_in) % self.frequency == 0
        return due or epoch == self.epochs - 1

    def rate_at(self, progress: float) -> float:
        """Return the learning rate.

        Args:
            progress: The share of training that is done, from 0 to 1.

        Returns:
            The rate on a cosine from ``rate`` to ``last_rate``.
        """
        return self.last_rate + 0.5 * (self.rate - self.last_rate) * (1 + math.cos(math.pi * min(progress, 1.0)))

    def described(self, likelihood: Likelihood, prior: BoundPrior) -> State:
        """Return the recipe as plain data for the state of a run, with the prior that the run starts from."""
        names = ("optimiser", "seed", "epochs", "rate", "last_rate", "burn_in", "frequency", "keep_best")
        kinds = {"method": type(self.method).__name__, "likelihood": type(likelihood).__name__}
        start = on_device(prior.state(), torch.device("cpu"))
        return State("recipe", {**{name: getattr(self, name) for name in names}, **kinds}, parts={"prior": start})

    def optimiser_for(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimiser of these parameters, at the first learning rate."""
        return OPTIMISERS[self.optimiser].build(list(parameters), self.rate)


def online(epochs: int = 100, **changes: Any) -> Recipe:
    """Return the recipe of the online Kronecker evidence (Immer et al. 2021), for networks of any size.

    Adam on mini-batches, one precision for each layer, and after every epoch a Kronecker-factored curvature and 100
    gradient steps on the evidence.

    Args:
        epochs: The number of passes over the data.
        **changes: Other settings of ``Recipe``, such as ``burn_in=5`` or ``rate=1e-2``.

    Returns:
        The recipe.

    Raises:
        UnsupportedError: If a setting is out of range or of the wrong kind.

    >>> online(epochs=20, burn_in=5).frequency
    1
    """
    return _changed(Recipe(epochs, Kron(), per_layer(1.0), Ascend()), changes)


def classic(epochs: int = 30, **changes: Any) -> Recipe:
    """Return the recipe of the classic loop (MacKay 1992; Foresee and Hagan 1997), for small networks.

    L-BFGS on all data, one precision for all weights, and after every epoch the full curvature and one update
    α = γ/|w|², β = (N - γ)/SSE. The weights at the end are the last, not those with the best evidence.

    Args:
        epochs: The number of cycles of at most 20 L-BFGS iterations.
        **changes: Other settings of ``Recipe``; ``prior=per_layer()`` gives every layer its own α.

    Returns:
        The recipe.

    Raises:
        UnsupportedError: If a setting is out of range or of the wrong kind.

    >>> classic().optimiser
    'lbfgs'
    """
    recipe = Recipe(epochs, Full(), isotropic(1.0), FixedPoint(max_steps=1), optimiser="lbfgs", keep_best=False)
    return _changed(recipe, changes)


def fixed(epochs: int = 100, precision: float = 1.0, **changes: Any) -> Recipe:
    """Return the recipe of plain training, for networks to compare with or to fit a posterior to later.

    Adam on mini-batches with a fixed prior and noise: the squared loss has unit noise. No evidence is computed. The
    posterior is that of ``lw.baselines.MapOnly()``, the plain network.

    Args:
        epochs: The number of passes over the data.
        precision: The precision A of the prior over every weight; the weight decay of the mean loss is A/n for n data.
        **changes: Other settings of ``Recipe``, such as ``seed=3``, ``rate=1e-2`` or ``optimiser="sgd"``.

    Returns:
        The recipe.

    Raises:
        UnsupportedError: If a setting is out of range or of the wrong kind.

    >>> fixed(epochs=20).updates_after(19)
    False
    """
    POSITIVE.check("precision", precision)
    return _changed(Recipe(epochs, MapOnly(), isotropic(precision), None), changes)


def _changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with other settings; raise for a name that is none."""
    settings = one_of([each.name for each in fields(Recipe)])
    for name in changes:
        settings.check("the name of a setting", name)
    if recipe.update is not None and changes.get("update", recipe.update) is None:
        raise UnsupportedError(
            "update is None; expected a tuner, such as lw.tuners.Ascend(). For plain training use fixed(...)."
        )
    return replace(recipe, **changes)
