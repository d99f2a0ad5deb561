"""Lapwing turns a trained PyTorch network into one with error bars, fitted to held-out data.

The names below are for everyday use. The rest is in namespaces: ``tuners``, ``priors``, ``baselines``, ``recipes``,
``metrics``, ``plots``, ``linear``, ``inverse``, ``subnetworks``, ``samples``, ``memory`` and ``errors``.
"""

from lapwing import (
    baselines,
    errors,
    inverse,
    linear,
    memory,
    metrics,
    plots,
    priors,
    recipes,
    samples,
    subnetworks,
    tuners,
)
from lapwing.api import fit, load, train
from lapwing.check import check
from lapwing.compare import compare, evaluate
from lapwing.crossfit import crossfit, sibling
from lapwing.ensembles import train_ensemble
from lapwing.errors import LapwingError
from lapwing.fitted import Fitted
from lapwing.likelihoods.labels import Bernoulli, Categorical
from lapwing.likelihoods.numbers import Gaussian, HeteroscedasticGaussian, Poisson
from lapwing.methods.fmgp import FMGP
from lapwing.methods.hfl import HFL
from lapwing.methods.inducing_points import ELLA
from lapwing.methods.sampled import Sampled
from lapwing.methods.valla import VaLLA
from lapwing.methods.weight_space import Diagonal, EKron, Full, KernelSpace, Kron, LowRank
from lapwing.networks.selection import all_weights, last_layer, named, subnetwork
from lapwing.priors import grouped, isotropic, per_layer
from lapwing.registry import Auto
from lapwing.values.gaussian import FunctionGaussian

__version__ = "0.3.0"

__all__ = [
    "fit", "crossfit", "sibling", "train", "train_ensemble", "load", "check", "compare", "evaluate", "Fitted",
    "FunctionGaussian", "LapwingError",
    "Gaussian", "Categorical", "Bernoulli", "Poisson", "HeteroscedasticGaussian",
    "Full", "Diagonal", "Kron", "EKron", "LowRank", "KernelSpace", "Sampled", "ELLA", "VaLLA", "HFL", "FMGP", "Auto",
    "all_weights", "last_layer", "named", "subnetwork", "isotropic", "per_layer", "grouped",
    "tuners", "priors", "baselines", "recipes", "metrics", "plots", "linear", "inverse", "subnetworks", "samples",
    "memory", "errors",
]  # fmt: skip
