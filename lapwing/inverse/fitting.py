"""The front door of inverse problems: ``lw.inverse.fit``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.core.inputs import Inputs, refuse_meta
from lapwing.core.memory import budget, refuse_beyond
from lapwing.core.progress import shows_inner_progress
from lapwing.core.random import independent_generator
from lapwing.core.settings import GENERATOR, NUMBER, Rule, one_of
from lapwing.errors import DataError
from lapwing.inverse.classes import ClassMatrices
from lapwing.inverse.observation import LinearOperator, Observation
from lapwing.inverse.posterior import InversePosterior
from lapwing.inverse.problem import InverseProblem, bound_prior
from lapwing.inverse.tangent import Tangent
from lapwing.networks.forward import outside_autocast
from lapwing.networks.selection import Weights
from lapwing.priors.bound import Prior
from lapwing.priors.filter_gp import BoundFilterGP, filter_gp
from lapwing.priors.structured import ClassCovariance
from lapwing.tuners.protocol import Tuner, checked_tuner

SOLVERS = ("auto", "exact", "cg")
DOUBLE = 2**28  # rows times weights up to which a float32 network is computed in float64
PIXELS = 4  # times the measurements: up to so many pixels the class matrices of the image are computed
ONE = {".*": "weights"}  # the blocks of the default prior; one for each layer has error bars that are too narrow
NOISE = Rule(
    "a positive number whose square is one too", lambda v: NUMBER.holds(v) and 1e-150 < float(v) < 1e150, DataError
)


@outside_autocast
@torch.inference_mode(False)
@shows_inner_progress
def fit(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    operator: Tensor | LinearOperator | None = None,
    *,
    prior: Prior | float | None = None,
    noise_std: float | None = None,
    weights: Weights | None = None,
    tuner: Tuner | None = None,
    solver: str = "auto",
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> InversePosterior:
    """Fit a posterior of the image f(x) from linear measurements y = A f(x) + noise. The model is not changed.

    The network, trained such that A f(x) is near y, is linearised in its weights: h(θ) = f(x) + J (θ - w̃). A Gaussian
    prior over θ and Gaussian noise then give a Gaussian belief about the image.

    Args:
        model: The trained network, in evaluation mode. Its output may have any shape (B, ...).
        x: Its input with a batch dimension, as the model takes it. The outputs of several inputs are flattened
            together.
        y: The measurements (dy,).
        operator: A, which acts on the flat output: a dense or sparse matrix (dy, dx), an object with ``rows``,
            ``size``, ``like``, ``forward`` and ``back`` such as ``lw.linear.OperatorDesign``, or None for the identity.
        prior: The prior over the weights: ``lw.priors.filter_gp()``, ``lw.isotropic()``, ``lw.per_layer()``,
            ``lw.grouped(...)``, or a number for an isotropic precision. Used as given, unless a tuner is given. None
            learns a ``filter_gp()`` with one variance and one length-scale for all weights.
        noise_std: The standard deviation σ of the noise, kept as given. None starts at the root mean square of
            y - A f(x); the tuner learns it.
        weights: Which weights are uncertain: ``lw.all_weights`` or ``lw.named(pattern)``. None takes the weights of
            convolution layers, without biases and norms, or all weights if there are no such layers.
        tuner: How hyperparameters are learned; see ``InversePosterior.tuned``. None learns those that were not given
            if the prior was not given.
        solver: "exact" stores the class matrices, classes times dy² numbers; "cg" uses products alone. "auto" takes
            "exact" if the class matrices fit the byte budget (``lw.memory``).
        generator: The source of randomness for "cg"; a fixed seed if None.
        progress: Whether to show progress bars (needs tqdm); None shows them on a terminal.

    Returns:
        The posterior: ``reconstruction``, ``std``, ``covariance()``, ``samples(n)``, ``log_evidence()``.

    Raises:
        DataError: If y, the operator or the noise is unusable, or their sizes do not match the output.
        ModelError: If the model is in training mode or has no weights of this kind.
        NumericalError: If ``back`` of the operator is not the transpose of ``forward``.
        UnsupportedError: If the prior's covariance is no sum of a few fixed matrices.
        DivergedError: If a hyperparameter has no optimum.

    >>> net = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 1, 3, padding=1))
    >>> z, blur = torch.linspace(-1, 1, 16).reshape(1, 1, 16), torch.ones(8, 16) / 16
    >>> posterior = fit(net, z, torch.zeros(8), blur, prior=filter_gp(), noise_std=0.1)
    >>> posterior.std.shape
    torch.Size([1, 16])
    """
    GENERATOR.check("generator", generator)
    one_of(SOLVERS).check("solver", solver)
    if noise_std is not None:
        NOISE.check("noise_std", noise_std)
    if tuner is not None:
        checked_tuner(tuner)
    tangent = _wide(Tangent.build(model, x, weights))
    bound = bound_prior(filter_gp(blocks=ONE) if prior is None else prior, tangent)
    observation = Observation.of(operator, tangent.size, tangent.f)
    measurements = _measurements(y, observation.rows, tangent.device)
    exact, image = _plan(solver, bound, observation, tangent)
    rows = tangent.size if image else observation.rows
    if tangent.dtype != torch.float64 and rows * tangent.selection.size <= DOUBLE:
        tangent = tangent.to(torch.float64)
        observation = Observation.of(operator, tangent.size, tangent.f)
    problem = InverseProblem.of(tangent, observation, bound, measurements)
    noise = _noise(noise_std, problem)
    if prior is None and isinstance(bound, BoundFilterGP):
        problem = replace(problem, prior=bound.started(problem.theta, observation.rows))
    classes = ClassMatrices.of(problem, image) if exact else None
    seed = independent_generator(generator).initial_seed() % 2**31
    posterior = InversePosterior(problem, noise, classes, noise_std is None, seed)
    return posterior.tuned(tuner) if tuner is not None or prior is None else posterior


def _wide(tangent: Tangent) -> Tangent:
    """Return the tangent model in float32 or float64: half precision has too few digits for covariances."""
    return tangent if tangent.dtype in (torch.float32, torch.float64) else tangent.to(torch.float32)


def _measurements(y: Any, rows: int, device: torch.device) -> Tensor:
    """Return y (dy,) in float64; raise unless it is a finite real vector of this length."""
    if not isinstance(y, Tensor):
        raise DataError(f"y is a {type(y).__name__}; expected a tensor ({rows},).")
    refuse_meta(y)
    if y.shape != (rows,):
        raise DataError(
            f"y has the shape {tuple(y.shape)}; expected ({rows},), one number for each row of the operator."
        )
    if y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"y is {y.dtype}; expected real numbers.")
    if not bool(torch.isfinite(y).all()):
        raise DataError("y holds NaN or infinity; expected finite numbers.")
    return y.detach().to(device, torch.float64)


def _plan(solver: str, prior: ClassCovariance, observation: Observation, tangent: Tangent) -> tuple[bool, bool]:
    """Return whether to store class matrices, and whether those of the image too."""
    count, rows, size, device = len(prior.class_blocks), observation.rows, tangent.size, tangent.device
    allowed, needed = budget(device), 8 * count * rows**2
    exact = solver == "exact" or (solver == "auto" and needed <= allowed)
    if exact:
        refuse_beyond(needed, device, f"{count} class matrices of {rows} measurements", 'Use solver="cg"')
    return exact, exact and 8 * count * size**2 <= allowed and size <= PIXELS * rows


def _noise(std: float | None, problem: InverseProblem) -> Tensor:
    """Return the noise variance: the given one, or the mean square of y - A f(x)."""
    if std is not None:
        return torch.tensor(float(std), dtype=torch.float64, device=problem.network.device).square()
    variance = problem.residual.square().mean()
    if not float(variance) > 1e-30:
        raise DataError(
            f"the network fits its {len(problem.residual)} measurements exactly, so residuals say nothing about the "
            "noise; expected residuals that are not zero. Give noise_std."
        )
    return variance
