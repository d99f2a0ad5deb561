"""The contract of a tuner, the evidence as a function of hyperparameters, and tuners that find its optimum."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property, partial
from itertools import chain, count, islice, repeat
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from lapwing.curvature.base import root_seeds
from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs
from lapwing.data.processes import ALONE, Processes
from lapwing.errors import DataError, DivergedError, UnsupportedError
from lapwing.linalg.dense import cholesky
from lapwing.networks.forward import outside_autocast, refuse_training_mode
from lapwing.networks.network import Network
from lapwing.posteriors.base import NOT_CONVERGED, Posterior, Step, Trace, Tunable, effective_parameters
from lapwing.posteriors.sampled import SampledPosterior
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors import prior_kernel, starting_precisions
from lapwing.problem import Problem
from lapwing.runtime.settings import DATA, FLAG, FUNCTION, NONE, POSITIVE, HasSettings, Rule, describe, integer, setting

P = TypeVar("P", bound=Tunable)
Q = TypeVar("Q", bound=Posterior)
S = TypeVar("S", bound="TunerWithSettings")
Tuner = Callable[[Any], Any]  # from a posterior to the same one under better hyperparameters


class TunerWithSettings(HasSettings):
    """A tuner as a frozen dataclass of its settings; all tuners of the package are.

    ``fit`` and ``Fitted.tuned`` accept any function from a posterior to a posterior, too:

    >>> def fixed(posterior):
    ...     prior = posterior.problem.prior
    ...     return posterior.with_problem(posterior.problem.with_prior(prior.with_precision(0 * prior.values + 3.0)))
    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", tuner=fixed).prior.values.item()
    3.0
    """

    data: Any = None
    needs_training_data: ClassVar[bool] = False  # ``fit`` gives its own data to a tuner that needs some and has none
    holds_out: ClassVar[bool] = False  # whether ``data`` are held-out data
    follows_evidence: ClassVar[bool] = False  # whether it starts from the hyperparameters of the evidence

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior under better hyperparameters, with a ``trace`` of the search."""
        raise NotImplementedError

    def with_data(self: S, data: Data) -> S:
        """Return the tuner with these training data, or unchanged if it has data or needs none."""
        if self.data is not None or not self.needs_training_data:
            return self
        return replace(self, data=data)  # type: ignore[type-var]

    def read_data(self, network: Network) -> Data:
        """Return its training data as the network reads them; raise if it has none."""
        name = type(self).__name__
        if self.data is None:
            raise UnsupportedError(f"{name} needs the training data: {name}(data), or give it to fit().")
        return network.read_data(self.data)


def check_tuner(tuner: object) -> None:
    """Raise if this is the name or the class of a tuner, or no tuner at all."""
    if isinstance(tuner, type):
        raise UnsupportedError(f"tuner is the class {tuner.__name__}; expected an object: call it, with its settings.")
    Rule("an object such as lw.tuners.FixedPoint(), not its name", FUNCTION.holds).check("tuner", tuner)


def give_data(tuner: Tuner, data: Data) -> Tuner:
    """Return the tuner with the training data, if it has a method ``with_data``."""
    with_data: Callable[[Data], Tuner] | None = getattr(tuner, "with_data", None)
    return tuner if with_data is None else with_data(data)


def follows_evidence(tuner: Tuner | None) -> bool:
    """Return whether a tuner starts from the hyperparameters of the evidence, which ``fit`` therefore learns first."""
    return isinstance(tuner, TunerWithSettings) and tuner.follows_evidence


def run_tuner(tuner: Tuner, posterior: P, data: Data | None = None, processes: Processes = ALONE) -> P:
    """Return the posterior that the tuner makes of this one; raise if it makes none."""
    check_tuner(tuner)
    ready = tuner if data is None else give_data(tuner, data)
    processes = processes if data is None else data.processes
    tuned: P = _with_shard(ready, processes, posterior.problem.network)(posterior)
    Rule("a posterior", lambda v: hasattr(v, "problem")).check(f"the result of the tuner {tuner!r:.60}", tuned)
    return tuned


def _with_shard(tuner: Tuner, processes: Processes, network: Network) -> Tuner:
    """Return the tuner with its own ``data`` as the shard of this process, if there are several processes."""
    own = getattr(tuner, "data", None)
    if processes.group is None or not is_dataclass(tuner) or not DATA.admits(own) or isinstance(own, Data):
        return tuner
    shard = network.read_data(own, f"data of {type(tuner).__name__}", processes=processes)
    shard.peek()  # raises if other processes read the same
    return replace(tuner, data=shard)  # type: ignore[type-var, return-value]


