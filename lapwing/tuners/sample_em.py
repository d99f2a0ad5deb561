"""Precisions and noise by expectation maximisation on samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.settings import require_flag, require_integer, require_positive
from lapwing.core.trace import NOT_CONVERGED, Step, Trace
from lapwing.errors import DivergedError, UnsupportedError
from lapwing.posteriors.protocols import SamplesGamma
from lapwing.problem import Problem
from lapwing.tangent.model import tangent_model
from lapwing.tuners.evidence import in_range
from lapwing.tuners.linear_mode import ModeSolver
from lapwing.tuners.protocol import required_data

MODES = ("tangent", "network")


@dataclass(frozen=True, eq=False)
class SampleEM:
    r"""A tuner that iterates MacKay's updates with γ from function-space samples (Antorán et al. 2023).

    $$ \gamma_d = \tfrac1K \sum_j z_{jd}^\top (G z_j)_d / \phi, \qquad \alpha_d = \gamma_d / \|\theta_{*d}\|^2,
       \qquad \phi = \mathrm{SSE}(\theta_*) / (NC - \gamma) $$

    θ* is the optimum of the tangent model, as in ``LinearMode``. The noise of the samples stays the same from step to
    step, so that the map is deterministic and has a fixed point; the trace has γ and its standard error at every
    step. γ in function space is never negative, and one sample determines it to a relative error of sqrt(2/γ).

    Cost of a step: the samples at the new precision and one product with them, and θ* from its last value. For a
    single precision a Krylov basis gives both without a pass over the data.

    Args:
        data: The training data; None takes those of ``fit``. Not used with ``mode="network"``.
        mode: "tangent" takes θ*; "network" takes the trained weights w̃ instead, which costs no passes. γ falls
            as α rises, so with w̃ each step goes half the way, in the logarithm: full steps would overshoot to
            precisions that are smaller than the fixed point, and so more expensive to solve for.
        noise: Whether to learn the noise of a Gaussian likelihood from θ*.
        max_steps: The largest number of updates; 1 makes a single update without a check of convergence.
        tolerance: Stop when no logarithm changes by more than this.
        solver_tolerance: Nats that the solve for θ* may miss.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, the posterior has no samples or no data.
        DivergedError: When called, if a precision leaves its range, γ of a group is negative, or a logarithm still
            changes by more than 1e-2 after ``max_steps`` updates.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> posterior = lw.fit(net, [(x, x.sin())], "regression", method=lw.Sampled(), tuner=lw.tuners.SampleEM())
    >>> posterior.trace.tuner
    'SampleEM'
    """

    data: Iterable[Any] | Data | None = None
    mode: str = "tangent"
    noise: bool = False
    max_steps: int = 50
    tolerance: float = 1e-3
    solver_tolerance: float = 1e-4

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UnsupportedError(f"mode is {self.mode!r}; expected 'tangent' or 'network'.")
        require_flag("noise", self.noise)
        require_integer("max_steps", self.max_steps)
        require_positive("tolerance", self.tolerance)
        require_positive("solver_tolerance", self.solver_tolerance)

    def with_data(self, data: Data) -> SampleEM:
        """Return the tuner with these data, or unchanged if it has data."""
        return self if self.data is not None else replace(self, data=data)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior at the fixed point."""
        if not isinstance(posterior, SamplesGamma):
            raise UnsupportedError(f"{type(posterior).__name__} has no samples; use method=Sampled().")
        current: Any = posterior
        solver, theta, loss = self._solver(current), current.theta.double(), current.statistics.loss
        steps: list[Step] = []
        for _ in range(self.max_steps):
            if solver is not None:
                mode = solver(current.problem, theta)
                theta, loss = mode.theta, mode.loss
            prior = current.problem.prior
            gammas = torch.stack([prior.summed(row.to(prior.values)) for row in current.gamma_samples()])  # (K, groups)
            updated = self._updated(current, gammas.mean(0), theta, float(loss))
            change = _largest_change(current.problem, updated.problem)
            steps.append(_step(current.problem, gammas.sum(1, keepdim=True)))
            _refuse_diverged(current, gammas, updated.problem.prior.values, change, steps)
            current = updated
            if change <= self.tolerance:
                break
        return self._finished(current, steps, gammas, change)

    def _solver(self, posterior: Any) -> ModeSolver | None:
        """Return the solver for θ*, or None if w̃ takes its place."""
        if self.mode == "network":
            return None
        network = posterior.problem.network
        data = required_data("SampleEM", self.data, network.device)
        model = tangent_model(network, posterior.problem.likelihood, data)
        return ModeSolver(model, posterior.theta.double(), self.solver_tolerance)

    def _updated(self, current: Any, gamma: Tensor, theta: Tensor, loss: float) -> Any:
        """Return the posterior under the updated precisions and, if it is learned, the updated noise."""
        prior = current.problem.prior
        precision = gamma.clamp_min(1e-12) / prior.squares(theta).clamp_min(1e-300)
        if self.mode == "network":
            precision = (precision * prior.values.reshape(precision.shape).to(precision)).sqrt()
        problem = current.problem.with_prior(prior.with_precision(precision.reshape(prior.values.shape)))
        if self.noise and current.noise is not None:
            count = current.statistics.data * current.statistics.outputs
            phi = 2 * loss / max(count - float(gamma.sum()), 1e-3 * count)
            likelihood = problem.likelihood.with_dispersion(torch.tensor(phi, dtype=torch.float64).to(precision))
            problem = problem.with_likelihood(likelihood)
        return current.warm_started(problem)

    def _finished(self, current: Any, steps: list[Step], gammas: Tensor, change: float) -> Any:
        """Return the posterior with its trace; raise if the last change was too large."""
        finding = f"gamma {steps[-1].gamma:.4g} ± {steps[-1].error:.2g} from {len(gammas)} samples"
        if gammas.shape[1] > 1:
            finding += f", of a group ± {_error(gammas):.0%} of it or less"
        if change > self.tolerance:
            finding += f"; a logarithm still moved by {change:.2g} at the last step"
        posterior = current.with_trace(Trace("SampleEM", "gamma", tuple(steps), (finding,)))
        if change > max(NOT_CONVERGED, self.tolerance) and self.max_steps > 1:
            raise DivergedError(
                f"SampleEM: after {self.max_steps} steps a logarithm moves by {change:.2g}; expected at most "
                f"{self.tolerance:g}. Raise max_steps or Sampled(num_samples=...), take mode='network', or give the "
                "prior.",
                posterior.trace,
                posterior,
            )
        return posterior


