"""The optimum of the tangent model: the corrected evidence, which is evaluated there, and updates from samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.errors import DivergedError, NumericalError, UnsupportedError
from lapwing.linalg.krylov import conjugate_gradients
from lapwing.linalg.operators import Product
from lapwing.methods.base import METHOD, Method
from lapwing.posteriors.base import NOT_CONVERGED, Posterior, Step, Trace
from lapwing.posteriors.sampled import SampledPosterior
from lapwing.posteriors.weight_space import Mode, WeightPosterior
from lapwing.priors import group_starting_precisions
from lapwing.problem import Problem
from lapwing.runtime.settings import DATA, FLAG, NONE, POSITIVE, integer, one_of, setting
from lapwing.tangent import TangentModel, tangent_model
from lapwing.tuners.base import LARGEST_SLOPE, Search, TunerWithSettings, in_range, minimise

P = TypeVar("P", WeightPosterior, SampledPosterior)
ITERATIONS = 1000  # of conjugate gradients in one Newton step
MEANS = ("network", "tangent")
# Range of precisions in units of the typical curvature of their group: below it the prior has no effect, above it the
# weights have none.
RANGE = (1e-12, 1e5)
PRUNED = 1e3  # in the same units: above it the trace says that the group is not used
SCORE = "log evidence at the tangent model's optimum"


@dataclass(frozen=True, eq=False)
class ModeSolver:
    """A solver for θ*, the optimum under a problem's prior and noise: Newton's method with conjugate gradients.

    The loss is convex in theta, and h is linear along a step, so one pass over the data gives the loss at every step
    length. Systems are solved in units of the prior: there no eigenvalue is below one, at most as many as there are
    data differ from one, and half the squared residual bounds what a step misses. Stops when no step can gain more
    than ``tolerance`` nats, or less than rounding in the network's dtype can resolve.
    """

    model: TangentModel
    base: Tensor  # w̃
    tolerance: float = 1e-8
    max_steps: int = 50

    def __call__(self, problem: Problem, start: Tensor, precondition: Product | None = None) -> Mode:
        """Return θ* and its loss, from ``start``; ``precondition`` approximates the inverse in units of the prior."""
        prior, phi = problem.prior, float(problem.likelihood.dispersion)
        vector = prior.vector.detach()
        unit = vector.rsqrt()
        rounding = torch.finfo(self.model.dtype).eps
        theta = start.clone()
        loss, slope = self.model.gradient(theta - self.base)
        gain = missed = float("inf")
        for _ in range(self.max_steps):
            gradient = slope / phi + vector * (theta - prior.mean)
            value = loss / phi + 0.5 * float(prior.penalty(theta))
            enough = self.tolerance + 4 * rounding * abs(value)
            size = float((unit * gradient).norm())
            if size == 0:
                return Mode(theta, loss)
            tolerance = max(0.1 * enough**0.5 / size, min(1e-2, 0.1 * gain))
            delta = theta - self.base

            def product(v: Tensor, delta: Tensor = delta) -> Tensor:
                """Return the product with A^-½ H A^-½ / φ + I, for H at theta."""
                return unit * self.model.products(delta, unit * v) / phi + v

            solution = conjugate_gradients(
                product,
                (unit * gradient)[None],
                precondition=precondition,
                tolerance=tolerance,
                max_iterations=ITERATIONS,
                truncated=True,
            )
            step = -unit * solution.x[0]
            gain = 0.5 * float(-(gradient @ step))
            missed = 0.5 * (float(solution.residuals[0]) * size) ** 2
            if gain <= enough:
                if missed <= enough:  # one more full step: the value hardly changes, but its slope does
                    return Mode(theta + step, float(self.model.losses(delta, step, torch.ones_like(theta[:1]))[0]))
                continue  # the step gains nothing, but the system was not solved well enough to stop
            theta = theta + self._length(problem, theta, step, value, gain) * step
            loss, slope = self.model.gradient(theta - self.base)
        raise NumericalError(
            f"the optimum of the tangent model was not reached in {self.max_steps} Newton steps: up to "
            f"{gain + missed:.3g} nats are left; expected {self.tolerance:g}. Raise the prior precision."
        )

    def _length(self, problem: Problem, theta: Tensor, step: Tensor, value: float, gain: float) -> Tensor:
        """Return the best of the step lengths 1, 1/2, 1/4, ...; raise if none lowers the objective."""
        prior, phi = problem.prior, float(problem.likelihood.dispersion)
        lengths = 0.5 ** torch.arange(0, 12, dtype=torch.float64, device=theta.device)
        penalties = torch.stack([0.5 * prior.penalty(theta + t * step) for t in lengths]).detach()
        totals = self.model.losses(theta - self.base, step, lengths) / phi + penalties
        best = int(totals.argmin())
        if not float(totals[best]) < value:
            raise NumericalError(
                f"the tangent model's loss does not fall along a Newton step that promises {gain:.3g} nats; "
                "check that the data give the same batches at every pass, or compute in float64."
            )
        return lengths[best]


@dataclass(frozen=True, eq=False)
class LinearMode(TunerWithSettings):
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

    data: Iterable[object] | Data | None = setting(None, DATA | NONE)
    mean: str = setting("network", one_of(MEANS))
    refit: Method | None = setting(None, METHOD | NONE)
    rounds: int = setting(3, integer())
    max_steps: int = setting(40, integer())
    tolerance: float = setting(1e-5, POSITIVE)
    solver_tolerance: float = setting(1e-8, POSITIVE)

    needs_training_data: ClassVar[bool] = True

    def __call__(self, posterior: Posterior) -> WeightPosterior:
        """Return the posterior at the optimum of the corrected evidence."""
        if not isinstance(posterior, WeightPosterior):
            raise UnsupportedError(f"{type(posterior).__name__} has no weights to optimise; use Kron or Full.")
        network = posterior.problem.network
        data = self.read_data(network)
        base = network.with_shift(None).theta().double()
        model = tangent_model(network.with_shift(None), posterior.problem.likelihood, data)
        current, steps = posterior if posterior.mode is not None else _with_starting_precisions(posterior), []
        for number in range(1 if self.refit is None else self.rounds):
            if number:
                current = self._refit(current, base, data)
            current, more = self._maximise(current, model, base)
            steps += more
        trace = Trace("LinearMode", SCORE, tuple(steps), _pruning_remark(current))
        theta = None if self.mean == "network" or current.mode is None else current.mode.theta
        return _with_mean(current, theta, base).with_trace(trace)

    def _maximise(
        self, posterior: WeightPosterior, model: TangentModel, base: Tensor
    ) -> tuple[WeightPosterior, list[Step]]:
        """Maximise the evidence by L-BFGS, with θ* solved for at every point.

        θ* is the optimum of the fit plus the penalty, so the slope of the whole equals the slope at fixed θ*.
        """
        theta = base if posterior.mode is None else posterior.mode.theta
        search = Search.of(replace(posterior, mode=Mode(theta, 0.0)), self.mean == "tangent", "LinearMode", SCORE)
        n_weights = posterior.problem.network.selection.size
        # The slope at fixed θ is wrong by the square root of what θ can still gain.
        solver = ModeSolver(model, base, min(self.solver_tolerance, (0.1 * self.tolerance * n_weights) ** 2))
        limits = partial(_limits, _mean_curvature(posterior).log(), search.start[search.n_precisions :])

        def objective(x: Tensor) -> Tensor:
            nonlocal theta
            low, high = limits(x)
            below = (low - x).clamp_min(0).sum()  # its slope sends the search back into range
            x = x.clamp(low, high)
            mode = _solve(solver, search.at(x.detach()), theta)
            theta = mode.theta
            value: Tensor = replace(search.at(x), mode=mode).log_evidence()
            search.record(x, float(value.detach()))
            return below - value / n_weights

        best, slope = minimise(objective, search.start, self.max_steps, self.tolerance)
        low, high = limits(best)
        message = ""
        if bool((best < low + 0.1).any()):
            message = (
                f"LinearMode: a precision or the noise fell out of range ({search.steps[-1]}), where rounding would "
                "decide; a noise far below the residuals, or none at all, does that. Give the prior, or another noise."
            )
        elif slope > max(LARGEST_SLOPE, 10 * self.tolerance):
            message = (
                f"LinearMode: {self.max_steps} steps left a slope of {slope:.3g} per weight in the log evidence; "
                "expected below 1e-3. Raise max_steps, or tighten solver_tolerance."
            )
        if message:
            best_step = max(search.steps, key=lambda step: step.score)
            raise search.error_at(search.position(best_step), message)
        optimum = search.at(best.minimum(high))
        return replace(optimum, mode=_solve(solver, optimum, theta)), search.steps

    def _refit(self, posterior: WeightPosterior, base: Tensor, data: Data) -> WeightPosterior:
        """Return the posterior with the curvature at θ*, in the structure of ``refit``."""
        assert self.refit is not None
        assert posterior.mode is not None
        problem = posterior.problem
        shifted = replace(problem, network=problem.network.with_shift(posterior.mode.theta - base))
        fitted = self.refit.fit(shifted, data)
        if not isinstance(fitted, WeightPosterior):
            raise UnsupportedError(f"refit={self.refit!r} gives no curvature; expected Full(), Kron() or the like.")
        return replace(posterior, curvature=fitted.curvature)


def _with_mean(posterior: P, theta: Tensor | None, base: Tensor) -> P:
    """Return the posterior with the predictive mean of theta; that of the network itself, at ``base``, for None."""
    network = posterior.problem.network.with_shift(None if theta is None else theta - base)
    theta = (base if theta is None else theta).to(network.dtype)
    return replace(posterior, problem=replace(posterior.problem, network=network), theta=theta)


def _limits(typical: Tensor, noise: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and upper limits of a search at x, (D,) each: around the curvature of each group and the noise.

    ``typical`` is log H/φ of each group under the noise at the start, ``noise`` the log-noise there, empty if it is
    not learned.
    """
    low, high = (math.log(bound) for bound in RANGE)
    log_noise = x[len(typical) :].clamp(noise + low, noise + high)
    middle = torch.cat([typical + (noise - log_noise).sum(), noise])
    return middle + low, middle + high


