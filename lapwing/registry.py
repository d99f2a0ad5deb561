"""Names such as "full" or "regression" and the objects that they stand for, and the choice of a method by its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import nn

from lapwing.errors import UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.labels import Bernoulli, Categorical
from lapwing.likelihoods.numbers import Gaussian, HeteroscedasticGaussian, Poisson
from lapwing.methods.base import Method, Requirements, Workload, bytes_text, seconds_text
from lapwing.methods.fmgp import FMGP
from lapwing.methods.hfl import HFL
from lapwing.methods.inducing_points import ELLA
from lapwing.methods.ivon import IVON
from lapwing.methods.members import Ensemble, MapOnly, MCDropout, MixtureOfLaplace
from lapwing.methods.sampled import Sampled
from lapwing.methods.swag import SWAG
from lapwing.methods.valla import VaLLA
from lapwing.methods.variational_last_layer import VariationalLastLayer
from lapwing.methods.weight_space import Diagonal, EKron, Full, KernelSpace, Kron, LowRank
from lapwing.networks.selection import AllWeights, LastLayer, Weights
from lapwing.priors import Isotropic, Prior
from lapwing.runtime.settings import FLAG, HasSettings, Rule, integer, is_real, refuse_other_settings, setting

T = TypeVar("T")
Names: TypeAlias = Mapping[str, Callable[[], T]]  # what names stand for

METHODS: dict[str, type[Method]] = {
    "full": Full, "diagonal": Diagonal, "kron": Kron, "ekron": EKron, "low_rank": LowRank, "map_only": MapOnly,
    "kernel_space": KernelSpace, "sampled": Sampled, "ella": ELLA, "valla": VaLLA, "fmgp": FMGP, "hfl": HFL,
    "ensemble": Ensemble, "dropout": MCDropout, "swag": SWAG,
    "ivon": IVON, "mixture_of_laplace": MixtureOfLaplace, "variational_last_layer": VariationalLastLayer,
}  # fmt: skip
LIKELIHOODS: dict[str, type[Likelihood]] = {
    "classification": Categorical, "categorical": Categorical, "regression": Gaussian, "gaussian": Gaussian,
    "binary": Bernoulli, "bernoulli": Bernoulli, "multilabel": Bernoulli, "poisson": Poisson, "counts": Poisson,
    "heteroscedastic": HeteroscedasticGaussian,
}  # fmt: skip
WEIGHTS: dict[str, Callable[[], Weights]] = {"all": AllWeights, "all_weights": AllWeights, "last_layer": LastLayer}
INHERITS = "whose class inherits from"
BY_LAYERS = 2  # the tier of Kronecker methods
RATE = 2e10  # multiplications in a second on a plain processor; a GPU does a hundred times as many


@dataclass(frozen=True)
class Choice:
    """A method, and the reason why it was chosen."""

    method: Method
    why: str


LIMIT = Rule("a positive number", lambda v: is_real(v) and v > 0)  # infinity is no limit


@dataclass(frozen=True)
class Auto(HasSettings):
    """The choice of a method by its cost: exact if affordable, else samples of the exact posterior, else Kronecker.

    For classes, logits with a softmax or sigmoid, it is Kronecker at once: there exact posteriors cost tens of times
    as much and predict as well (docs/choosing.md has the figures). Single weights have no Kronecker structure and get
    an exact posterior for classes too.

    Registered methods that offer themselves (``lapwing.methods.base.Method.offer``) are compared. Costs are
    counted and not measured, so that the same problem gets the same method on every machine. ``fit(...,
    method="auto")`` has these defaults; ``posterior.why`` tells the reason.

    Args:
        memory: The bytes that a method may hold, besides what a pass of the network holds for one chunk of data.
            ``Sampled`` gets this limit and keeps to it.
        seconds: The time of the fit, as multiplications over a round figure for a processor.
        num_samples: The number of samples, for ``Sampled``.
        gpu: Whether to count with a GPU, a hundred times as fast; ``fit`` sets it if the model is on one.

    Raises:
        UnsupportedError: If a setting is not a positive number.

    >>> Auto().choose(weights=500, rows=10_000).why
    'Full: 500 weights, 10,000 rows (data times outputs); 3.8 MB and about 130 ms, exact'
    """

    memory: float = setting(4 * 2**30, LIMIT)
    seconds: float = setting(60.0, LIMIT)
    num_samples: int = setting(64, integer())
    gpu: bool = setting(False, FLAG)

    def on(self, device: torch.device) -> Auto:
        """Return the choice for a model on this device."""
        return replace(self, gpu=self.gpu or device.type == "cuda")

    def choose(
        self, weights: int, rows: int, single: bool = False, tuned: bool = False, workload: Workload | None = None,
        classes: bool = False,
    ) -> Choice:  # fmt: skip
        """Return the method for a problem of this size, with the reason.

        Args:
            weights: The number of weights, P.
            rows: The number of data times outputs, n C.
            single: Whether the weights are chosen one by one, and so have no Kronecker structure.
            tuned: Whether the prior precision is still to be learned, for which samples take several solves.
            workload: The network in numbers, from which eigendecompositions are counted; without it ``Kron`` is taken
                without a count.
            classes: Whether the outputs are logits of classes.

        >>> Auto().choose(weights=500, rows=10_000, classes=True).why
        'Kron: 500 weights, 10,000 rows (data times outputs); for classes exact methods cost more and gain little'
        >>> type(Auto(memory=1e6).choose(weights=5_000, rows=10_000).method).__name__
        'Kron'
        """
        rate = RATE * (100 if self.gpu else 1)
        requirements = Requirements(
            weights, rows, self.memory, self.num_samples, single, tuned, self.seconds * rate, self.gpu, workload
        )
        offers = [kind().offer(requirements) for kind in METHODS.values()]
        size = f"{weights:,} weights, {rows:,} rows (data times outputs)"
        known = sorted((o for o in offers if o is not None), key=lambda o: (o.tier, o.work))
        by_layers = [offer for offer in known if offer.tier == BY_LAYERS]
        rejected = "; for classes exact methods cost more and gain little" if classes and by_layers else ""
        for offer in by_layers if rejected else known:
            name = type(offer.method).__name__
            if not offer.kind:
                return Choice(offer.method, f"{name}: {size}{rejected}")
            cost = f"{bytes_text(offer.memory)} and about {seconds_text(offer.work / rate)}"
            if offer.memory <= self.memory and offer.work / rate <= self.seconds:
                return Choice(offer.method, f"{name}: {size}; {cost}, {offer.kind}{rejected}")
            rejected += f"; {name} would take {cost}"
        raise UnsupportedError(f"no registered method takes {size} within these limits; raise memory= and seconds=.")


refuse_other_settings([Auto, *METHODS.values(), *LIKELIHOODS.values()])


def find_method(given: Method | Auto | str | None) -> Method | Auto:
    """Return the method that was given or that a name stands for, ``Kron()`` for None; raise for anything else.

    >>> find_method("full"), find_method(None) == Kron()
    (Full(curvature='ggn', limit=None, draws=4), True)
    """
    names: Names[Method | Auto] = {**METHODS, "auto": Auto}
    chosen: Method | Auto | str = Kron() if given is None else given
    return _find("method", chosen, names, (Method, Auto), f"lw.Kron(), {INHERITS} Method")


def find_likelihood(given: Likelihood | str) -> Likelihood:
    """Return the likelihood that was given or that a name stands for; raise for anything else."""
    names: Names[Likelihood] = LIKELIHOODS
    return _find("likelihood", given, names, (Likelihood,), f"lw.Gaussian(), {INHERITS} Likelihood")


def find_weights(given: Weights | str | None) -> Weights:
    """Return the rule that was given or that a name stands for, all weights for None; raise for anything else."""
    return _find("weights", AllWeights() if given is None else given, WEIGHTS, (Weights,), "lw.subnetwork(index)")


def _find(what: str, given: object, names: Names[T], contract: tuple[type, ...], example: str) -> T:
    if isinstance(given, type):
        raise UnsupportedError(f"{what} is the class {given.__name__}; expected an object: {given.__name__}().")
    if isinstance(given, str) and given in names:
        return names[given]()
    objects = Rule(
        f"one of {', '.join(names)}, or an object such as {example}",
        lambda v: isinstance(v, contract) and not isinstance(v, nn.Module),
        names=list(names),
    )
    objects.check(what, given)
    return cast("T", given)


def prior_for(given: Any) -> Prior:
    """Return the prior, or the isotropic one with this precision; raise for anything else."""
    if isinstance(given, Prior):
        return given
    number = lambda v: not callable(v) and torch.as_tensor(v, dtype=torch.float64).ndim == 0 and not isinstance(v, bool)
    Rule("a precision, or an object such as lw.per_layer()", number).check("prior", given)
    return Isotropic(given)
