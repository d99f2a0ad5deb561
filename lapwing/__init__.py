"""Lapwing turns a trained PyTorch network into one with calibrated error bars."""

from lapwing.api import Fitted, Trained, fit, load, train
from lapwing.check import check
from lapwing.choice import Auto
from lapwing.compare import compare
from lapwing.core.errors import DataError, FileError, LapwingError, ModelError, NumericalError, UnsupportedError
from lapwing.core.gaussian import FunctionGaussian
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian
from lapwing.likelihoods.poisson import Poisson
from lapwing.linalg.design import OperatorDesign
from lapwing.linear import LinearPosterior, fit_linear
from lapwing.methods.diagonal import Diagonal
from lapwing.methods.dropout import MCDropout
from lapwing.methods.ekron import EKron
from lapwing.methods.ella import ELLA
from lapwing.methods.ensemble import Ensemble
from lapwing.methods.fmgp import FMGP
from lapwing.methods.full import Full
from lapwing.methods.hfl import HFL
from lapwing.methods.kernel_space import KernelSpace
from lapwing.methods.kron import Kron
from lapwing.methods.low_rank import LowRank
from lapwing.methods.map_only import MapOnly
from lapwing.methods.sampled import Sampled
from lapwing.methods.swag import SWAG
from lapwing.methods.valla import VaLLA
from lapwing.networks.selection import all_weights, last_layer, named, subnetwork
from lapwing.posteriors.density import DensityLaplace, laplace_density
from lapwing.posteriors.effective import EffectiveParameters
from lapwing.posteriors.trace import DivergedError, Step, Trace
from lapwing.priors.gaussian import diagonal, g_prior, grouped, isotropic, per_layer, per_normalised_group
from lapwing.training.loop import Epoch, State
from lapwing.training.recipe import Recipe, classic, online
from lapwing.tuning.ascent import Ascend
from lapwing.tuning.bound import MaximiseBound, evidence_bound, maximise_bound
from lapwing.tuning.em import SampleEM, sample_em
from lapwing.tuning.evidence import MaximiseEvidence, maximise_evidence
from lapwing.tuning.fixed_point import FixedPoint, fixed_point
from lapwing.tuning.held_out import CrossValidated, Grid, Temperature, cross_validated, grid, temperature
from lapwing.tuning.linear_mode import LinearMode, linear_mode

__version__ = "0.1.0"

__all__ = [
    "fit", "train", "fit_linear", "load", "check", "compare", "Fitted", "FunctionGaussian", "laplace_density",
    "Gaussian", "Categorical", "Bernoulli", "Poisson", "HeteroscedasticGaussian",
    "Full", "Diagonal", "Kron", "EKron", "LowRank", "KernelSpace", "Sampled", "MapOnly", "Auto",
    "ELLA", "VaLLA", "FMGP", "HFL", "Ensemble", "MCDropout", "SWAG",
    "all_weights", "last_layer", "named", "subnetwork",
    "isotropic", "per_layer", "diagonal", "grouped", "per_normalised_group", "g_prior",
    "maximise_evidence", "MaximiseEvidence", "fixed_point", "FixedPoint", "linear_mode", "LinearMode",
    "grid", "Grid", "cross_validated", "CrossValidated", "temperature", "Temperature",
    "LinearPosterior", "OperatorDesign",
    "Ascend", "maximise_bound", "MaximiseBound", "evidence_bound", "sample_em", "SampleEM",
    "online", "classic", "Recipe", "Trained", "Epoch", "State",
    "EffectiveParameters", "DensityLaplace", "Trace", "Step", "DivergedError",
    "LapwingError", "DataError", "ModelError", "NumericalError", "FileError", "UnsupportedError",
]  # fmt: skip