LARGEST_SLOPE = 1e-3  # per weight; above it a search has not converged
HYPERPRIOR = Rule("a function of the posterior, or None", lambda v: v is None or FUNCTION.holds(v))

Hyperprior = Callable[[Any], Tensor]  # from a posterior to the log density of its hyperparameters


@dataclass(frozen=True, eq=False)
class Search(Generic[P]):
    """A search over x (D,), float64: the log-precisions of a posterior and, if ``noise``, its log noise variances."""

    posterior: P
    noise: bool
    tuner: str  # the name of the tuner, for traces and errors
    score: str = "log evidence"  # the name of what it maximises
    hyperprior: Hyperprior | None = None  # a log density that is added to the evidence
    steps: list[Step] = field(default_factory=list)  # every point that was tried, in order

    @classmethod
    def of(
        cls, posterior: P, noise: bool, tuner: str, score: str = "log evidence", hyperprior: Hyperprior | None = None
    ) -> Search[P]:
        """Return the search, with the noise only if the likelihood learns it; raise if there is no evidence."""
        if not (posterior.provides(Tunable.log_evidence) and posterior.provides(Tunable.with_noise)):
            raise UnsupportedError(
                f"{type(posterior).__name__} has no evidence to maximise; give the prior, or use Kron or Full."
            )
        score = score if hyperprior is None else f"{score} plus log hyperprior"
        return cls(posterior, noise and posterior.noise is not None, tuner, score, hyperprior)

    @property
    def start(self) -> Tensor:
        """The present hyperparameters, (D,)."""
        parts = [self.posterior.problem.prior.values.detach().double().log().reshape(-1)]
        noise = self.posterior.noise if self.noise else None
        if noise is not None:
            parts.append(noise.detach().double().log().reshape(-1).to(parts[0]))
        with torch.inference_mode(False):
            return torch.cat(parts).clone()

    @cached_property
    def n_precisions(self) -> int:
        """The number of precisions; the other entries of x are noise variances."""
        return int(self.posterior.problem.prior.values.numel())

    def clamp(self, x: Tensor) -> Tensor:
        """Return x within the limits of the posterior, if it has some."""
        limits = self.posterior.limits
        if limits is None:
            return x
        low, high = (limit[: len(x)].to(x) for limit in limits)
        return x.clamp(low, high)

    def at(self, x: Tensor) -> P:
        """Return the posterior at x, or at the nearest point within its limits, differentiable in x."""
        posterior, x = self.posterior, self.clamp(x)
        noise = posterior.noise if self.noise else None
        if noise is not None:
            posterior = posterior.with_noise(x[self.n_precisions :].exp().reshape(noise.shape))
        precisions = x[: self.n_precisions].exp().reshape(posterior.problem.prior.values.shape)
        return posterior.with_problem(posterior.problem.with_precisions(precisions))

    def objective(self, x: Tensor) -> Tensor:
        """Return the log evidence at x plus the log density of the hyperprior, differentiable in x."""
        posterior = self.at(x)
        value = posterior.log_evidence()
        if self.hyperprior is None:
            return value
        density = self.hyperprior(posterior)
        if not isinstance(density, Tensor) or density.numel() != 1:
            raise UnsupportedError(
                f"the hyperprior gave {describe(density)}; expected a log density, a tensor with one entry."
            )
        if density.is_complex() or (value.requires_grad and not density.requires_grad):
            raise UnsupportedError(
                f"the hyperprior gave {describe(density)} that does not depend on the hyperparameters; expected a real "
                "number computed from the posterior that it is called with, without detach()."
            )
        return value + density.reshape(()).to(value)

    def step(self, x: Tensor, score: float = math.nan, gamma: float | None = None) -> Step:
        """Return the entry of the trace for x."""
        values = self.clamp(x.detach()).exp().tolist()
        return Step(score, tuple(values[: self.n_precisions]), tuple(values[self.n_precisions :]), gamma)

    def record(self, x: Tensor, score: float, gamma: float | None = None) -> None:
        """Add x to the steps; raise if its score is not finite."""
        self.steps.append(self.step(x, score, gamma))
        if not math.isfinite(score):
            raise self.error_at_best("the evidence is not finite. Give the prior, or start from another one.")

    def result(self, x: Tensor, *findings: str) -> P:
        """Return the posterior at x with the trace."""
        return self.at(x.detach()).with_trace(Trace(self.tuner, self.score, tuple(self.steps), findings))

    def error_at(self, x: Tensor, message: str) -> DivergedError:
        """Return the error with the trace and the posterior at x."""
        posterior = self.result(x, message)
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


