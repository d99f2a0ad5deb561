"""The corrected evidence: evaluated at the tangent model's own optimum."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.trace import Step, Trace
from lapwing.curvature.blockwise import BlockwiseCurvature
from lapwing.errors import DivergedError, NumericalError, UnsupportedError
from lapwing.linalg.cg import conjugate_gradients
from lapwing.linalg.operators import Product
from lapwing.methods.inducing.subspace import SubspaceCurvature
from lapwing.posteriors.protocols import Method
from lapwing.posteriors.weight_space import Mode, WeightPosterior
from lapwing.tangent.model import TangentModel, tangent_model
from lapwing.tuners.coordinates import Coordinates
from lapwing.tuners.maximise_evidence import minimise, refuse_not_finite

MEANS = ("network", "tangent")
# In units of a group's typical curvature: from where its prior is as good as absent to where its weights are.
RANGE = (1e-12, 1e5)
PRUNED = 1e3  # worth a word
ITERATIONS = 1000  # of conjugate gradients in one Newton step


@dataclass(frozen=True, eq=False)
class LinearMode:
    r"""Maximise the evidence at θ*, the optimum of the tangent model's own regularised loss (Antorán et al. 2022).

    $$ \theta_* = \arg\min_\theta \tfrac1\phi \sum_n \mathrm{loss}(h(\theta, x_n), y_n)
       + \tfrac12 \|\theta - \mu\|_A^2, \qquad h(\theta, x) = f(x) + J(x)(\theta - \tilde w) $$

    Training rarely stops at an optimum of anything the evidence knows of, and the size of w̃ then says nothing about
    the prior; θ* is an optimum by construction. w̃ stays the point of linearisation. Every evaluation of the evidence
    solves for θ* anew (Newton with conjugate gradients; one solve for a Gaussian likelihood), so that the result is
    stationary in θ and in the precisions together.

    There may be several such points. The search starts group by group from the sizes of weights and curvature, not
    from the given precisions, and so ends at the same predictions when a group is rescaled whose scale the network
    ignores. The precision of a group that the tangent model does better without grows until nothing of the group is
    left, and the trace says so.

    ``mean="network"`` keeps f(w̃, x) as the predictive mean and the noise at the residual of w̃; ``mean="tangent"``
    takes both from θ*: the mean is h(θ*, x) and the noise is learned. (Mixing them would collapse the coverage.)
    ``refit`` is a method, given to evaluate the curvature again at θ*, ``rounds`` times; None keeps it at w̃, which is
    exact for regression. In ``fit(..., tuner=LinearMode())`` the data are those of the fit; elsewhere give ``data``.

    Cost: passes over the data; about ten evaluations, each some Newton steps of some products.
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

    def with_data(self, data: Data) -> LinearMode:
        """The same on these data, where none were given."""
        return self if self.data is not None else replace(self, data=data)

    def __call__(self, posterior: Any) -> Any:
        if not isinstance(posterior, WeightPosterior):
            raise UnsupportedError(f"{type(posterior).__name__} has no weights to optimise; use a method that has.")
        if self.data is None:
            raise UnsupportedError("LinearMode needs the training data: LinearMode(data), or give it to fit().")
        network = posterior.problem.network
        data = self.data if isinstance(self.data, Data) else Data(self.data, network.device)
        base = network.shifted(None).theta().double()
        model = tangent_model(network.shifted(None), posterior.problem.likelihood, data)
        found, steps = posterior if posterior.mode is not None else _started(posterior), []
        for number in range(1 if self.refit is None else self.rounds):
            if number:
                found = self._refitted(found, base, data)
            found, more = self._tuned(found, model, base)
            steps += more
        trace = Trace("LinearMode", "log evidence at the tangent model's optimum", tuple(steps), _findings(found))
        return self._centred(found, base).with_trace(trace)

    def _tuned(self, posterior: WeightPosterior, model: TangentModel, base: Tensor) -> tuple[Any, list[Step]]:
        """L-BFGS on the evidence with θ* solved for at every point.

        θ* is the optimum of the fit and the penalty together, so that the slope of the whole is the slope at fixed θ*.
        """
        start = base if posterior.mode is None else posterior.mode.theta
        anchored = replace(posterior, mode=Mode(start, 0.0))
        coordinates = Coordinates.of(anchored, self.mean == "tangent")
        steps: list[Step] = []
        last = {"theta": start}
        weights = max(coordinates.weights, 1)
        # The slope at fixed θ is off by the root of what θ has left to gain.
        solver = ModeSolver(model, base, min(self.solver_tolerance, (0.1 * self.tolerance * weights) ** 2))
        limits = Limits(_typical(posterior).log(), coordinates.start[coordinates.count :])

        def objective(x: Tensor) -> Tensor:
            low, high = limits(x)
            below = (low - x).clamp_min(0).sum()  # so that a search that overshoots is sent back
            x = x.clamp(low, high)
            moved = coordinates.at(x)
            mode = solver(coordinates.at(x.detach()), last["theta"])
            last["theta"] = mode.theta
            value: Tensor = replace(moved, mode=mode).log_evidence()
            steps.append(coordinates.step(x, float(value.detach())))
            refuse_not_finite(coordinates, steps, "LinearMode")
            return below - value / weights

        best, slope = minimise(objective, coordinates.start, self.max_steps, self.tolerance)
        low, high = limits(best)
        if bool((best < low + 0.1).any()):
            _refuse(
                coordinates,
                steps,
                f"LinearMode: a precision or the noise fell out of range ({steps[-1]}), where rounding would decide; "
                "a noise far below the residuals, or none at all, does that. Give the prior, or another noise.",
            )
        if slope > max(1e-3, 10 * self.tolerance):
            _refuse(
                coordinates,
                steps,
                f"LinearMode: {self.max_steps} steps left a slope of {slope:.3g} per weight in the log evidence; "
                "expected below 1e-3. Raise max_steps, or tighten solver_tolerance.",
            )
        there = coordinates.at(best.minimum(high))
        return replace(there, mode=solver(there, last["theta"])), steps

    def _refitted(self, posterior: WeightPosterior, base: Tensor, data: Data) -> WeightPosterior:
        """The curvature at θ*, in the structure of ``refit``."""
        assert self.refit is not None
        assert posterior.mode is not None
        problem = posterior.problem
        shifted = replace(problem, network=problem.network.shifted(posterior.mode.theta - base))
        fitted = self.refit.fit(shifted, data)
        if not isinstance(fitted, WeightPosterior):
            raise UnsupportedError(f"refit={self.refit!r} gives no curvature; expected Full(), Kron() or the like.")
        return replace(posterior, curvature=fitted.curvature)

    def _centred(self, posterior: WeightPosterior, base: Tensor) -> WeightPosterior:
        """With the predictive mean where it was asked to be."""
        network, mode = posterior.problem.network, posterior.mode
        assert mode is not None
        if self.mean == "network":
            problem = replace(posterior.problem, network=network.shifted(None))
            return replace(posterior, problem=problem, theta=base.to(network.dtype))
        problem = replace(posterior.problem, network=network.shifted(mode.theta - base))
        return replace(posterior, problem=problem, theta=mode.theta.to(network.dtype))


