"""The arguments of laplace-torch's constructor, and the native method, weights, likelihood and prior that they mean."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lapwing.compat.names import FunctionalApproximation, HessianStructure, Likelihood, SubsetOfWeights, option
from lapwing.core.settings import FLAG, NONE, POSITIVE, Rule, integer, is_real, nearest, require
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.methods.diagonal import Diagonal
from lapwing.methods.full import Full
from lapwing.methods.inducing.ella import ELLA
from lapwing.methods.inducing.valla import VaLLA
from lapwing.methods.kernel_space import KernelSpace
from lapwing.methods.kron import Kron
from lapwing.methods.low_rank import LowRank
from lapwing.networks.last_layer import last_layer
from lapwing.networks.selection import Selection, Weights, all_weights, named, subnetwork
from lapwing.priors.bound import Prior
from lapwing.priors.given import diagonal, isotropic

NUMBER_OR_TENSOR = Rule("a number or a tensor", lambda v: is_real(v) or isinstance(v, Tensor))
NOT_USED = Rule("None: Lapwing has no such setting", lambda v: v is None)
CURVATURES = {"ggn": "ggn", "ef": "empirical", "hessian": "hessian"}  # by the end of the name of a backend


@dataclass(frozen=True, eq=False)
class Settings:
    """Everything that laplace-torch's constructor takes besides model, likelihood, weights and structure."""

    sigma_noise: Any = 1.0
    prior_precision: Any = 1.0
    prior_mean: Any = 0.0
    temperature: Any = 1.0
    enable_backprop: bool = False
    dict_key_x: str = "input_ids"
    dict_key_y: str = "labels"
    backend: Any = None
    backend_kwargs: Any = None
    asdl_fisher_kwargs: Any = None
    feature_reduction: Any = None
    last_layer_name: str | None = None
    damping: bool = False
    subnetwork_indices: Tensor | None = None
    functional_approximation: Any = "sod"
    n_subset: int | None = None
    independent_outputs: bool = False
    seed: int = 0
    subsample_size: int | None = None
    n_eigenvalues: int | None = None
    inducing_locations: Any = "kmeans"
    num_inducing: int | None = None
    alpha: float = 1.0

    @classmethod
    def given(cls, arguments: dict[str, Any]) -> Settings:
        """Return the settings with these arguments; raise for names that laplace-torch does not have either."""
        names = [field.name for field in fields(cls)]
        for name in arguments:
            if name not in names:
                raise UnsupportedError(f"Laplace() has no argument {name!r}.{nearest(name, names)}")
        return cls(**arguments)

    def __post_init__(self) -> None:
        require(
            self, sigma_noise=NUMBER_OR_TENSOR, prior_precision=NUMBER_OR_TENSOR, prior_mean=NUMBER_OR_TENSOR,
            temperature=POSITIVE, enable_backprop=FLAG, damping=FLAG, asdl_fisher_kwargs=NOT_USED,
            feature_reduction=NOT_USED, n_subset=integer(1) | NONE, num_inducing=integer(1) | NONE,
            subsample_size=integer(1) | NONE, n_eigenvalues=integer(1) | NONE,
        )  # fmt: skip
        if self.damping:
            raise UnsupportedError(
                "damping is True; expected False. In laplace-torch 0.3 it has no effect; the prior precision is the "
                "damping of a Laplace posterior."
            )
        if self.independent_outputs:
            raise UnsupportedError("independent_outputs is True; expected False: the kernel has all outputs.")

    @property
    def learns_prior(self) -> bool:
        """Whether ``fit`` learns prior precision and noise: for variational inducing points."""
        return (
            option("functional_approximation", self.functional_approximation, FunctionalApproximation) == "variational"
        )

    @property
    def curvature(self) -> str:
        """The curvature that a backend of laplace-torch computes, by the name of its class; the GGN without one."""
        name = "GGN" if self.backend is None else getattr(self.backend, "__name__", str(self.backend))
        for ending, curvature in CURVATURES.items():
            if name.lower().endswith(ending):
                stochastic = bool((self.backend_kwargs or {}).get("stochastic", False))
                return "fisher_mc" if stochastic and curvature == "ggn" else curvature
        raise UnsupportedError(
            f"backend is {name}; expected None, or a class whose name ends in GGN, EF or Hessian: Lapwing computes "
            "all curvatures itself, and only their kind is taken from the backend."
        )


def method_of(structure: str, weights: str, settings: Settings) -> Any:
    """Return the native method for a structure; raise for a combination that does not exist."""
    structure = option("hessian_structure", structure, HessianStructure)
    if weights == SubsetOfWeights.SUBNETWORK.value and structure not in ("full", "diag"):
        raise UnsupportedError(f"hessian_structure is {structure!r} for a subnetwork; expected 'full' or 'diag'.")
    if structure == "gp":
        return _in_function_space(settings)
    methods: dict[str, Any] = {"full": Full, "kron": Kron, "diag": Diagonal, "lowrank": LowRank}
    return methods[structure](curvature=settings.curvature)


def _in_function_space(settings: Settings) -> Any:
    """Return the native method for the structure "gp"."""
    kind = option("functional_approximation", settings.functional_approximation, FunctionalApproximation)
    if kind == "sod":
        return KernelSpace()
    if kind == "nystrom":
        if settings.subsample_size is None or settings.n_eigenvalues is None:
            raise UnsupportedError("subsample_size or n_eigenvalues is missing; expected both for 'nystrom'.")
        return ELLA(num_landmarks=settings.subsample_size, rank=settings.n_eigenvalues)
    Rule(
        "'random' or 'kmeans'; give inputs of your own with the native lw.VaLLA()", lambda v: v in ("random", "kmeans")
    ).check("inducing_locations", settings.inducing_locations)
    if settings.num_inducing is None:
        raise UnsupportedError("num_inducing is missing; expected the number of inducing points for 'variational'.")
    return VaLLA(settings.num_inducing, alpha=settings.alpha, start=settings.inducing_locations)


def weights_of(subset: str, settings: Settings) -> Weights:
    """Return the native rule for the weights."""
    if subset == "subnetwork":
        if settings.subnetwork_indices is None:
            raise UnsupportedError("subnetwork_indices is missing; expected the positions of weights for a subnetwork.")
        return subnetwork(settings.subnetwork_indices)
    if subset == "all":
        return all_weights
    name = settings.last_layer_name
    return last_layer if name is None else named(rf"^{re.escape(name)}\.")


def likelihood_of(name: str, dispersion: Tensor) -> Any:
    """Return the native likelihood with σ² T, or T, as its dispersion."""
    if name == Likelihood.REWARD_MODELING.value:
        raise UnsupportedError(
            "likelihood is 'reward_modeling'; expected 'classification' or 'regression'. Fit a model of the difference "
            'of two rewards with lw.fit(model, data, "binary").'
        )
    if name == "regression":
        return Gaussian(noise_std=1.0).with_dispersion(dispersion)
    return Categorical(link="probit", temperature=dispersion)


def prior_of(precision: Tensor, mean: Any, selection: Selection) -> Prior:
    """Return the native prior: one precision, one for each parameter tensor, or one for each weight."""
    if precision.numel() == 1:
        return isotropic(precision.reshape(()), mean)
    if precision.numel() == len(selection.names) != selection.size and selection.index is None:
        precision = precision.repeat_interleave(torch.tensor(selection.sizes, device=precision.device))
    return diagonal(precision, mean)
