"""Lapwing turns a trained PyTorch network into one with calibrated error bars."""

from lapwing.api import Fitted, fit, load
from lapwing.check import check
from lapwing.core.errors import DataError, FileError, LapwingError, ModelError, NumericalError, UnsupportedError
from lapwing.core.gaussian import FunctionGaussian
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian
from lapwing.likelihoods.poisson import Poisson
from lapwing.methods.diagonal import Diagonal
from lapwing.methods.ekron import EKron
from lapwing.methods.full import Full
from lapwing.methods.kron import Kron
from lapwing.methods.low_rank import LowRank
from lapwing.methods.map_only import MapOnly
from lapwing.networks.selection import all_weights, last_layer, named, subnetwork
from lapwing.priors.gaussian import diagonal, isotropic, per_layer
from lapwing.tuning.evidence import MaximiseEvidence, maximise_evidence

__version__ = "0.1.0"

__all__ = [
    "fit", "load", "check", "Fitted", "FunctionGaussian",
    "Gaussian", "Categorical", "Bernoulli", "Poisson", "HeteroscedasticGaussian",
    "Full", "Diagonal", "Kron", "EKron", "LowRank", "MapOnly",
    "all_weights", "last_layer", "named", "subnetwork",
    "isotropic", "per_layer", "diagonal",
    "maximise_evidence", "MaximiseEvidence",
    "LapwingError", "DataError", "ModelError", "NumericalError", "FileError", "UnsupportedError",
]  # fmt: skip