@dataclass(frozen=True, eq=False)
class Limits:
    """How far a search may go: precisions from the curvature of their groups, the noise as far from its start."""

    typical: Tensor  # log H/φ under the noise at the start
    noise: Tensor  # its log, empty where it is not learned

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low, high = (math.log(bound) for bound in RANGE)
        now = x[len(self.typical) :].clamp(self.noise + low, self.noise + high)
        middle = torch.cat([self.typical + (self.noise - now).sum(), self.noise])
        return middle + low, middle + high


def _refuse(coordinates: Coordinates, steps: list[Step], message: str) -> None:
    """With the trace, and the posterior at the best step so far."""
    trace = Trace("LinearMode", "log evidence at the tangent model's optimum", tuple(steps), (message,))
    best = max(steps, key=lambda step: step.score)
    raise DivergedError(message, trace, coordinates.finished(coordinates.position(best), trace))


def _typical(posterior: WeightPosterior) -> Tensor:
    """For every precision the mean curvature H/φ of its weights."""
    prior, phi = posterior.problem.prior, posterior.problem.likelihood.dispersion
    curvature = prior.summed(posterior.current.diagonal().detach().to(prior.values)) / phi.to(prior.values)
    scale = prior.counts if prior.scale is None else prior.summed(prior.scale)
    return (curvature / scale).detach()


def _started(posterior: WeightPosterior) -> WeightPosterior:
    """With precisions to start from: half of what γ can be over |w̃|², group by group, and no more than is typical."""
    prior, statistics = posterior.problem.prior, posterior.statistics
    share = 0.5 * min(1.0, statistics.data * statistics.outputs / posterior.theta.numel())
    guess = share * prior.counts / prior.squares(posterior.theta.double())
    moved = prior.with_precision(guess.minimum(_typical(posterior)).reshape(prior.values.shape))
    return posterior.with_problem(posterior.problem.with_prior(moved))


