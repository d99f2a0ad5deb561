"""The names and arguments of laplace-torch, what they mean natively, and its ways to choose a prior precision."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.errors import DataError, NumericalError, UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.labels import Categorical
from lapwing.likelihoods.numbers import Gaussian
from lapwing.methods.base import Method
from lapwing.methods.inducing_points import ELLA
from lapwing.methods.valla import VaLLA
from lapwing.methods.weight_space import Diagonal, Full, KernelSpace, Kron, LowRank
from lapwing.networks.forward import arithmetic_of
from lapwing.networks.selection import Selection, Weights, all_weights, last_layer, named, subnetwork
from lapwing.priors import DiagonalPrior, Isotropic, Prior
from lapwing.runtime.settings import DATA, FLAG, NONE, POSITIVE, HasSettings, Rule, integer, is_real, one_of, setting
from lapwing.runtime.threads import ProgressBar

if TYPE_CHECKING:
    from lapwing.compat.laplace import Laplace


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


class LikelihoodName(str, Enum):
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


def option(name: str, value: object, options: type[Enum]) -> str:
    """Return the option as a plain string; raise unless it is one of the options of this kind.

    >>> option("pred_type", PredType.GLM, PredType), option("pred_type", "nn", PredType)
    ('glm', 'nn')
    """
    among(options).check(name, value)
    return str(getattr(value, "value", value))


def among(options: type[Enum]) -> Rule:
    """Return the rule for one of the options of this kind, or its value."""
    return one_of([each.value for each in options])


NUMBER_OR_TENSOR = Rule("a number or a tensor", lambda v: is_real(v) or isinstance(v, Tensor))
NOT_USED = Rule("None: Lapwing has no such setting", lambda v: v is None)
S = TypeVar("S", bound=HasSettings)
CURVATURES = {"ggn": "ggn", "ef": "empirical", "hessian": "hessian"}  # by the end of the name of a backend


def from_arguments(kind: type[S], call: str, arguments: Mapping[str, Any]) -> S:
    """Return settings of this kind with the arguments of a call; raise for names that laplace-torch does not have."""
    names = one_of([field.name for field in fields(kind)])  # type: ignore[arg-type]
    for name in arguments:
        names.check(f"the name of an argument of {call}()", name)
    return kind(**arguments)


@dataclass(frozen=True, eq=False)
class Settings(HasSettings):
    """Everything that laplace-torch's constructor takes besides model, likelihood, weights and structure."""

    sigma_noise: float | Tensor = setting(1.0, NUMBER_OR_TENSOR)
    prior_precision: float | Tensor = setting(1.0, NUMBER_OR_TENSOR)
    prior_mean: float | Tensor = setting(0.0, NUMBER_OR_TENSOR)
    temperature: float = setting(1.0, POSITIVE)
    enable_backprop: bool = setting(False, FLAG)
    dict_key_x: str = "input_ids"
    dict_key_y: str = "labels"
    backend: type | None = None
    backend_kwargs: Mapping[str, object] | None = None
    asdl_fisher_kwargs: None = setting(None, NOT_USED)
    feature_reduction: None = setting(None, NOT_USED)
    last_layer_name: str | None = None
    damping: bool = setting(False, FLAG)
    subnetwork_indices: Tensor | None = None
    functional_approximation: FunctionalApproximation | str = setting("sod", among(FunctionalApproximation))
    n_subset: int | None = setting(None, integer() | NONE)
    independent_outputs: bool = False
    seed: int = 0
    subsample_size: int | None = setting(None, integer() | NONE)
    n_eigenvalues: int | None = setting(None, integer() | NONE)
    inducing_locations: str = "kmeans"
    num_inducing: int | None = setting(None, integer() | NONE)
    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.damping:
            raise UnsupportedError(
                "damping is True; expected False. In laplace-torch 0.3 it has no effect; the prior precision is the "
                "damping of a Laplace posterior."
            )
        if self.independent_outputs:
            raise UnsupportedError("independent_outputs is True; expected False: the kernel has all outputs.")

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


def method_of(structure: str, weights: str, settings: Settings) -> Method:
    """Return the native method for a structure; raise for a combination that does not exist."""
    structure = option("hessian_structure", structure, HessianStructure)
    if weights == SubsetOfWeights.SUBNETWORK.value and structure not in ("full", "diag"):
        raise UnsupportedError(f"hessian_structure is {structure!r} for a subnetwork; expected 'full' or 'diag'.")
    if structure == "gp":
        return _in_function_space(settings)
    methods: dict[str, Callable[..., Method]] = {"full": Full, "kron": Kron, "diag": Diagonal, "lowrank": LowRank}
    return methods[structure](curvature=settings.curvature)


def _in_function_space(settings: Settings) -> Method:
    """Return the native method for the structure "gp"."""
    if settings.functional_approximation == "sod":
        return KernelSpace()
    if settings.functional_approximation == "nystrom":
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


def likelihood_of(name: str, dispersion: Tensor) -> Likelihood:
    """Return the native likelihood with σ² T, or T, as its dispersion."""
    if name == LikelihoodName.REWARD_MODELING.value:
        raise UnsupportedError(
            "likelihood is 'reward_modeling'; expected 'classification' or 'regression'. Fit a model of the difference "
            'of two rewards with lw.fit(model, data, "binary").'
        )
    if name == "regression":
        return Gaussian(noise_std=1.0).with_dispersion(dispersion)
    return Categorical(link="probit", temperature=dispersion)


