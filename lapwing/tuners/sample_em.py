"""Precisions and noise by expectation maximisation on samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.settings import require_integer, require_positive
from lapwing.core.trace import NOT_CONVERGED, Step, Trace
from lapwing.errors import DivergedError, UnsupportedError
from lapwing.posteriors.sampled import SampledPosterior
from lapwing.problem import Problem
from lapwing.tangent.model import TangentModel, tangent_model
from lapwing.tuners.linear_mode import ModeSolver
from lapwing.tuners.maximise_evidence import in_range


@dataclass(frozen=True, eq=False)
class SampleEM:
    r"""MacKay's updates with γ from function-space samples (Antorán et al. 2023).

    $$ \gamma_d = \tfrac1K \sum_j z_{jd}^\top (G z_j)_d / \phi, \qquad \alpha_d = \gamma_d / \|\theta_{*d}\|^2,
       \qquad \phi = \mathrm{SSE}(\theta_*) / (NC - \gamma) $$

    θ* is the optimum of the tangent model, as in ``LinearMode``; ``mode="network"`` takes w̃ instead, which costs no
    passes. γ falls where α rises, so with w̃ half of each step is taken, in the logarithm: full steps would overshoot
    to precisions smaller, and so dearer to solve for, than the fixed point. The noise of the samples stays the same
    from step to step, so that the map is deterministic and ends in a fixed point; the trace has γ and its standard
    error at every step. γ in function space is never negative and one sample knows it to sqrt(2/γ).
    ``noise=True`` learns the noise of a Gaussian likelihood from θ*.

    Cost of a step: the samples at the new precision and one product with them, and θ* from where it was. For one
    precision a Krylov basis gives both without a pass over the data.
    """

    data: Iterable[Any] | Data | None = None
    mode: str = "tangent"
    noise: bool = False
    max_steps: int = 50
    tolerance: float = 1e-3
    solver_tolerance: float = 1e-4

    def __post_init__(self) -> None:
        if self.mode not in ("tangent", "network"):
            raise UnsupportedError(f"mode is {self.mode!r}; expected 'tangent' or 'network'.")
        require_integer("max_steps", self.max_steps)
        require_positive("tolerance", self.tolerance)
        require_positive("solver_tolerance", self.solver_tolerance)

    def with_data(self, data: Data) -> SampleEM:
        """The same on these data, where none were given."""
        return self if self.data is not None else replace(self, data=data)

    def __call__(self, posterior: Any) -> Any:
        if not isinstance(posterior, SampledPosterior):
            raise UnsupportedError(f"{type(posterior).__name__} has no samples; use method=Sampled().")
        model = self._model(posterior)
        theta, loss = posterior.theta.double(), posterior.statistics.loss
        steps: list[Step] = []
        current = posterior
        for _ in range(self.max_steps):
            if model is not None:
                found = ModeSolver(model, posterior.theta.double(), self.solver_tolerance)(current, theta)
                theta, loss = found.theta, found.loss
            gammas = self._gammas(current)
            updated = self._updated(current, gammas.mean(0), theta, float(loss))
            moved = _distance(current.problem, updated.problem)
            steps.append(_step(current.problem, gammas.sum(1, keepdim=True)))
            refuse_negative(gammas, steps, current)
            low, high = (float(end) for end in updated.problem.prior.values.aminmax())
            if not (math.isfinite(moved) and in_range((low, high), current)):
                trace = Trace("SampleEM", "gamma", tuple(steps))
                message = f"SampleEM: a prior precision ran to {high:.3g} (smallest {low:.3g}). The weights of a group "
                message += "are all near the prior mean, or the data do not curve the loss. Give the prior."
                raise DivergedError(message, trace, current.with_trace(trace))
            current = updated
            if moved <= self.tolerance:
                break
        finding = f"gamma {steps[-1].gamma:.4g} ± {steps[-1].error:.2g} from {len(gammas)} samples"
        if gammas.shape[1] > 1:
            finding += f", of a group ± {_error(gammas):.0%} of it or less"
        if moved > self.tolerance:
            finding += f"; a logarithm still moved by {moved:.2g} at the last step"
        trace = Trace("SampleEM", "gamma", tuple(steps), (finding,))
        if moved > max(NOT_CONVERGED, self.tolerance) and self.max_steps > 1:
            raise DivergedError(
                f"SampleEM: after {self.max_steps} steps a logarithm moves by {moved:.2g}; expected at most "
                f"{self.tolerance:g}. Raise max_steps or Sampled(num_samples=...), take mode='network', or give the "
                "prior.",
                trace,
                current.with_trace(trace),
            )
        return current.with_trace(trace)

    def _model(self, posterior: SampledPosterior) -> TangentModel | None:
        if self.mode == "network":
            return None
        if self.data is None:
            raise UnsupportedError("SampleEM needs the training data: SampleEM(data), or give it to fit().")
        network = posterior.problem.network
        data = self.data if isinstance(self.data, Data) else Data(self.data, network.device)
        return tangent_model(network, posterior.problem.likelihood, data)

    def _gammas(self, current: SampledPosterior) -> Tensor:
        """γ of the weights that share a precision, from each sample: (K, groups)."""
        each = current.solver.gamma(current.problem, current.samples)
        prior = current.problem.prior
        return torch.stack([prior.summed(row.to(prior.values)) for row in each])

    def _updated(self, current: SampledPosterior, gamma: Tensor, theta: Tensor, loss: float) -> SampledPosterior:
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
        return replace(current.with_problem(problem), start=current.solution.x)


def refuse_negative(gammas: Tensor, steps: list[Step], current: SampledPosterior) -> None:
    """γ of all weights is a sum of squares; that of a group is not, and with few samples may be anything."""
    worst = float(gammas.mean(0).min())
    if worst < 0:
        trace = Trace("SampleEM", "gamma", tuple(steps))
        raise DivergedError(
            f"SampleEM: gamma of a group is {worst:.3g} from {len(gammas)} samples; expected none below zero. Raise "
            "Sampled(num_samples=...), or use a prior with one number.",
            trace,
            current.with_trace(trace),
        )


def _error(gammas: Tensor) -> float:
    """The standard error of the only column of (K, 1); the largest one relative to its mean of (K, groups)."""
    if len(gammas) < 2:
        return math.inf
    each = gammas.std(0) / math.sqrt(len(gammas))
    return float(each if len(each) == 1 else (each / gammas.mean(0)).max())


def _step(problem: Problem, totals: Tensor) -> Step:
    """For γ of all weights, from each sample (K, 1)."""
    noise = (float(problem.likelihood.dispersion),) if problem.likelihood.learns_dispersion else ()
    gamma = float(totals.mean())
    return Step(gamma, tuple(problem.prior.values.reshape(-1).tolist()), noise, gamma, _error(totals))


def _distance(one: Problem, other: Problem) -> float:
    """The largest change of a logarithm."""
    precisions = (other.prior.values.log() - one.prior.values.log()).abs().max()
    noise = (other.likelihood.dispersion.log() - one.likelihood.dispersion.log()).abs()
    return max(float(precisions), float(noise))