def _findings(posterior: WeightPosterior) -> tuple[str, ...]:
    """What became of groups without use."""
    prior = posterior.problem.prior
    pruned = (prior.values.detach().reshape(-1) > PRUNED * _typical(posterior)).tolist()
    if not any(pruned):
        return ()
    names = prior.groups or ("all weights",) * len(pruned)
    shown = [name or "(top)" for name, gone in zip(names, pruned, strict=True) if gone]
    which = ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "")
    return (
        f"{sum(pruned)} of {len(pruned)} precisions ran far above the curvature ({which}): the tangent model does "
        "better without these weights, and they add next to nothing to the error bars.",
    )


@dataclass(frozen=True, eq=False)
class ModeSolver:
    """θ* of a posterior's prior and noise, by Newton's method with conjugate gradients on the tangent model.

    The loss is convex in theta, and h moves in a straight line along a step, so that one pass over the data gives the
    loss at every step length. Systems are solved in units of the prior: there no eigenvalue is below one, all but as
    many as there are data are one, and half the squared residual bounds what a step misses. (A preconditioner with
    blocks would spread them out.) Stops when no step can gain more than ``tolerance`` nats, or what rounding in the
    network's dtype can show.
    """

    model: TangentModel
    base: Tensor  # w̃
    tolerance: float = 1e-8
    max_steps: int = 50

    def __call__(self, posterior: Any, start: Tensor) -> Mode:
        prior, phi = posterior.problem.prior, float(posterior.problem.likelihood.dispersion)
        vector = prior.vector.detach()
        unit, precondition = vector.rsqrt(), self._preconditioner(posterior)
        rounding = torch.finfo(self.model.dtype).eps
        theta = start.clone()
        loss, slope = self.model.gradient(theta - self.base)
        promise = missed = float("inf")
        for _ in range(self.max_steps):
            delta = theta - self.base
            gradient = slope / phi + vector * (theta - prior.mean)
            value = loss / phi + 0.5 * float(prior.penalty(theta))
            enough = self.tolerance + 4 * rounding * abs(value)
            size = float((unit * gradient).norm())
            if size == 0:
                return Mode(theta, loss)
            found = conjugate_gradients(
                lambda v, at=delta: unit * self.model.products(at, unit * v) / phi + v,  # type: ignore[misc]
                (unit * gradient)[None],
                precondition=precondition,
                tolerance=max(0.1 * enough**0.5 / size, min(1e-2, 0.1 * promise)),
                max_iterations=ITERATIONS,
                truncated=True,
            )
            step = -unit * found.x[0]
            promise = 0.5 * float(-(gradient @ step))
            missed = 0.5 * (float(found.residuals[0]) * size) ** 2
            if promise <= enough:
                if missed <= enough:
                    return self._finished(theta, step)
                continue  # nothing to see in the loss, but the system was not solved well enough to stop
            length = self._length(posterior, theta, step, value, promise)
            theta = theta + length * step
            loss, slope = self.model.gradient(theta - self.base)
        raise NumericalError(
            f"the optimum of the tangent model was not reached in {self.max_steps} Newton steps: up to "
            f"{promise + missed:.3g} nats are left; expected {self.tolerance:g}. Raise the prior precision."
        )

    def _preconditioner(self, posterior: Any) -> Product | None:
        """The posterior's own precision where it knows the eigenvectors, in units of the prior.

        That of a subspace holds all other weights fast, and nothing would move them.
        """
        none = BlockwiseCurvature | SubspaceCurvature
        if not isinstance(posterior, WeightPosterior) or isinstance(posterior.current, none):
            return None
        precision, root = posterior.fixed_precision, posterior.problem.prior.vector.detach().sqrt()
        return lambda v: root * precision.solve(root * v)

    def _length(self, posterior: Any, theta: Tensor, step: Tensor, value: float, promise: float) -> Tensor:
        prior, phi = posterior.problem.prior, float(posterior.problem.likelihood.dispersion)
        lengths = 0.5 ** torch.arange(0, 12, dtype=torch.float64, device=theta.device)
        penalties = torch.stack([0.5 * prior.penalty(theta + t * step) for t in lengths]).detach()
        totals = self.model.losses(theta - self.base, step, lengths) / phi + penalties
        best = int(totals.argmin())
        if not float(totals[best]) < value:
            raise NumericalError(
                f"the tangent model's loss does not fall along a Newton step that promises {promise:.3g} nats; "
                "check that the data give the same batches at every pass, or compute in float64."
            )
        return lengths[best]

    def _finished(self, theta: Tensor, step: Tensor) -> Mode:
        """With the last step taken, since it is there: the value hardly changes, but its slope does."""
        moved = self.model.losses(theta - self.base, step, torch.ones(1, dtype=torch.float64, device=theta.device))
        return Mode(theta + step, float(moved[0]))
