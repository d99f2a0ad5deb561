"""The evidence as a function of hyperparameters, and the tuners that maximise it by its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.core.settings import FLAG, FUNCTION, POSITIVE, Rule, require_integer, seen
from lapwing.core.trace import Step, Trace
from lapwing.errors import DivergedError, UnsupportedError
from lapwing.posteriors.protocols import Bounded, HasEvidence, Posterior, Reweightable, Tunable
from lapwing.priors.bound import starting_precisions

LARGEST_SLOPE = 1e-3  # per weight; above it a search has not converged
HYPERPRIOR = Rule("a function of the posterior, or None", lambda v: v is None or FUNCTION.holds(v))

Hyperprior = Callable[[Any], Tensor]  # from a posterior to the log density of its hyperparameters


@dataclass(frozen=True, eq=False)
class Search:
    """A search over x (D,), float64: the log-precisions of a posterior and, if ``noise``, its log noise variances."""

    posterior: Any
    noise: bool
    tuner: str  # the name of the tuner, for traces and errors
    score: str = "log evidence"  # the name of what it maximises
    hyperprior: Hyperprior | None = None  # a log density that is added to the evidence
    steps: list[Step] = field(default_factory=list)  # every point that was tried, in order

    @classmethod
    def of(
        cls, posterior: Any, noise: bool, tuner: str, score: str = "log evidence", hyperprior: Hyperprior | None = None
    ) -> Search:
        """Return the search, with the noise only if the likelihood learns it; raise if there is no evidence."""
        if not isinstance(posterior, HasEvidence) or not isinstance(posterior, Tunable):
            raise UnsupportedError(
                f"{type(posterior).__name__} has no evidence to maximise; give the prior, or use a method that has one."
            )
        score = score if hyperprior is None else f"{score} plus log hyperprior"
        return cls(posterior, noise and posterior.noise is not None, tuner, score, hyperprior)

    @property
    def start(self) -> Tensor:
        """The present hyperparameters, (D,)."""
        parts = [self.posterior.problem.prior.values.detach().double().log().reshape(-1)]
        if self.noise:
            parts.append(self.posterior.noise.detach().double().log().reshape(-1).to(parts[0]))
        with torch.inference_mode(False):
            return torch.cat(parts).clone()

    @cached_property
    def n_precisions(self) -> int:
        """The number of precisions; the other entries of x are noise variances."""
        return int(self.posterior.problem.prior.values.numel())

    def inside(self, x: Tensor) -> Tensor:
        """Return x within the limits of the posterior, if it has some."""
        if not isinstance(self.posterior, Bounded):
            return x
        low, high = (limit[: len(x)].to(x) for limit in self.posterior.limits)
        return x.clamp(low, high)

    def at(self, x: Tensor) -> Any:
        """Return the posterior at x, or at the nearest point within its limits, differentiable in x."""
        posterior, x = self.posterior, self.inside(x)
        if self.noise:
            posterior = posterior.with_noise(x[self.n_precisions :].exp().reshape(posterior.noise.shape))
        precisions = x[: self.n_precisions].exp().reshape(posterior.problem.prior.values.shape)
        return posterior.with_problem(posterior.problem.with_precisions(precisions))

    def objective(self, x: Tensor) -> Tensor:
        """Return the log evidence at x plus the log density of the hyperprior, differentiable in x."""
        posterior = self.at(x)
        value: Tensor = posterior.log_evidence()
        if self.hyperprior is None:
            return value
        density = self.hyperprior(posterior)
        if not isinstance(density, Tensor) or density.numel() != 1:
            raise UnsupportedError(
                f"the hyperprior gave {seen(density)}; expected a log density, a tensor with one entry."
            )
        if density.is_complex() or (value.requires_grad and not density.requires_grad):
            raise UnsupportedError(
                f"the hyperprior gave {seen(density)} that does not depend on the hyperparameters; expected a real "
                "number computed from the posterior that it is called with, without detach()."
            )
        return value + density.reshape(()).to(value)

    def step(self, x: Tensor, score: float = math.nan, gamma: float | None = None) -> Step:
        """Return the entry of the trace for x."""
        values = self.inside(x.detach()).exp().tolist()
        return Step(score, tuple(values[: self.n_precisions]), tuple(values[self.n_precisions :]), gamma)

    def record(self, x: Tensor, score: float, gamma: float | None = None) -> None:
        """Add x to the steps; raise if its score is not finite."""
        self.steps.append(self.step(x, score, gamma))
        if not math.isfinite(score):
            raise self.error_at_best("the evidence is not finite. Give the prior, or start from another one.")

    def finished(self, x: Tensor, *findings: str) -> Any:
        """Return the posterior at x with the trace."""
        return self.at(x.detach()).with_trace(Trace(self.tuner, self.score, tuple(self.steps), findings))

    def error_at(self, x: Tensor, message: str) -> DivergedError:
        """Return the error with the trace and the posterior at x."""
        posterior = self.finished(x, message)
        return DivergedError(message, posterior.trace, posterior)

    def error_at_best(self, message: str) -> DivergedError:
        """Return the error with the trace and the posterior at the best step that is finite and in range."""
        good = [step for step in self.steps if math.isfinite(step.score) and in_range(step.precisions, self.posterior)]
        return self.error_at(self.position(max(good, key=lambda step: step.score)) if good else self.start, message)

    def position(self, step: Step) -> Tensor:
        """Return x of a step."""
        return torch.tensor([*step.precisions, *step.noise], dtype=torch.float64, device=self.start.device).log()

    def refuse_runaway(self) -> None:
        """Raise if a precision of the last step is out of range: a search may pass there, but not end."""
        precisions = self.steps[-1].precisions
        if not in_range(precisions, self.posterior):
            message = (
                f"the evidence has no optimum: a prior precision ran to {max(precisions):.3g} (smallest "
                f"{min(precisions):.3g}). The weights of a layer are all near the prior mean, or the data do not curve "
                "the loss. Give the prior."
            )
            raise self.error_at_best(message)


def start_near_optimum(posterior: Any) -> Any:
    """Return the posterior with precisions near the optimum of the evidence; unchanged if its prior is fixed."""
    problem, statistics = posterior.problem, posterior.statistics
    if not isinstance(posterior, Reweightable):
        return posterior
    values = starting_precisions(problem.prior, problem.network.theta(), statistics.data * statistics.outputs)
    return posterior.with_problem(problem.with_precisions(values))


def in_range(precisions: Collection[float], posterior: Posterior) -> bool:
    """Return whether the evidence can have an optimum at these hyperparameters of the prior."""
    problem = posterior.problem
    return isinstance(posterior, Bounded) or problem.prior.in_range(precisions, problem.network.theta())


def minimise(
    objective: Callable[[Tensor], Tensor], start: Tensor, max_steps: int, tolerance: float
) -> tuple[Tensor, float]:
    """Minimise by L-BFGS with a strong Wolfe line search; return the last point and the largest slope there.

    Stops when the largest slope is below ``tolerance``.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = start.clone().requires_grad_()
        optimiser = torch.optim.LBFGS(
            [x], max_iter=max_steps, tolerance_grad=tolerance, tolerance_change=0.0, line_search_fn="strong_wolfe"
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


@dataclass(frozen=True)
class MaximiseEvidence:
    """A tuner that maximises the log evidence over the prior's precisions and, if asked, the noise.

    In log-precisions the evidence is concave for a fixed noise, so L-BFGS finds its only optimum. ``posterior.trace``
    has every step.

    Cost: a log-determinant and its gradient for each of about ten steps; no pass over the data.

    Args:
        noise: Whether to learn the dispersion too (one for each output if the likelihood has one for each). This
            assumes that the trained weights are the optimum of the tangent model. By default the noise stays the
            mean squared residual.
        max_steps: The largest number of L-BFGS steps.
        tolerance: Stop when the slope is below this number times the number of weights.
        hyperprior: A function from a posterior to a log density, added to the log evidence. It reads hyperparameters
            from ``posterior.problem.prior.values`` and ``posterior.noise`` and must be differentiable in them. The
            search is over logarithms, but the sum is taken as it is: a density over precisions needs no Jacobian.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, the posterior has no evidence.
        DivergedError: When called, if the evidence has no optimum or was not maximised in ``max_steps`` steps.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=100.0)
    >>> tuned = posterior.tuned(lw.tuners.MaximiseEvidence(noise=True))
    >>> bool(tuned.log_evidence() > posterior.log_evidence())
    True
    """

    noise: bool = False
    max_steps: int = 60
    tolerance: float = 1e-5
    hyperprior: Hyperprior | None = None

    def __post_init__(self) -> None:
        FLAG.check("noise", self.noise)
        require_integer("max_steps", self.max_steps)
        POSITIVE.check("tolerance", self.tolerance)
        HYPERPRIOR.check("hyperprior", self.hyperprior)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior at the optimum of the evidence."""
        search = Search.of(posterior, self.noise, "MaximiseEvidence", hyperprior=self.hyperprior)
        unit = posterior.problem.evidence_unit

        def objective(x: Tensor) -> Tensor:
            value = search.objective(x)
            search.record(x, float(value.detach()))
            return -value / unit

        best, slope = minimise(objective, search.start, self.max_steps, self.tolerance)
        search.refuse_runaway()
        if slope > LARGEST_SLOPE:
            message = (
                f"{self.max_steps} steps left a slope of {slope:.3g} per weight in the log evidence; expected below "
                "1e-3. Raise MaximiseEvidence(max_steps=...) or give the prior."
            )
            raise search.error_at_best(message)
        return search.finished(best)


@dataclass(frozen=True)
class Ascend:
    """A tuner that takes a fixed number of Adam steps on the log evidence, in log-precisions and log-noise.

    These are the hyper-steps of Immer et al. 2021. While the weights still change, it does not pay to find the
    optimum for the weights of the moment.

    Cost: a log-determinant and its gradient for each step; no pass over the data.

    Args:
        steps: The number of steps; 0 only evaluates the evidence.
        rate: The learning rate of Adam.
        noise: Whether to learn the noise too, if the likelihood leaves it open.
        hyperprior: As for ``MaximiseEvidence``.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, the posterior has no evidence.
        DivergedError: When called, if a precision leaves its range or the evidence is not finite.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=100.0)
    >>> len(posterior.tuned(lw.tuners.Ascend(steps=5)).trace.steps)  # the start and the end of every step
    6
    """

    steps: int = 100
    rate: float = 0.1
    noise: bool = True
    hyperprior: Hyperprior | None = None

    def __post_init__(self) -> None:
        require_integer("steps", self.steps, least=0)
        POSITIVE.check("rate", self.rate)
        FLAG.check("noise", self.noise)
        HYPERPRIOR.check("hyperprior", self.hyperprior)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior after the last step."""
        search = Search.of(posterior, self.noise, "Ascend", hyperprior=self.hyperprior)
        with torch.inference_mode(False), torch.enable_grad():
            x = search.start.requires_grad_()
            optimiser = torch.optim.Adam([x], lr=self.rate)
            for number in range(self.steps + 1):
                search.steps.append(search.step(x))
                search.refuse_runaway()  # first: far out of range the evidence cannot be computed
                value = search.objective(x)
                search.steps.pop()
                search.record(x, float(value.detach()))
                if number == self.steps:
                    break
                optimiser.zero_grad()
                (-value / posterior.problem.evidence_unit).backward()
                optimiser.step()
        return search.finished(x)
