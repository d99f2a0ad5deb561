"""The names of laplace-torch's options. They are strings, and plain strings are accepted wherever they are."""

from __future__ import annotations

from enum import Enum
from typing import Any

from lapwing.core.settings import one_of


class SubsetOfWeights(str, Enum):
    """Which weights are uncertain."""

    ALL = "all"
    LAST_LAYER = "last_layer"
    SUBNETWORK = "subnetwork"


class HessianStructure(str, Enum):
    """The structure of the curvature."""

    FULL = "full"
    KRON = "kron"
    DIAG = "diag"
    LOWRANK = "lowrank"
    GP = "gp"


class FunctionalApproximation(str, Enum):
    """How the posterior is computed in function space, for the structure "gp"."""

    SOD = "sod"
    NYSTROM = "nystrom"
    VARIATIONAL = "variational"


class Likelihood(str, Enum):
    """How targets depend on outputs."""

    REGRESSION = "regression"
    CLASSIFICATION = "classification"
    REWARD_MODELING = "reward_modeling"


class PredType(str, Enum):
    """The tangent model ("glm", and "gp" for it) or the network with sampled weights ("nn")."""

    GLM = "glm"
    NN = "nn"
    GP = "gp"


class LinkApprox(str, Enum):
    """How Gaussian logits become probabilities."""

    MC = "mc"
    PROBIT = "probit"
    BRIDGE = "bridge"
    BRIDGE_NORM = "bridge_norm"


class TuningMethod(str, Enum):
    """How the prior precision is chosen."""

    MARGLIK = "marglik"
    GRIDSEARCH = "gridsearch"


class PriorStructure(str, Enum):
    """How many precisions are learned: one, one for each parameter tensor, or one for each weight."""

    SCALAR = "scalar"
    DIAG = "diag"
    LAYERWISE = "layerwise"


def option(name: str, value: Any, options: type[Enum]) -> str:
    """Return the option as a plain string; raise unless it is one of the options of this kind.

    >>> option("pred_type", PredType.GLM, PredType), option("pred_type", "nn", PredType)
    ('glm', 'nn')
    """
    text = getattr(value, "value", value)
    one_of([each.value for each in options]).check(name, text)
    return str(text)
