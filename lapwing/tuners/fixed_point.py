"""MacKay's updates of precisions and noise, with γ from the curvature or from samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.errors import DivergedError, UnsupportedError
from lapwing.posteriors.base import NOT_CONVERGED, Posterior, Step, Trace, effective_parameters
from lapwing.posteriors.sampled import SampledPosterior
from lapwing.posteriors.weight_space import Mode, WeightPosterior
from lapwing.problem import Problem
from lapwing.runtime.settings import DATA, FLAG, NONE, POSITIVE, integer, one_of, setting
from lapwing.tangent import tangent_model
from lapwing.tuners.base import Search, TunerWithSettings, in_range
from lapwing.tuners.linear_mode import ModeSolver

LARGEST_CHANGE = 10.0  # of a logarithm in one step: far from the fixed point the update overshoots
MODES = ("tangent", "network")

W = TypeVar("W", bound=WeightPosterior | SampledPosterior)


@dataclass(frozen=True)
class FixedPoint(TunerWithSettings):
    r"""A tuner that iterates MacKay's updates, group by group, until they converge.

    $$ \alpha_d = \gamma_d / \|\tilde w_d\|^2, \qquad \phi = \mathrm{SSE} / (N C - \gamma) $$

    γ is the number of weights that the data determine. The fixed point is the stationary point that
    ``MaximiseEvidence`` finds. An update that would lower the evidence is halved, and so are those of a logarithm that
    changes direction. ``posterior.effective_parameters()`` has γ of every layer at the end. For a posterior made of
    samples γ is an estimate, and no update is halved for its evidence.

    Cost: the posterior variance of every weight at each step; no pass over the data.

    Args:
        noise: Whether to update the noise too. A noise that the user gave is kept in any case; if each output has its
            own noise, each is updated with its own γ.
        max_steps: The largest number of updates; 1 makes a single update without a check of convergence.
        tolerance: Stop when no logarithm changes by more than this.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, the posterior has no evidence.
        DivergedError: When called, if a precision leaves its range, a number is not finite, or a logarithm still
            changes by more than 1e-2 after ``max_steps`` updates.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=100.0)
    >>> tuned = posterior.tuned(lw.tuners.FixedPoint())
    >>> bool(tuned.log_evidence() > posterior.log_evidence())
    True
    """

    noise: bool = setting(True, FLAG)
    max_steps: int = setting(200, integer())
    tolerance: float = setting(1e-6, POSITIVE)

    def __call__(self, posterior: W) -> W:
        """Return the posterior at the fixed point."""
        search = Search.of(posterior, self.noise, "FixedPoint")
        x = search.start
        damping, last_change = torch.ones_like(x), torch.zeros_like(x)
        with torch.no_grad():
            value = float(search.at(x).log_evidence())
            for _ in range(self.max_steps):
                new, gamma = self._update(search.at(x), search.noise)
                search.record(x, value, gamma)
                search.refuse_runaway()
                if not bool(torch.isfinite(new).all()):
                    raise search.error_at(x, self._message("an update is not finite"))
                change = new - x
                largest = float(change.abs().max())
                if largest <= self.tolerance:
                    return search.result(x)
                # A logarithm that changes direction overshoots: near the optimum the evidence is too flat to show it.
                damping = torch.where(change * last_change < 0, 0.5 * damping, (1.2 * damping).clamp_max(1))
                last_change = change.clamp(-LARGEST_CHANGE, LARGEST_CHANGE)
                x, value = self._line_search(search, x, x + damping * last_change, value)
        if largest > NOT_CONVERGED and self.max_steps > 1:
            reason = f"after {self.max_steps} steps a logarithm moves {largest:.2g}"
            raise search.error_at(x, self._message(reason))
        finding = f"stopped after {self.max_steps} steps, where a logarithm still moved {largest:.2g}"
        return search.result(x, finding)

    def _message(self, reason: str) -> str:
        return f"FixedPoint: {reason}; expected below {self.tolerance:g}. Raise max_steps, or use MaximiseEvidence."

    def _line_search(self, search: Search[W], x: Tensor, new: Tensor, value: float) -> tuple[Tensor, float]:
        """Return the update, or the half, quarter, ... of it that does not lower the evidence, and the evidence there.

        Each logarithm changes in the direction of its slope, so a short enough step raises the evidence; full ones may
        oscillate. With stochastic estimates, skip this line search: evidence and γ are estimated independently.
        """
        if search.posterior.is_sampled:
            return new, float(search.at(new).log_evidence())
        for halvings in range(8):
            trial = x + (new - x) * 0.5**halvings
            evidence = float(search.at(trial).log_evidence())
            if evidence >= value - 1e-12 * abs(value):
                break
        return trial, evidence

    def _update(self, current: WeightPosterior | SampledPosterior, noise: bool) -> tuple[Tensor, float]:
        """Return MacKay's update of all logarithms, (D,), with the noise or without it, and γ of all weights."""
        prior = current.problem.prior
        effective = effective_parameters(current)
        gammas, total = effective.by_precision, effective.total
        unseen = current.unseen_gamma()
        if unseen is not None:  # the stationary point of a bound is not that of the evidence
            gammas, total = gammas + prior.sum_groups(unseen).to(gammas), total + float(unseen.sum())
        squares = prior.squares(current.centre)
        new = [(gammas.clamp_min(1e-12) / squares.clamp_min(1e-300)).log()]
        if noise:
            new.append(self._noise(current, total).log().reshape(-1).to(new[0]))
        return torch.cat(new), total

    def _noise(self, current: WeightPosterior | SampledPosterior, gamma: float) -> Tensor:
        """Return the update of the noise variances, () or (C,)."""
        statistics, noise = current.statistics, current.noise
        assert noise is not None
        if noise.ndim == 0 or not isinstance(current, WeightPosterior):
            squares = 2 * torch.as_tensor(current.loss, dtype=torch.float64, device=noise.device)
            return _noise_update(squares, torch.full_like(noise, gamma), statistics.data * statistics.outputs, noise)
        squares = 2 * torch.tensor(statistics.losses, dtype=torch.float64, device=noise.device)
        return _noise_update(squares, _gamma_by_output(current, noise), statistics.data, noise)


