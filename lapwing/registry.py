"""Names such as "full" or "regression", and the objects that they stand for. Only the front door uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lapwing.errors import UnsupportedError
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian
from lapwing.likelihoods.poisson import Poisson
from lapwing.likelihoods.protocol import Likelihood
from lapwing.methods.diagonal import Diagonal
from lapwing.methods.dropout import MCDropout
from lapwing.methods.ekron import EKron
from lapwing.methods.ensemble import Ensemble
from lapwing.methods.fmgp.fmgp import FMGP
from lapwing.methods.full import Full
from lapwing.methods.hfl.hfl import HFL
from lapwing.methods.inducing.ella import ELLA
from lapwing.methods.inducing.valla import VaLLA
from lapwing.methods.kernel_space import KernelSpace
from lapwing.methods.kron import Kron
from lapwing.methods.low_rank import LowRank
from lapwing.methods.map_only import MapOnly
from lapwing.methods.protocol import Method
from lapwing.methods.sampled import Sampled
from lapwing.methods.swag import SWAG
from lapwing.networks.last_layer import last_layer
from lapwing.networks.selection import Weights, all_weights

METHODS = {
    "full": Full, "diagonal": Diagonal, "kron": Kron, "ekron": EKron, "low_rank": LowRank, "map_only": MapOnly,
    "kernel_space": KernelSpace, "sampled": Sampled, "ella": ELLA, "valla": VaLLA, "fmgp": FMGP, "hfl": HFL,
    "ensemble": Ensemble, "dropout": MCDropout, "swag": SWAG,
}  # fmt: skip
LIKELIHOODS = {
    "classification": Categorical, "categorical": Categorical, "regression": Gaussian, "gaussian": Gaussian,
    "binary": Bernoulli, "bernoulli": Bernoulli, "multilabel": Bernoulli, "poisson": Poisson, "counts": Poisson,
    "heteroscedastic": HeteroscedasticGaussian,
}  # fmt: skip
WEIGHTS = {"all": all_weights, "all_weights": all_weights, "last_layer": last_layer}


def likelihood_named(name: str | Likelihood, outputs: int) -> Likelihood:
    """Return the likelihood, or the one that a name stands for; "classification" with one output is Bernoulli."""
    if not isinstance(name, str):
        return _instance(name, "likelihood")
    if name == "classification" and outputs == 1:
        return Bernoulli()
    likelihood: Likelihood = _looked_up(name, LIKELIHOODS, "likelihood")()
    return likelihood


def method_named(name: str | Method | None) -> Method:
    """Return the method, or the one that a name stands for, with its default settings; ``Kron()`` if None."""
    if name is None:
        return Kron()
    if not isinstance(name, str):
        return _instance(name, "method")
    method: Method = _looked_up(name, METHODS, "method", "auto")()
    return method


def weights_named(name: str | Weights | None) -> Weights:
    """Return the rule that selects weights, or the one that a name stands for; ``all_weights`` if None."""
    if name is None:
        return all_weights
    return _looked_up(name, WEIGHTS, "weights") if isinstance(name, str) else name


def _instance(given: Any, what: str) -> Any:
    """Return the object; raise if it is a class."""
    if isinstance(given, type):
        raise UnsupportedError(f"{what} is the class {given.__name__}; expected an object: {given.__name__}().")
    return given


def _looked_up(name: str, table: Mapping[str, Any], what: str, *more: str) -> Any:
    """Return the entry of this name; raise if there is none. ``more`` are further names that the caller accepts."""
    if name not in table:
        raise UnsupportedError(f"{what} is {name!r}; expected one of {', '.join([*table, *more])}, or an object.")
    return table[name]
