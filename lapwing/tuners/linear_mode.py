"""The corrected evidence: evaluated at the optimum of the tangent model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.settings import require_integer, require_positive
from lapwing.core.trace import Step, Trace
from lapwing.curvature.protocols import Preconditions
from lapwing.errors import DivergedError, UnsupportedError
from lapwing.linalg.operators import Product
from lapwing.methods.protocol import Method
from lapwing.posteriors.weight_space import Mode, WeightPosterior
from lapwing.priors.bound import group_starting_precisions
from lapwing.tangent.model import TangentModel, tangent_model
from lapwing.tuners.mode_solver import ModeSolver
from lapwing.tuners.protocol import required_data
from lapwing.tuners.search import Coordinates, minimise, refuse_not_finite

MEANS = ("network", "tangent")
# Precisions in units of the typical curvature of their group: below, the prior has no effect; above, the weights.
RANGE = (1e-12, 1e5)
PRUNED = 1e3  # in the same units: above it the trace says that the group is not used
LARGEST_SLOPE = 1e-3  # per weight; above it the search has not converged


@dataclass(frozen=True, eq=False)
class LinearMode:
    r"""A tuner that maximises the evidence at θ*, the optimum of the tangent model's regularised loss.

    $$ \theta_* = \arg\min_\theta \tfrac1\phi \sum_n \mathrm{loss}(h(\theta, x_n), y_n)
       + \tfrac12 \|\theta - \mu\|_A^2, \qquad h(\theta, x) = f(x) + J(x)(\theta - \tilde w) $$

    (Antorán et al. 2022.) The evidence assumes an optimum, and training rarely stops at one: the size of w̃ then says
    nothing about the prior. θ* is an optimum by construction; w̃ stays the point of linearisation. Every evaluation
    of the evidence solves for θ* again (Newton with conjugate gradients; one solve for a Gaussian likelihood), so
    that the result is stationary in θ and in the precisions together.

    There may be several such points. The search starts group by group from the sizes of weights and curvature, not
    from the given precisions, so that rescaling a group whose scale the network ignores does not change the
    predictions. If the tangent model is better without a group, its precision grows until the group has no effect,
    and the trace says so.

    Cost: passes over the data; about ten evaluations of a few Newton steps of a few products each.

    Args:
        data: The training data; None takes those of ``fit(..., tuner=LinearMode())``.
        mean: "network" keeps f(w̃, x) as the predictive mean and the noise at the residual of w̃; "tangent" takes
            both from θ*: the mean is h(θ*, x), and the noise is learned. (A mix of the two would have too narrow
            error bars.)
        refit: A method, such as ``Full()``, that computes the curvature again at θ*; None keeps the curvature at w̃,
            which is exact for regression.
        rounds: How often to tune with ``refit``, with the curvature computed again in between.
        max_steps: The largest number of L-BFGS steps in a round.
        tolerance: Stop when the slope is below this number times the number of weights.
        solver_tolerance: Nats that the solve for θ* may miss.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, there are no data or no weight posterior.
        DivergedError: When called, if the evidence has no optimum in range or was not maximised.
        NumericalError: When called, if θ* cannot be computed.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", tuner=lw.tuners.LinearMode())
    >>> posterior.trace.tuner
    'LinearMode'
    """

    data: Iterable[Any] | Data | None = None
    mean: str = "network"
    refit: Method | None = None
    rounds: int = 3
    max_steps: int = 40
    tolerance: float = 1e-5
    solver_tolerance: float = 1e-8

    def __post_init__(self) -> None:
        if self.mean not in MEANS:
            raise UnsupportedError(f"mean is {self.mean!r}; expected one of {', '.join(MEANS)}.")
        require_integer("rounds", self.rounds)
        require_integer("max_steps", self.max_steps)
        require_positive("tolerance", self.tolerance)
        require_positive("solver_tolerance", self.solver_tolerance)

    def with_data(self, data: Data) -> LinearMode:
        """Return the tuner with these data, or unchanged if it has data."""
        return self if self.data is not None else replace(self, data=data)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior at the optimum of the corrected evidence."""
        if not isinstance(posterior, WeightPosterior):
            raise UnsupportedError(f"{type(posterior).__name__} has no weights to optimise; use a method that has.")
        network = posterior.problem.network
        data = required_data("LinearMode", self.data, network.device)
        base = network.shifted(None).theta().double()
        model = tangent_model(network.shifted(None), posterior.problem.likelihood, data)
        current, steps = posterior if posterior.mode is not None else _at_start(posterior), []
        for number in range(1 if self.refit is None else self.rounds):
            if number:
                current = self._refitted(current, base, data)
            current, more = self._tuned(current, model, base)
            steps += more
        return self._centred(current, base).with_trace(_trace(steps, _pruned(current)))

    def _tuned(self, posterior: WeightPosterior, model: TangentModel, base: Tensor) -> tuple[Any, list[Step]]:
        """Maximise the evidence by L-BFGS, with θ* solved for at every point.

        θ* is the optimum of the fit plus the penalty, so the slope of the whole equals the slope at fixed θ*.
        """
        theta = base if posterior.mode is None else posterior.mode.theta
        coordinates = Coordinates.of(replace(posterior, mode=Mode(theta, 0.0)), self.mean == "tangent")
        steps: list[Step] = []
        n_weights = max(coordinates.n_weights, 1)
        # The slope at fixed θ is wrong by the square root of what θ can still gain.
        solver = ModeSolver(model, base, min(self.solver_tolerance, (0.1 * self.tolerance * n_weights) ** 2))
        limits = Limits(_typical(posterior).log(), coordinates.start[coordinates.n_precisions :])

        def objective(x: Tensor) -> Tensor:
            nonlocal theta
            low, high = limits(x)
            below = (low - x).clamp_min(0).sum()  # a slope that sends the search back into range
            x = x.clamp(low, high)
            mode = _solved(solver, coordinates.at(x.detach()), theta)
            theta = mode.theta
            value: Tensor = replace(coordinates.at(x), mode=mode).log_evidence()
            steps.append(coordinates.step(x, float(value.detach())))
            refuse_not_finite(coordinates, steps, "LinearMode")
            return below - value / n_weights

        best, slope = minimise(objective, coordinates.start, self.max_steps, self.tolerance)
        low, high = limits(best)
        if bool((best < low + 0.1).any()):
            _refuse(
                coordinates,
                steps,
                f"LinearMode: a precision or the noise fell out of range ({steps[-1]}), where rounding would decide; "
                "a noise far below the residuals, or none at all, does that. Give the prior, or another noise.",
            )
        if slope > max(LARGEST_SLOPE, 10 * self.tolerance):
            _refuse(
                coordinates,
                steps,
                f"LinearMode: {self.max_steps} steps left a slope of {slope:.3g} per weight in the log evidence; "
                "expected below 1e-3. Raise max_steps, or tighten solver_tolerance.",
            )
        optimum = coordinates.at(best.minimum(high))
        return replace(optimum, mode=_solved(solver, optimum, theta)), steps

    def _refitted(self, posterior: WeightPosterior, base: Tensor, data: Data) -> WeightPosterior:
        """Return the posterior with the curvature at θ*, in the structure of ``refit``."""
        assert self.refit is not None
        assert posterior.mode is not None
        problem = posterior.problem
        shifted = replace(problem, network=problem.network.shifted(posterior.mode.theta - base))
        fitted = self.refit.fit(shifted, data)
        if not isinstance(fitted, WeightPosterior):
            raise UnsupportedError(f"refit={self.refit!r} gives no curvature; expected Full(), Kron() or the like.")
        return replace(posterior, curvature=fitted.curvature)

    def _centred(self, posterior: WeightPosterior, base: Tensor) -> WeightPosterior:
        """Return the posterior with the predictive mean that ``mean`` asks for."""
        network, mode = posterior.problem.network, posterior.mode
        assert mode is not None
        if self.mean == "network":
            problem = replace(posterior.problem, network=network.shifted(None))
            return replace(posterior, problem=problem, theta=base.to(network.dtype))
        problem = replace(posterior.problem, network=network.shifted(mode.theta - base))
        return replace(posterior, problem=problem, theta=mode.theta.to(network.dtype))