def start_near_optimum(posterior: Q) -> Q:
    """Return the posterior with precisions near the optimum of the evidence; unchanged if its prior is fixed."""
    problem, statistics = posterior.problem, posterior.statistics
    if not posterior.provides(Posterior.with_problem):
        return posterior
    values = starting_precisions(problem.prior, problem.network.theta(), statistics.data * statistics.outputs)
    return posterior.with_problem(problem.with_precisions(values))


def in_range(precisions: Collection[float], posterior: Tunable) -> bool:
    """Return whether the evidence can have an optimum at these hyperparameters of the prior."""
    problem = posterior.problem
    return posterior.limits is not None or problem.prior.in_range(precisions, problem.network.theta())


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
class MaximiseEvidence(TunerWithSettings):
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

    noise: bool = setting(False, FLAG)
    max_steps: int = setting(60, integer())
    tolerance: float = setting(1e-5, POSITIVE)
    hyperprior: Hyperprior | None = setting(None, HYPERPRIOR)

    def __call__(self, posterior: P) -> P:
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
        return search.result(best)


@dataclass(frozen=True)
class Ascend(TunerWithSettings):
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

    steps: int = setting(100, integer(0))
    rate: float = setting(0.1, POSITIVE)
    noise: bool = setting(True, FLAG)
    hyperprior: Hyperprior | None = setting(None, HYPERPRIOR)

    def __call__(self, posterior: P) -> P:
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
        return search.result(x)


LARGEST_CHANGE = 10.0  # of a logarithm in one step: far from the fixed point the update overshoots
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


Term = Callable[[Problem], Tensor]  # the term of one block, under the prior and noise of a problem


def _term(inputs: Inputs, targets: Tensor, problem: Problem) -> Tensor:
    """Return a block's log-likelihood less half of log det(I + K/φ) of its kernel K, differentiable in prior and noise.

    The Jacobian is multiplied by the root of the likelihood's Hessian. Sums are float64.
    """
    network, likelihood = problem.network, problem.likelihood
    phi = likelihood.dispersion.to(network.device)
    tangent = network.linearise(inputs)
    f = tangent.f.double()
    y = likelihood.targets(f, targets)
    jacobians = tangent.jacobians(root_seeds(likelihood.root(f, y)).to(network.dtype)).double()
    kernel = prior_kernel(jacobians, problem.prior) / phi
    eye = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
    logdet = 2 * cholesky(eye + kernel, "the kernel of a block of data").diagonal().log().sum()
    count = likelihood.count(f, y)
    fit = -likelihood.loss(f, y).sum() / phi - count * likelihood.log_normaliser(phi, network.output_shape[-1])
    return fit - 0.5 * logdet


def terms(problem: Problem, data: Data, block: int, label: str = "blocks") -> Iterator[Term]:
    """Yield the term of each block; a batch is cut into blocks of at most ``block`` data."""
    for batch in data.batches(label):
        size = problem.network.count(batch.inputs)
        for start in range(0, size, block):
            rows = slice(start, min(start + block, size))
            yield partial(_term, problem.network.take(batch.inputs, rows), batch.targets[rows])


