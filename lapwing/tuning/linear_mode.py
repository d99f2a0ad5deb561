"""The corrected evidence: evaluated at the tangent model's own optimum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.errors import NumericalError, UnsupportedError
from lapwing.curvature.tangent_model import TangentModel, tangent_model
from lapwing.linalg.cg import conjugate_gradients
from lapwing.posteriors.protocols import Method
from lapwing.posteriors.trace import Step, Trace
from lapwing.posteriors.weight_space import Mode, WeightPosterior
from lapwing.tuning.coordinates import Coordinates
from lapwing.tuning.evidence import minimise, refuse_not_finite, refuse_runaway

MEANS = ("network", "tangent")


@dataclass(frozen=True, eq=False)
class LinearMode:
    r"""Maximise the evidence at θ*, the optimum of the tangent model's own regularised loss (Antorán et al. 2022).

    $$ \theta_* = \arg\min_\theta \tfrac1\phi \sum_n \mathrm{loss}(h(\theta, x_n), y_n)
       + \tfrac12 \|\theta - \mu\|_A^2, \qquad h(\theta, x) = f(x) + J(x)(\theta - \tilde w) $$

    Training rarely stops at an optimum of anything the evidence knows of, and the size of w̃ then says nothing about
    the prior; θ* is an optimum by construction. w̃ stays the point of linearisation. Every evaluation of the evidence
    solves for θ* anew (Newton with conjugate gradients, preconditioned by the posterior's own precision; one solve for
    a Gaussian likelihood), so that the result is stationary in θ and in the precisions together.

    ``mean="network"`` keeps f(w̃, x) as the predictive mean and the noise at the residual of w̃; ``mean="tangent"``
    takes both from θ*: the mean is h(θ*, x) and the noise is learned. (Mixing them would collapse the coverage.)
    ``refit`` is a method, given to evaluate the curvature again at θ*, ``rounds`` times; None keeps it at w̃, which is
    exact for regression. In ``fit(..., tuner=linear_mode())`` the data are those of the fit; elsewhere give ``data``.

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
            raise UnsupportedError("linear_mode needs the training data: linear_mode(data), or give it to fit().")
        network = posterior.problem.network
        data = self.data if isinstance(self.data, Data) else Data(self.data, network.device)
        base = network.shifted(None).theta().double()
        model = tangent_model(network.shifted(None), posterior.problem.likelihood, data)
        found, steps = posterior, []
        for number in range(1 if self.refit is None else self.rounds):
            if number:
                found = self._refitted(found, base, data)
            found, more = self._tuned(found, model, base)
            steps += more
        trace = Trace("linear_mode", "log evidence at the tangent model's optimum", tuple(steps))
        return self._centred(found, base).with_trace(trace)

    def _tuned(self, posterior: WeightPosterior, model: TangentModel, base: Tensor) -> tuple[Any, list[Step]]:
        """L-BFGS on the evidence with θ* solved for at every point.

        θ* is the optimum of the fit and the penalty together, so that the slope of the whole is the slope at fixed θ*.
        """
        start = base if posterior.mode is None else posterior.mode.theta
        anchored = replace(posterior, mode=Mode(start, 0.0))
        coordinates = Coordinates.of(anchored, self.mean == "tangent")
        solver = ModeSolver(model, base, self.solver_tolerance)
        steps: list[Step] = []
        last = {"theta": start}
        weights = max(coordinates.weights, 1)

        def objective(x: Tensor) -> Tensor:
            moved = coordinates.at(x)
            mode = solver(coordinates.at(x.detach()), last["theta"])
            last["theta"] = mode.theta
            value: Tensor = replace(moved, mode=mode).log_evidence()
            steps.append(coordinates.step(x, float(value.detach())))
            refuse_not_finite(coordinates, steps)
            return -value / weights

        best, slope = minimise(objective, coordinates.start, self.max_steps, self.tolerance)
        refuse_runaway(coordinates, steps)
        if slope > max(1e-3, 10 * self.tolerance):
            raise NumericalError(
                f"linear_mode: {self.max_steps} steps left a slope of {slope:.3g} per weight in the log evidence; "
                "expected below 1e-3. Raise max_steps, or tighten solver_tolerance. The last steps were: "
                + "; ".join(str(step) for step in steps[-3:])
            )
        there = coordinates.at(best)
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
class ModeSolver:
    """θ* of a posterior's prior and noise, by Newton's method with conjugate gradients on the tangent model.

    The loss is convex in theta, and h moves in a straight line along a step, so that one pass over the data gives the
    loss at every step length. Stops when the decrease that a step promises is below ``tolerance`` nats, or what
    rounding in the network's dtype can show.
    """

    model: TangentModel
    base: Tensor  # w̃
    tolerance: float = 1e-8
    max_steps: int = 50

    def __call__(self, posterior: WeightPosterior, start: Tensor) -> Mode:
        prior, phi = posterior.problem.prior, float(posterior.problem.likelihood.dispersion)
        precision, vector = posterior.settled, prior.vector.detach()
        theta = start.clone()
        loss, slope = self.model.gradient(theta - self.base)
        promise = float("inf")
        for _ in range(self.max_steps):
            gradient = slope / phi + vector * (theta - prior.mean)
            delta = theta - self.base
            value = loss / phi + 0.5 * float(prior.penalty(theta))
            step = -conjugate_gradients(
                lambda v, at=delta: self.model.products(at, v) / phi + vector * v,  # type: ignore[misc]
                gradient[None],
                precondition=lambda v: precision.solve(v),
                tolerance=min(1e-2, max(1e-10, 0.1 * promise)),
                max_iterations=200,
                truncated=True,
            ).x[0]
            promise = 0.5 * float(-(gradient @ step))
            if promise <= self.tolerance + 4 * self._rounding * abs(value):
                return Mode(theta, loss)
            lengths = 0.5 ** torch.arange(0, 12, dtype=torch.float64, device=theta.device)
            losses = self.model.losses(delta, step, lengths) / phi
            penalties = torch.stack([0.5 * prior.penalty(theta + t * step) for t in lengths])
            totals = losses + penalties
            best = int(totals.argmin())
            if not float(totals[best]) < value:
                raise NumericalError(
                    f"the tangent model's loss does not fall along a Newton step that promises {promise:.3g} nats; "
                    "check that the data give the same batches at every pass, or compute in float64."
                )
            theta = theta + lengths[best] * step
            loss, slope = self.model.gradient(theta - self.base)
        raise NumericalError(
            f"the optimum of the tangent model was not reached in {self.max_steps} Newton steps: the next one still "
            f"promises {promise:.3g} nats; expected {self.tolerance:g}. Raise the prior precision."
        )

    @property
    def _rounding(self) -> float:
        dtype = getattr(getattr(self.model, "network", None), "dtype", torch.float64)
        return float(torch.finfo(dtype).eps)


linear_mode = LinearMode