@dataclass(frozen=True, eq=False)
class Limits:
    """The range of a search: precisions around the curvature of their groups, the noise around its start."""

    typical: Tensor  # log H/φ of each group under the noise at the start
    noise: Tensor  # log-noise at the start, empty if it is not learned

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower and upper limits at x, (D,) each."""
        low, high = (math.log(bound) for bound in RANGE)
        log_noise = x[len(self.typical) :].clamp(self.noise + low, self.noise + high)
        middle = torch.cat([self.typical + (self.noise - log_noise).sum(), self.noise])
        return middle + low, middle + high


def _solved(solver: ModeSolver, posterior: WeightPosterior, start: Tensor) -> Mode:
    """Return θ* of the posterior's problem; the posterior preconditions the solve if its structure is suitable."""
    precondition: Product | None = None
    if isinstance(posterior.current, Preconditions) and posterior.current.preconditions:
        precision, root = posterior.fixed_precision, posterior.problem.prior.vector.detach().sqrt()
        precondition = lambda v: root * precision.solve(root * v)
    return solver(posterior.problem, start, precondition)


def _trace(steps: list[Step], findings: tuple[str, ...]) -> Trace:
    return Trace("LinearMode", "log evidence at the tangent model's optimum", tuple(steps), findings)


def _refuse(coordinates: Coordinates, steps: list[Step], message: str) -> None:
    """Raise with the trace and the posterior at the best step."""
    trace, best = _trace(steps, (message,)), max(steps, key=lambda step: step.score)
    raise DivergedError(message, trace, coordinates.finished(coordinates.position(best), trace))


def _typical(posterior: WeightPosterior) -> Tensor:
    """Return for every precision the mean curvature H/φ of its weights."""
    prior, phi = posterior.problem.prior, posterior.problem.likelihood.dispersion
    curvature = prior.summed(posterior.current.diagonal().detach().to(prior.values)) / phi.to(prior.values)
    scale = prior.counts if prior.scale is None else prior.summed(prior.scale)
    return (curvature / scale).detach()


def _at_start(posterior: WeightPosterior) -> WeightPosterior:
    """Return the posterior with precisions to start from, none above the typical curvature of its group."""
    problem, statistics = posterior.problem, posterior.statistics
    guess = group_starting_precisions(problem.prior, posterior.theta, statistics.data * statistics.outputs)
    values = guess.minimum(_typical(posterior).reshape(guess.shape))
    return posterior.with_problem(problem.with_prior(problem.prior.with_precision(values)))


def _pruned(posterior: WeightPosterior) -> tuple[str, ...]:
    """Return a remark on the groups that have no effect, if there are any."""
    prior = posterior.problem.prior
    pruned = (prior.values.detach().reshape(-1) > PRUNED * _typical(posterior)).tolist()
    if not any(pruned):
        return ()
    groups = prior.groups or ("all weights",) * len(pruned)
    names = [name or "(top)" for name, is_pruned in zip(groups, pruned, strict=True) if is_pruned]
    which = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return (
        f"{sum(pruned)} of {len(pruned)} precisions ran far above the curvature ({which}): the tangent model does "
        "better without these weights, and they add next to nothing to the error bars.",
    )