def prior_of(precision: Tensor, mean: float | Tensor, selection: Selection) -> Prior:
    """Return the native prior: one precision, one for each parameter tensor, or one for each weight."""
    if precision.numel() == 1:
        return Isotropic(precision.reshape(()), mean)
    if precision.numel() == len(selection.names) != selection.size and selection.index is None:
        precision = precision.repeat_interleave(torch.tensor(selection.sizes, device=precision.device))
    return DiagonalPrior(precision, mean)


NUMBER = Rule("a finite number", lambda v: is_real(v) and math.isfinite(v))

LOSS = Rule(
    "a function, a metric with update() and compute(), or None",
    lambda v: v is None or callable(v) or (hasattr(v, "update") and hasattr(v, "compute")),
)


@dataclass(frozen=True, eq=False)
class SearchOptions(HasSettings):
    """The arguments of ``optimize_prior_precision`` besides ``pred_type`` and ``method``."""

    n_steps: int = setting(100, integer())
    lr: float = setting(1e-1, POSITIVE)
    init_prior_prec: float | Tensor = 1.0
    prior_structure: PriorStructure | str = setting("scalar", among(PriorStructure))
    val_loader: Any = setting(None, DATA | NONE)
    loss: Any = setting(None, LOSS)
    log_prior_prec_min: float = setting(-4, NUMBER)
    log_prior_prec_max: float = setting(4, NUMBER)
    grid_size: int = setting(100, integer())
    link_approx: LinkApprox | str = setting("probit", among(LinkApprox))
    n_samples: int = setting(100, integer())
    verbose: bool = False
    progress_bar: bool = setting(False, FLAG)
    log_prior_prec_base: float = setting(10.0, POSITIVE)

    @property
    def grid(self) -> Tensor:
        """The precisions of the grid search."""
        low, high = self.log_prior_prec_min, self.log_prior_prec_max
        return torch.logspace(low, high, self.grid_size, base=self.log_prior_prec_base, dtype=torch.float64)


def optimise_prior(la: Laplace, pred_type: str, method: TuningMethod | str, more: Mapping[str, Any]) -> Tensor:
    """Return the prior precision that a method of laplace-torch chooses; raise for arguments that do not exist."""
    search = from_arguments(SearchOptions, "optimize_prior_precision", more)
    if option("method", method, TuningMethod) == "marglik":
        return by_evidence(la, search)
    if search.val_loader is None:
        raise DataError("val_loader is None; expected held-out data for the method 'gridsearch'.")
    return by_grid(la, search, pred_type)


def by_evidence(la: Laplace, search: SearchOptions) -> Tensor:
    """Return the precision after ``n_steps`` steps of Adam on its logarithm, as laplace-torch takes them."""
    start = torch.as_tensor(search.init_prior_prec, dtype=torch.float64).reshape(-1)
    sizes = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}
    structure = option("prior_structure", search.prior_structure, PriorStructure)
    start = start.repeat(sizes[structure]) if len(start) == 1 else start
    logs = start.to(la.mean.device).log().requires_grad_()
    optimiser = torch.optim.Adam([logs], search.lr)
    with torch.enable_grad():
        for _ in ProgressBar(range(search.n_steps), "marginal likelihood", search.progress_bar):
            optimiser.zero_grad()
            (-la.log_marginal_likelihood(prior_precision=logs.exp())).backward()
            optimiser.step()
    return logs.detach().exp()


def by_grid(la: Laplace, search: SearchOptions, pred_type: str) -> Tensor:
    """Return the precision of the grid with the lowest loss on the held-out data; the first of equal ones."""
    before, losses = la.prior_precision, []
    link = "mc" if pred_type == "nn" else search.link_approx
    dtype = arithmetic_of(la.model)
    source = Data(search.val_loader, la.mean.device, la.target_key, name="val_loader", dtype=dtype)
    batches = list(source.batches(""))
    try:
        for precision in ProgressBar(search.grid, "grid search", search.progress_bar):
            la.prior_precision = precision
            call = lambda x: la(x, pred_type=pred_type, link_approx=link, n_samples=search.n_samples)
            try:
                losses.append(_loss(la, search.loss, [(call(b.inputs), b.targets) for b in batches]))
            except NumericalError:  # a precision at which Λ cannot be factorised
                losses.append(math.inf)
    finally:
        la.prior_precision = before
    best = min(range(len(losses)), key=lambda i: math.inf if math.isnan(losses[i]) else losses[i])
    return search.grid[best]


def _loss(la: Laplace, loss: Any, pairs: list[tuple[Tensor | tuple[Tensor, ...], Tensor]]) -> float:
    """Return the loss of predictions, given as laplace-torch gives them to a loss or to a metric of torchmetrics."""
    outputs = [output if isinstance(output, tuple) else (output,) for output, _ in pairs]
    parts = [torch.cat(part) for part in zip(*outputs, strict=True)]
    targets = torch.cat([y for _, y in pairs])
    if loss is None:
        return _negative_log_likelihood(la, parts, targets)
    if hasattr(loss, "update") and hasattr(loss, "compute"):
        loss.reset()
        try:
            loss.update(*parts, targets)
        except TypeError:  # a metric of the means alone
            loss.update(parts[0], targets)
        return float(loss.compute().sum())
    return float(loss(*parts, targets))


def _negative_log_likelihood(la: Laplace, parts: list[Tensor], targets: Tensor) -> float:
    """Return the mean of minus the log-density of the targets: with the noise, which laplace-torch leaves out."""
    if len(parts) == 1:
        return float(-parts[0].gather(-1, targets.long().reshape(-1, 1)).log().mean())
    mean, variance = parts
    variance = variance.diagonal(dim1=-2, dim2=-1) if variance.ndim == 3 else variance
    total = variance + la.sigma_noise.detach().square()
    return float((0.5 * ((targets - mean).square() / total + (2 * math.pi * total).log())).sum(-1).mean())
