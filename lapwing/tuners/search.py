"""The search over hyperparameters as one vector of logarithms: its coordinates, start, limits and L-BFGS."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.core.trace import Step, Trace
from lapwing.errors import DivergedError, UnsupportedError
from lapwing.posteriors.protocols import HasEvidence, Posterior, Reweightable, Tunable
from lapwing.priors.bound import starting_precisions

RANGE = (1e-10, 1e12)  # precisions outside are no optimum, see in_range


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The log-precisions of a posterior and, if ``noise``, its log noise variances: a vector x (D,) in float64."""

    posterior: Any
    noise: bool = False

    @classmethod
    def of(cls, posterior: Any, noise: bool) -> Coordinates:
        """Return the coordinates, with the noise only if the likelihood learns it; raise if there is no evidence."""
        if not isinstance(posterior, HasEvidence) or not isinstance(posterior, Tunable):
            raise UnsupportedError(
                f"{type(posterior).__name__} has no evidence to maximise; give the prior, or use a method that has one."
            )
        return cls(posterior, noise and posterior.noise is not None)

    @property
    def start(self) -> Tensor:
        """The present hyperparameters, (D,)."""
        parts = [self.posterior.problem.prior.values.detach().double().log().reshape(-1)]
        if self.noise:
            parts.append(self.posterior.noise.detach().double().log().reshape(-1).to(parts[0]))
        with torch.inference_mode(False):
            return torch.cat(parts).clone()

    @property
    def n_precisions(self) -> int:
        """The number of precisions; the other entries of x are noise variances."""
        return int(self.posterior.problem.prior.values.numel())

    @property
    def n_weights(self) -> int:
        """The number of weights P."""
        return int(self.posterior.problem.network.selection.size)

    def at(self, x: Tensor) -> Any:
        """Return the posterior at x, differentiable in x."""
        posterior = self.posterior
        if self.noise:
            posterior = posterior.with_noise(x[self.n_precisions :].exp().reshape(posterior.noise.shape))
        prior = posterior.problem.prior
        prior = prior.with_precision(x[: self.n_precisions].exp().reshape(prior.values.shape))
        return posterior.with_problem(posterior.problem.with_prior(prior))

    def step(self, x: Tensor, score: float, gamma: float | None = None) -> Step:
        """Return the entry of the trace for x."""
        values = x.detach().exp().tolist()
        return Step(score, tuple(values[: self.n_precisions]), tuple(values[self.n_precisions :]), gamma)

    def position(self, step: Step) -> Tensor:
        """Return x of a step."""
        return torch.tensor([*step.precisions, *step.noise], dtype=torch.float64, device=self.start.device).log()

    def finished(self, x: Tensor, trace: Trace) -> Any:
        """Return the posterior at x with the trace."""
        return self.at(x.detach()).with_trace(trace)


def start_near_optimum(posterior: Any) -> Any:
    """Return the posterior with precisions near the optimum of the evidence; unchanged if its prior is fixed."""
    problem, statistics = posterior.problem, posterior.statistics
    if not isinstance(posterior, Reweightable):
        return posterior
    values = starting_precisions(problem.prior, problem.network.theta(), statistics.data * statistics.outputs)
    return posterior.with_problem(problem.with_prior(problem.prior.with_precision(values)))


def in_range(precisions: Collection[float], posterior: Posterior) -> bool:
    """Return whether an optimum can be at these precisions: below 1e-10 or above 1e12 the evidence has none.

    A network for targets in small units has large weights and small precisions, so the lower limit is divided by the
    mean square of the weights.
    """
    prior, theta = posterior.problem.prior, posterior.problem.network.theta()
    size = float((theta - prior.mean).detach().double().square().mean())
    return RANGE[0] < min(precisions) * max(1.0, size) and max(precisions) < RANGE[1]


def refuse_not_finite(coordinates: Coordinates, steps: list[Step], tuner: str) -> None:
    """Raise if the score of the last step is not finite."""
    if not math.isfinite(steps[-1].score):
        raise_diverged(
            coordinates, steps, "the evidence is not finite. Give the prior, or start from another one.", tuner
        )


def refuse_runaway(coordinates: Coordinates, steps: list[Step], tuner: str) -> None:
    """Raise if a precision of the last step is out of range; a search may pass through such points, not end there."""
    low, high = min(steps[-1].precisions), max(steps[-1].precisions)
    if not in_range(steps[-1].precisions, coordinates.posterior):
        message = (
            f"the evidence has no optimum: a prior precision ran to {high:.3g} (smallest {low:.3g}). The weights of a "
            "layer are all near the prior mean, or the data do not curve the loss. Give the prior."
        )
        raise_diverged(coordinates, steps, message, tuner)


def raise_diverged(coordinates: Coordinates, steps: list[Step], message: str, tuner: str) -> None:
    """Raise ``DivergedError`` with the trace and the posterior at the best step that is finite and in range."""
    posterior = coordinates.posterior
    good = [step for step in steps if math.isfinite(step.score) and in_range(step.precisions, posterior)]
    trace = Trace(tuner, steps=tuple(steps), findings=(message,))
    if good:
        posterior = coordinates.finished(coordinates.position(max(good, key=lambda step: step.score)), trace)
    raise DivergedError(message, trace, posterior)


def minimise(
    objective: Callable[[Tensor], Tensor], start: Tensor, max_steps: int, tolerance: float
) -> tuple[Tensor, float]:
    """Minimise by L-BFGS with a strong Wolfe line search; return the last point and the largest slope there.

    Stops when the largest slope is below ``tolerance``.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = start.clone().requires_grad_()
        optimiser = torch.optim.LBFGS(
            [x],
            lr=1.0,
            max_iter=max_steps,
            tolerance_grad=tolerance,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimiser.zero_grad()
            value = objective(x)
            value.backward()
            return value

        optimiser.step(closure)
        closure()
    assert x.grad is not None
    return x.detach(), float(x.grad.abs().max())