def _solve(solver: ModeSolver, posterior: WeightPosterior, start: Tensor) -> Mode:
    """Return θ* of the posterior's problem; the posterior preconditions the solve if its structure is suitable."""
    precondition: Product | None = None
    if posterior.current.preconditions:
        precision, root = posterior.precision, posterior.problem.prior.vector.detach().sqrt()
        precondition = lambda v: root * precision.solve(root * v)
    return solver(posterior.problem, start, precondition)


def _mean_curvature(posterior: WeightPosterior) -> Tensor:
    """Return for every precision the mean curvature H/φ of its weights."""
    prior, phi = posterior.problem.prior, posterior.problem.likelihood.dispersion
    curvature = prior.sum_groups(posterior.current.diagonal().detach().to(prior.values)) / phi.to(prior.values)
    scale = prior.counts if prior.scale is None else prior.sum_groups(prior.scale)
    return (curvature / scale).detach()


def _with_starting_precisions(posterior: WeightPosterior) -> WeightPosterior:
    """Return the posterior with precisions to start from, none above the typical curvature of its group."""
    problem, statistics = posterior.problem, posterior.statistics
    guess = group_starting_precisions(problem.prior, posterior.theta, statistics.data * statistics.outputs)
    values = guess.minimum(_mean_curvature(posterior).reshape(guess.shape))
    return posterior.with_problem(problem.with_precisions(values))