@outside_autocast
def evidence_bound(posterior: Any, data: Iterable[object] | Data, block: int = 32) -> Tensor:
    r"""Return a lower bound of the log evidence of ``Full()``, from the kernels of blocks of data (Immer et al. 2023).

    $$ \log p(D \mid \tilde w) - \tfrac12 \|\tilde w - \mu\|_A^2
       - \tfrac12 \sum_b \log\det (I + J_b A^{-1} J_b^\top / \phi) $$

    By Fischer's inequality the log-determinant of the whole kernel is at most the sum over its diagonal blocks, so
    this is at most the evidence, and equal to it for one block.

    Cost: one pass over the data; memory (block C)², whatever the number of data or weights.

    Args:
        posterior: A posterior of any method, ``MapOnly()`` included: only its network, likelihood and prior are used.
        data: The training data in the form that ``fit`` takes.
        block: The largest number of data in a block; batches are not joined.

    Returns:
        The bound in nats, a scalar in float64.

    Raises:
        UnsupportedError: If ``block`` is not a positive integer.
        ModelError: If the model is in training mode, or its weights have changed since the fit.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", method=lw.Full(), prior=1.0)
    >>> bool(lw.tuners.evidence_bound(posterior, [(x, x.sin())], block=10) < posterior.log_evidence())
    True
    """
    core = getattr(posterior, "base", posterior)  # of the result of fit, or of a posterior: a mixture has no weights
    Rule("a posterior that fit() made", lambda v: hasattr(v, "problem")).check("posterior", core)
    integer().check("block", block)
    network = core.problem.network
    refuse_training_mode(network.model)
    fingerprint, processes = getattr(posterior, "fingerprint", None), getattr(posterior, "processes", ALONE)
    if fingerprint is not None:
        fingerprint.refuse_other(network.model)
    total = torch.zeros((), dtype=torch.float64, device=network.device)
    with processes.share_errors():
        for term in terms(core.problem, network.read_data(data, processes=processes), block):
            total = total + term(core.problem)
        total = processes.differentiable_sum(total)
    return total - 0.5 * core.problem.prior.penalty(core.theta.double())


@dataclass(frozen=True, eq=False)
class MaximiseBound(TunerWithSettings):
    """A tuner that maximises ``evidence_bound`` by gradient steps on single blocks of data.

    A block's term times the number of blocks is an unbiased estimate of the bound, whatever the sizes of the blocks,
    and so is its gradient; nothing is summed over all data. The smaller the blocks, the looser the bound, and the
    more its optimal precisions exceed those of the evidence.

    Cost of a step: the layer-wise Jacobian of one block and a Cholesky factor of size block times C.

    Args:
        data: The training data; None takes those of ``fit``.
        block: The largest number of data in a block; batches are not joined.
        steps: The number of Adam steps.
        rate: The first learning rate of Adam; it falls linearly to zero.
        noise: Whether to learn the noise too, if the likelihood has one for all outputs.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, there are no data or no evidence.
        DivergedError: When called, if the last precision is out of range or the bound is not finite.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> tuner = lw.tuners.MaximiseBound(block=10, steps=20)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", tuner=tuner)
    >>> len(posterior.trace.steps)
    20
    """

    data: Iterable[object] | Data | None = setting(None, DATA | NONE)
    block: int = setting(32, integer())
    steps: int = setting(300, integer())
    rate: float = setting(0.1, POSITIVE)
    noise: bool = setting(False, FLAG)

    needs_training_data: ClassVar[bool] = True

    def __call__(self, posterior: Q) -> Q:
        """Return the posterior after the last step."""
        data = self.read_data(posterior.problem.network)
        search = Search.of(posterior, self.noise, "MaximiseBound", "estimate of the bound from one block")
        if search.noise and posterior.noise is not None and posterior.noise.ndim:
            raise UnsupportedError(
                "MaximiseBound(noise=True) learns one noise for all outputs, and this likelihood has one for each; "
                "use MaximiseEvidence, or Gaussian() with a single noise."
            )
        n_blocks, processes = sum(1 for _ in terms(posterior.problem, data, self.block, "counting")), data.processes
        if not any(processes.gather_numbers(n_blocks)):
            raise DataError("the data have no blocks; expected at least one datum.")
        x = search.start.requires_grad_()
        optimiser = torch.optim.Adam([x], lr=self.rate)
        theta = posterior.theta.double()
        endless = chain.from_iterable(terms(posterior.problem, data, self.block) for _ in count())
        # A process without data takes part in the sums over all.
        zero = lambda problem: 0 * problem.prior.values.double().sum()
        blocks = islice(endless, self.steps) if n_blocks else repeat(zero, self.steps)
        for number, term in enumerate(blocks):
            for group in optimiser.param_groups:
                group["lr"] = self.rate * (1 - number / self.steps)
            with torch.inference_mode(False), torch.enable_grad():
                # Each process adds one of its blocks.
                own = n_blocks * term(search.at(*processes.sum_gradients(x)).problem)
                value = processes.differentiable_sum(own) - 0.5 * search.at(x).problem.prior.penalty(theta)
                search.record(x, float(value.detach()))
                optimiser.zero_grad()
                (-value / posterior.problem.network.selection.size).backward()
                optimiser.step()
        search.refuse_runaway()
        return search.result(x)