def _refuse_diverged(current: Any, gammas: Tensor, precisions: Tensor, change: float, steps: list[Step]) -> None:
    """Raise if γ of a group is negative, or an updated precision is out of range or not finite.

    Only γ of all weights is a sum of squares, so that γ of a group may be negative.
    """
    lowest, low, high = float(gammas.mean(0).min()), *(float(end) for end in precisions.aminmax())
    message = ""
    if lowest < 0:
        message = (
            f"SampleEM: gamma of a group is {lowest:.3g} from {len(gammas)} samples; expected none below zero. Raise "
            "Sampled(num_samples=...), or use a prior with one number."
        )
    elif not (math.isfinite(change) and in_range((low, high), current)):
        message = (
            f"SampleEM: a prior precision ran to {high:.3g} (smallest {low:.3g}). The weights of a group are all near "
            "the prior mean, or the data do not curve the loss. Give the prior."
        )
    if message:
        trace = Trace("SampleEM", "gamma", tuple(steps))
        raise DivergedError(message, trace, current.with_trace(trace))


def _error(gammas: Tensor) -> float:
    """Return the standard error of (K, 1), or the largest one relative to its mean of (K, groups)."""
    if len(gammas) < 2:
        return math.inf
    each = gammas.std(0) / math.sqrt(len(gammas))
    return float(each if len(each) == 1 else (each / gammas.mean(0)).max())


def _step(problem: Problem, totals: Tensor) -> Step:
    """Return the entry of the trace, for γ of all weights from each sample (K, 1)."""
    noise = (float(problem.likelihood.dispersion),) if problem.likelihood.learns_dispersion else ()
    gamma = float(totals.mean())
    return Step(gamma, tuple(problem.prior.values.reshape(-1).tolist()), noise, gamma, _error(totals))


def _largest_change(one: Problem, other: Problem) -> float:
    """Return the largest change of a logarithm, precisions and dispersion included."""
    precisions = (other.prior.values.log() - one.prior.values.log()).abs().max()
    noise = (other.likelihood.dispersion.log() - one.likelihood.dispersion.log()).abs()
    return max(float(precisions), float(noise))