def _pruning_remark(posterior: WeightPosterior) -> tuple[str, ...]:
    """Return a remark on the groups that have no effect, if there are any."""
    prior = posterior.problem.prior
    pruned = (prior.values.detach().reshape(-1) > PRUNED * _mean_curvature(posterior)).tolist()
    if not any(pruned):
        return ()
    groups = prior.groups or ("all weights",) * len(pruned)
    names = [name or "(top)" for name, is_pruned in zip(groups, pruned, strict=True) if is_pruned]
    which = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return (
        f"{sum(pruned)} of {len(pruned)} precisions ran far above the curvature ({which}): the tangent model does "
        "better without these weights, and they add next to nothing to the error bars.",
    )


MODES = ("tangent", "network")


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
            each = (row.to(prior.values) for row in current.gamma_samples())
            gammas = torch.stack([prior.sum_groups(row) for row in each])  # (K, groups)
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
        theta = mode.theta if mode is not None and self.noise and current.noise is not None else None
        return replace(_with_mean(current, theta, base), mode=mode)

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
        result = current.with_trace(Trace("SampleEM", "gamma", tuple(steps), (finding,)))
        if change > max(NOT_CONVERGED, self.tolerance) and self.max_steps > 1:
            raise DivergedError(
                f"SampleEM: after {self.max_steps} steps a logarithm moves by {change:.2g}; expected at most "
                f"{self.tolerance:g}. Raise max_steps or Sampled(num_samples=...), take mode='network', or give the "
                "prior.",
                result.trace,
                result,
            )
        return result


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