def _gamma_by_output(current: WeightPosterior, noise: Tensor) -> Tensor:
    """Return γ_c = tr(Λ⁻¹ H_c / r_c), which is minus the slope of log det Λ in log r_c, (C,)."""
    with torch.inference_mode(False), torch.enable_grad():
        log_noise = noise.detach().log().clone().requires_grad_()
        posterior = current.with_noise(log_noise.exp())
        logdet = posterior.current.logdet(torch.ones_like(log_noise[0]), posterior.problem.prior)
        (slope,) = torch.autograd.grad(logdet, log_noise)
    return -slope


def _noise_update(squares: Tensor, gamma: Tensor, count: float, noise: Tensor) -> Tensor:
    """Return SSE / (N - γ), or (SSE + γ φ) / N, which has the same fixed point, if γ is nearly N or larger.

    γ of a structure that ignores correlations may exceed N, though never at the fixed point.
    """
    left = count - gamma
    return torch.where(left >= 1, squares / left.clamp_min(1), (squares + gamma * noise) / count)


@dataclass(frozen=True, eq=False)
class SampleEM(TunerWithSettings):
    r"""A tuner that iterates MacKay's updates with γ from function-space samples (Antorán et al. 2023).

    $$ \gamma_d = \tfrac1K \sum_j z_{jd}^\top (G z_j)_d / \phi, \qquad \alpha_d = \gamma_d / \|\theta_{*d}\|^2,
       \qquad \phi = \mathrm{SSE}(\theta_*) / (NC - \gamma) $$

    θ* is the optimum of the tangent model, as in ``LinearMode``, and the evidence of the result is that of θ*. A noise
    learned at θ* is too small for f(w̃), so with ``noise=True`` the predictive mean is h(θ*, x) too. The noise of the
    samples stays the same from step to step, so that the map is deterministic and has a fixed point; the trace has γ
    and its standard error at every step. γ in function space is never negative, and one sample determines it to a
    relative error of sqrt(2/γ).

    Cost of a step: the samples at the new precision and one product with them, and θ* from its last value. For a
    single precision a Krylov basis gives both without a pass over the data.

    Args:
        data: The training data; None takes those of ``fit``. Not used with ``mode="network"``.
        mode: "tangent" takes θ*; "network" takes the trained weights w̃ instead, which costs no passes. γ falls
            as α rises, so with w̃ each step goes half the way, in the logarithm: full steps would overshoot to
            precisions that are smaller than the fixed point, and so more expensive to solve for.
        noise: Whether to learn the noise of a Gaussian likelihood. With ``mode="tangent"`` the mean is then that of θ*,
            as in ``LinearMode(mean="tangent")``; otherwise mean and noise stay those of w̃.
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

    data: Iterable[object] | Data | None = setting(None, DATA | NONE)
    mode: str = setting("tangent", one_of(MODES))
    noise: bool = setting(False, FLAG)
    max_steps: int = setting(50, integer())
    tolerance: float = setting(1e-3, POSITIVE)
    solver_tolerance: float = setting(1e-4, POSITIVE)

    needs_training_data: ClassVar[bool] = True

    def __call__(self, posterior: Posterior) -> SampledPosterior:
        """Return the posterior at the fixed point."""
        if not isinstance(posterior, SampledPosterior):
            raise UnsupportedError(f"{type(posterior).__name__} has no samples; use method=Sampled().")
        base = posterior.problem.network.with_shift(None).theta().double()
        current = self._with_mode(posterior, None, base)
        solver, loss = self._solver(current, base), current.statistics.loss
        theta = base if solver is None else posterior.centre
        steps: list[Step] = []
        for _ in range(self.max_steps):
            if solver is not None:
                mode = solver(current.problem, theta)
                theta, loss = mode.theta, mode.loss
            prior = current.problem.prior
            gammas = torch.stack(
                [prior.sum_groups(row.to(prior.values)) for row in current.gamma_samples()]
            )  # (K, groups)
            updated = self._update(current, gammas.mean(0), theta, float(loss))
            change = _largest_change(current.problem, updated.problem)
            steps.append(_trace_step(current.problem, gammas.sum(1, keepdim=True)))
            _refuse_diverged(current, gammas, updated.problem.prior.values, change, steps)
            current = updated
            if change <= self.tolerance:
                break
        if solver is not None:
            current = self._with_mode(current, solver(current.problem, theta), base)
        return self._result(current, steps, gammas, change)

    def _solver(self, posterior: SampledPosterior, base: Tensor) -> ModeSolver | None:
        """Return the solver for θ*, or None if w̃ takes its place."""
        if self.mode == "network":
            return None
        network = posterior.problem.network.with_shift(None)
        data = self.read_data(network)
        model = tangent_model(network, posterior.problem.likelihood, data)
        return ModeSolver(model, base, self.solver_tolerance)

    def _with_mode(self, current: SampledPosterior, mode: Mode | None, base: Tensor) -> SampledPosterior:
        """Return the posterior with the evidence of θ*, and with its mean if the noise is learned there."""
        moved = mode is not None and self.noise and current.noise is not None
        theta = mode.theta if mode is not None and moved else base
        network = current.problem.network.with_shift(theta - base if moved else None)
        theta = theta.to(network.dtype)
        return replace(current, problem=replace(current.problem, network=network), theta=theta, mode=mode)

    def _update(self, current: SampledPosterior, gamma: Tensor, theta: Tensor, loss: float) -> SampledPosterior:
        """Return the posterior under the updated precisions and, if it is learned, the updated noise."""
        prior = current.problem.prior
        precision = gamma.clamp_min(1e-12) / prior.squares(theta).clamp_min(1e-300)
        if self.mode == "network":
            precision = (precision * prior.values.reshape(precision.shape).to(precision)).sqrt()
        problem = current.problem.with_precisions(precision.reshape(prior.values.shape))
        if self.noise and current.noise is not None:
            count = current.statistics.data * current.statistics.outputs
            phi = 2 * loss / max(count - float(gamma.sum()), 1e-3 * count)
            likelihood = problem.likelihood.with_dispersion(torch.tensor(phi, dtype=torch.float64).to(precision))
            problem = problem.with_likelihood(likelihood)
        return current.warm_start(problem)

    def _result(self, current: SampledPosterior, steps: list[Step], gammas: Tensor, change: float) -> SampledPosterior:
        """Return the posterior with its trace; raise if the last change was too large."""
        finding = f"gamma {steps[-1].gamma:.4g} ± {steps[-1].error:.2g} from {len(gammas)} samples"
        if gammas.shape[1] > 1:
            finding += f", of a group ± {_standard_error(gammas):.0%} of it or less"
        if change > self.tolerance:
            finding += f"; a logarithm still moved by {change:.2g} at the last step"
        trace = Trace("SampleEM", "gamma", tuple(steps), (finding,))
        if change > max(NOT_CONVERGED, self.tolerance) and self.max_steps > 1:
            raise DivergedError(
                f"SampleEM: after {self.max_steps} steps a logarithm moves by {change:.2g}; expected at most "
                f"{self.tolerance:g}. Raise max_steps or Sampled(num_samples=...), take mode='network', or give the "
                "prior.",
                trace,
                current.with_trace(trace),
            )
        return current.with_trace(trace)


def _refuse_diverged(
    current: SampledPosterior, gammas: Tensor, precisions: Tensor, change: float, steps: list[Step]
) -> None:
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


def _standard_error(gammas: Tensor) -> float:
    """Return the standard error of γ (K, 1); for several groups (K, groups) the largest, relative to its mean."""
    if len(gammas) < 2:
        return math.inf
    each = gammas.std(0) / math.sqrt(len(gammas))
    return float(each if len(each) == 1 else (each / gammas.mean(0)).max())


def _trace_step(problem: Problem, totals: Tensor) -> Step:
    """Return the entry of the trace, for γ of all weights from each sample (K, 1)."""
    noise = (float(problem.likelihood.dispersion),) if problem.likelihood.learns_dispersion else ()
    gamma = float(totals.mean())
    return Step(gamma, tuple(problem.prior.values.reshape(-1).tolist()), noise, gamma, _standard_error(totals))


def _largest_change(one: Problem, other: Problem) -> float:
    """Return the largest change of a logarithm, precisions and dispersion included."""
    precisions = (other.prior.values.log() - one.prior.values.log()).abs().max()
    noise = (other.likelihood.dispersion.log() - one.likelihood.dispersion.log()).abs()
    return max(float(precisions), float(noise))
