"""VaLLA: variational inducing points for linearised Laplace (Ortega, Rodríguez-Santana, Hernández-Lobato 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.curvature.base import Sweep
from lapwing.curvature.kronecker import prior_precision
from lapwing.data.batches import Data
from lapwing.data.inputs import Batch, is_real_tensor
from lapwing.data.processes import ALONE, Processes
from lapwing.data.streams import DrawnRows, shuffle_batches
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.likelihoods.base import Likelihood, energy, refuse_energy, refuse_ignored
from lapwing.linalg.dense import smooth_whitening
from lapwing.linalg.stochastic import Inducing
from lapwing.methods.base import Conformance, Cost, Exactness, Method, Work, Workload, refuse_g_prior, with_validation
from lapwing.methods.inducing_points import STARTS, InducingPoints, Placement, whitened_rows
from lapwing.networks.tangent import LayerJacobians
from lapwing.posteriors.base import Step, Trace
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors import prior_kernel, starting_precisions
from lapwing.problem import Problem, summed_loss
from lapwing.runtime.memory import PIECE_SHARE, budget, chunks
from lapwing.runtime.settings import NONE, POSITIVE, Rule, integer, is_real, one_of, setting
from lapwing.runtime.threads import EarlyStopping, ProgressBar, independent_generator, numbered_generator
from lapwing.values.gaussian import FunctionGaussian

TRIAL = 5  # steps that are timed
SHARE = Rule("a number between 0 and 1", lambda v: is_real(v) and 0 <= v <= 1)
FEW_ROWS, FEW_BYTES = 20_000, 2**30  # outputs of all data, and bytes of their layer factors, up to which L-BFGS is used
PATIENCE = 5  # steps without progress after which the search has converged
PROGRESS = 1e-9  # relative decrease of the objective that counts as progress
STEPS = {"lbfgs": 300, "adam": 500, "none": 200}  # default for each optimiser; "none" to learn only the covariance
CONVERGED = 1e-2  # relative change of the objective over the last quarter of the steps
HALVINGS = 30  # of a natural-gradient step before it is given up
COARSE = tuple(math.exp(k) for k in range(-6, 7))  # factors on the prior variance that every check tries
FINE = tuple(math.exp(k / 8) for k in range(-12, 13))  # factors that are tried for the best state at the end
ROUNDS = 8  # rounds of FINE at most, each around the best factor of the last: five decades to either side


@dataclass(frozen=True)
class VaLLA(Method):
    r"""Linearised Laplace approximation with ``num_inducing`` inducing points at learned inputs.

    An inducing point is one output of the network at one input. The mean of the posterior stays the network's output;
    given the points, its covariance is known in closed form. Their locations are learned by gradient on a lower bound
    of the evidence (``alpha=0``), together with the prior precision if no prior was given. ``alpha=1``, as published,
    learns on the predictive log-likelihood of the training data instead. It then learns covariance, prior and noise,
    and the result is not the Laplace posterior of a given prior.

    Args:
        num_inducing: The number M of points.
        alpha: 0 for the evidence bound, 1 for the predictive log-likelihood, between the two for ``Gaussian`` only.
        start: Initial locations: training outputs with the largest remaining variance ("greedy"), training outputs
            that lower the sum of all variances most ("trace"), centres of the inputs of each class ("kmeans") or random
            training data ("random"). None is "greedy"; with L-BFGS also "trace", and the better bound is kept.
        optimiser: "lbfgs" on all data, "adam" on batches (time and memory of a step do not depend on the number of
            data), or "none" for points that stay at their initial locations. None is "lbfgs" for at most 20,000 outputs
            whose layer factors fit in a gigabyte, with ``alpha=0`` and without validation data; otherwise "adam".
        steps: The largest number of steps. None is 300 for L-BFGS, 500 for Adam and 200 if only the covariance is
            learned.
        learning_rate: Step size of Adam, for locations in units of their standard deviation.
        batch_size: Rows in a batch of Adam; it does not depend on the batches of the data.
        patience: With validation data, ``fit(..., validation=data)``, Adam keeps the locations, prior and noise with
            their highest log-likelihood, and stops after so many checks without improvement.
        candidates: Training outputs from which "greedy" and "trace" choose, and data from which the others draw.

    Raises:
        UnsupportedError: A setting is out of range, or settings exclude each other. ``fit`` also raises it for a
            likelihood without this ``alpha``, for token-level outputs with ``alpha`` above 0 and for ``g_prior``.

    Cost: a step of Adam takes the work of C backward passes over a batch, a differentiable backward pass over the M
    points, their (B C, M) kernel and M³; one of L-BFGS takes the kernel with all data. At the end one pass over the
    data (``alpha=0``). A prediction takes C backward passes and the kernel with M points.
    Exact when: the points are at all outputs of all data.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 20)[:, None].double()
    >>> net = torch.nn.Linear(1, 1).double()
    >>> posterior = lw.fit(net, [(x, x)], "regression", method=lw.VaLLA(num_inducing=5), prior=1.0)
    >>> posterior.functions(x).cov.shape
    torch.Size([20, 1, 1])
    """

    num_inducing: int = setting(100, integer())
    alpha: float = setting(0.0, SHARE)
    start: str | None = setting(None, one_of(STARTS) | NONE)
    optimiser: str | None = setting(None, one_of(STEPS) | NONE)
    steps: int | None = setting(None, integer() | NONE)
    learning_rate: float = setting(0.01, POSITIVE)
    batch_size: int = setting(100, integer())
    patience: int = setting(5, integer())
    candidates: int = setting(1000, integer())
    validation: Data | None = field(default=None, init=False, repr=False, compare=False)  # set by ``fit``
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance(
        (Exactness(lambda weights, rows: VaLLA(num_inducing=rows), "network"),),
        small=lambda model: {"": VaLLA(num_inducing=3, steps=2)},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha > 0 and self.optimiser in ("lbfgs", "none"):
            raise UnsupportedError(
                f'optimiser is "{self.optimiser}" and alpha is {self.alpha}; the collapsed bound belongs to alpha=0; '
                'use optimiser="adam" with others.'
            )

    def with_early_stopping(self, validation: Data) -> VaLLA:
        """Return the method with validation data for Adam; unchanged if it has another optimiser."""
        return self if self.optimiser in ("lbfgs", "none") else with_validation(self, validation)

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        """Return the posterior; ``lw.fit`` calls this.

        Args:
            problem: Network, likelihood and prior.
            data: The training data.
            generator: Source of randomness for initial locations and batches; seed 0 if None.
        """
        self._refuse_problem(problem)
        network, generator = problem.network, independent_generator(generator)
        statistics = summed_loss(network, problem.likelihood, data)
        problem = problem.with_residual_noise(statistics)
        if problem.learn_prior:
            rows = statistics.data * statistics.outputs
            precision = starting_precisions(problem.prior, network.theta(), rows)
            problem = problem.with_precisions(precision)
        pool = DrawnRows.draw(data, max(self.candidates, self.num_inducing), generator)
        placement = Placement(network, pool, generator)
        rows = pool.total * placement.outputs
        place = lambda start: placement.start(start, self.num_inducing, problem.prior, self.candidates)
        if self.num_inducing >= rows:
            anchors, movable = placement.every_output(), False
            optimiser = "none" if self.alpha == 0 and self.validation is None else "adam"
        else:
            anchors = place(self.start or "greedy")
            movable = is_real_tensor(anchors.inputs)
            optimiser = self.optimiser or self.optimiser_for(network.footprint.width, rows)
        points = InducingPoints(problem, anchors, statistics, pool.total, movable)
        if optimiser == "lbfgs" and movable:
            starts = [points] if self.start else [points, replace(points, anchors=place("trace"))]
            ends = [learn_collapsed(each, data, self.steps or STEPS["lbfgs"]) for each in starts]
            return max(ends, key=lambda each: each.score).posterior(data)
        return self._learn_on_batches(points, data, generator) if optimiser == "adam" else points.posterior(data)

    def _refuse_problem(self, problem: Problem) -> None:
        """Raise if this method cannot fit the likelihood, the prior or the outputs."""
        refuse_energy(problem.likelihood, self.alpha)
        refuse_g_prior(self, problem.prior)
        if self.alpha > 0 and len(problem.network.output_shape) > 1:
            raise UnsupportedError(
                f"alpha is {self.alpha} for token-level outputs (B, T, C); expected outputs (B, C). Use alpha=0."
            )

    def optimiser_for(self, width: int, rows: int) -> str:
        """Return the default optimiser for data with ``rows`` outputs in total, ``width`` numbers of factors each."""
        few = 8.0 * rows * width < FEW_BYTES and rows <= FEW_ROWS
        return "lbfgs" if few and self.alpha == 0 and self.validation is None else "adam"

    def _learn_on_batches(self, start: InducingPoints, data: Data, generator: torch.Generator) -> WeightPosterior:
        """Return the posterior as learned by Adam, or the one at the initial locations if its bound is higher.

        Batches are noisy, and ReLU kernels are discontinuous, so a gradient step can lower the bound. With alpha
        above 0 or validation data another criterion chose the state, which then stays.
        """
        learned = learn_stochastic(start, data, self, generator)
        posterior = learned.posterior(data)
        if self.alpha > 0 or not start.movable or self.validation is not None:
            return posterior
        initial = replace(start, log_scale=learned.log_scale).posterior(data)
        if float(initial.log_evidence()) <= float(posterior.log_evidence()):
            return posterior
        finding = "the initial locations have a higher bound than the learned ones and are kept"
        return initial.with_trace(Trace("VaLLA", "bound", learned.steps, (*learned.findings, finding)))

    def cost(self, workload: Workload) -> Cost:
        rows, data = workload.rows, workload.data
        points = min(self.num_inducing, rows)
        pairs = Work(products=workload.outputs * points * workload.gradient)  # the kernel of one datum with the points
        once = workload.kernel(min(max(self.candidates, points), rows))
        note = f"{points} points"
        if points < rows:
            optimiser = self.optimiser or self.optimiser_for(workload.footprint.width, rows)
            all_data, steps = optimiser == "lbfgs", self.steps or STEPS[optimiser]
            starts = 2 if all_data and self.start is None else 1
            batch = data if all_data else min(self.batch_size, data)
            at_points = points * Work(4 * workload.jacobians(1), 3 * points * workload.gradient, points**2)
            at_data = 3 * pairs + Work(0.0 if all_data else workload.jacobians())
            once += starts * steps * (batch * at_data + at_points)
            note += f", {steps} steps of {batch} data"
        fit = Work(workload.jacobians(), workload.squares) + pairs
        predict = Work(workload.jacobians(), workload.quadratic) + pairs
        stored = points * (workload.itemsize * workload.input_size + 8 * (1 + points)) + 8 * workload.weights
        candidates = min(max(self.candidates, points), rows)
        peak = workload.jacobian_bytes(True) + 8 * candidates * (workload.gradient + 3 * candidates)
        return workload.cost(stored, peak, fit, predict, once, note)

    def trial(self, workload: Workload) -> VaLLA:
        """Return the method with a few steps of the optimiser that it takes for these data."""
        optimiser = self.optimiser or self.optimiser_for(workload.footprint.width, workload.rows)
        return replace(self, steps=min(TRIAL, self.steps or TRIAL), optimiser=optimiser)


def collapsed_bound(points: InducingPoints, data: Data) -> Callable[[Tensor], tuple[Tensor, float]]:
    """Return the negative collapsed evidence bound (Titsias 2009), up to a constant, as a function of moves.

    The function returns the bound, differentiable in the moves and in the prior variance of the points, and
    KL(q || prior). The bound is NaN where the kernel overflows: a line search may step too far, and then ends.
    One pass over the data; their Jacobians, seeded with the root of the curvature, are kept as layer factors. Where
    these do not fit the byte budget, every evaluation passes over the data, and computes each part of the kernel twice.
    """
    problem, network, prior = points.problem, points.problem.network, points.problem.prior
    rows, processes = _Rows.read(Sweep(network, problem.likelihood, data, label="inducing points")), data.processes
    precision = prior_precision(prior, network.layout, network.selection)
    own_trace = sum(float(precision.quadratic(jacobian, False).sum()) for jacobian in rows)
    prior_trace = float(processes.sum([torch.tensor(own_trace, dtype=torch.float64)])[0])

    def bound(moves: Tensor) -> tuple[Tensor, float]:
        (inside,) = processes.sum_gradients(moves)
        anchors = points.anchors.differentiable(points.move(inside))
        kernel = prior_kernel(anchors, prior)
        if not bool(torch.isfinite(kernel.detach()).all()):
            return torch.nan * (moves.sum() + points.log_scale), math.nan
        white = smooth_whitening(kernel)

        def squares(jacobian: LayerJacobians) -> Tensor:
            whitened = prior_kernel(jacobian, prior, anchors) @ white
            return whitened.mT @ whitened

        gram = processes.differentiable_sum(
            rows.sum(squares, inside, len(kernel), len(anchors.parts) * 8 * len(kernel))
        )
        scale = points.log_scale.exp()
        ratio = scale / points.likelihood.dispersion.to(scale)
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        factor = torch.linalg.cholesky(eye + ratio * gram)
        logdet = factor.diagonal().log().sum()
        value = 0.5 * ratio * (prior_trace - gram.diagonal().sum()) + logdet
        with torch.no_grad():
            divergence = logdet - 0.5 * (len(eye) - torch.cholesky_inverse(factor).diagonal().sum())
        if problem.learn_prior:
            value = value + 0.5 * points.penalty / scale
        return value, float(divergence)

    return bound


@dataclass(frozen=True, eq=False)
class _Rows:
    """The Jacobians of all data in float64: kept, or computed anew at every pass."""

    sweep: Sweep
    kept: list[LayerJacobians] | None
    count: int  # rows: data times seeds

    @classmethod
    def read(cls, sweep: Sweep) -> _Rows:
        """Pass over the data, and keep the Jacobians if they take at most half of the byte budget."""
        kept: list[LayerJacobians] | None = []
        left, count = budget(sweep.network.device) // 2, 0
        for jacobian in sweep:
            count += jacobian.batch * jacobian.outputs
            if kept is not None:
                kept.append(jacobian.materialise().double().materialise())
                left -= kept[-1].nbytes
                kept = kept if left >= 0 else None
        return cls(sweep, kept, count)

    def __iter__(self) -> Iterator[LayerJacobians]:
        return iter(self.kept) if self.kept is not None else (jacobian.double() for jacobian in self.sweep)

    def sum(self, function: Callable[[LayerJacobians], Tensor], moves: Tensor, size: int, each: int) -> Tensor:
        """Return the sum of a function (size, size) of all Jacobians, differentiable in ``moves``.

        It keeps ``each`` bytes a row. Where these do not fit the byte budget, or there is no row at all, it is computed
        again in the backward pass.
        """
        few = self.count * each <= int(PIECE_SHARE * budget(self.sweep.network.device))
        if self.kept is None or not self.count or not few:
            return _Again.apply(moves, self, function, size)
        return reduce(torch.add, map(function, self))


class _Again(torch.autograd.Function):
    """The sum of a function of all Jacobians; only one is in memory at a time, in the backward pass too."""

    @staticmethod
    def forward(
        ctx: Any, moves: Tensor, rows: _Rows, function: Callable[[LayerJacobians], Tensor], size: int
    ) -> Tensor:
        ctx.moves, ctx.rows, ctx.function = moves, rows, function
        total = torch.zeros(size, size, dtype=torch.float64, device=moves.device)
        for part in rows:
            total += function(part)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        total = torch.zeros_like(ctx.moves)
        for part in ctx.rows:
            with torch.enable_grad():
                value = (ctx.function(part) * slope).sum()
            total += torch.autograd.grad(value, ctx.moves, retain_graph=True)[0]
        return total, None, None, None


def learn_collapsed(points: InducingPoints, data: Data, max_steps: int) -> InducingPoints:
    """Return the points at the best locations of an L-BFGS search, with the prior variance if it is learned.

    Cost: one pass over the data, whose layer factors are kept; then for each evaluation a differentiable backward pass
    over the M points, their (N C, M) kernel with all data and M³.
    """
    points, moves = points.learnable(noise=False)
    assert moves is not None
    bound = collapsed_bound(points, data.requiring_same_rows())
    variables = [moves, points.log_scale] if points.problem.learn_prior else [moves]
    optimiser = torch.optim.LBFGS(
        variables, max_iter=1, max_eval=25, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=0.0,
        tolerance_change=0.0,
    )  # fmt: skip
    divergence = 0.0

    def closure() -> Tensor:
        nonlocal divergence
        optimiser.zero_grad()
        value, divergence = bound(moves)
        value.backward(inputs=variables)  # the graph contains the weights too, which must get no gradient
        return value

    best, best_points, waited, overflow = math.inf, points.snapshot(moves), 0, False
    bar, steps = ProgressBar(range(max_steps), "inducing points", data.progress), []
    with torch.inference_mode(False), torch.enable_grad():
        for _ in bar:
            value = float(optimiser.step(closure).detach())
            overflow = not math.isfinite(value)
            if overflow:
                break
            steps.append(points.trace_step(-value))
            bar.show(objective=value, KL=divergence)
            waited = waited + 1 if value > best - PROGRESS * (1 + abs(best)) else 0
            if value < best:
                best, best_points = value, points.snapshot(moves)
            if waited >= PATIENCE:
                break
        if float(bound(moves)[0].detach()) < best:
            best_points = points.snapshot(moves)
    findings: tuple[str, ...] = ()
    if overflow:
        findings = (f"the objective overflowed after {len(steps)} steps; the best state before that is kept",)
    elif waited < PATIENCE:
        findings = (f"the search did not converge in {max_steps} steps and the bound still rises; raise steps",)
    return replace(best_points, steps=tuple(steps), findings=findings)


def learn_stochastic(points: InducingPoints, data: Data, settings: VaLLA, generator: torch.Generator) -> InducingPoints:
    """Return the points as learned on batches; with validation data the best state on these.

    Cost of a step: the work of C backward passes over a batch, a differentiable backward pass over the M points, their
    (B C, M) kernel and M³. It does not depend on the number of training data.
    """
    own = Own.of(data, points.n_samples)
    learning = Stochastic.of(points, settings.alpha, own)
    optimiser = learning.optimiser(settings.learning_rate)
    total = settings.steps or STEPS["none" if optimiser is None else "adam"]
    validation = stopping = None
    if settings.validation is not None:
        validation = Validation(settings.validation)
        check = lambda: validation.best_factor(learning.snapshot(), COARSE)[:2]
        stopping = EarlyStopping(check, max(1, total // 20), settings.patience)
    bar, steps = ProgressBar(range(total), "inducing points", data.progress), []
    batches = own.batches(data, settings.batch_size, points.n_samples, generator)
    with torch.inference_mode(False):
        for number in bar:
            batch, before = next(batches), learning.inducing
            # A batch that is a small share of the data is a noisy estimate and gets a short step.
            shortest = max(0.02, 0.1 * own.rows(batch) / points.n_samples)
            value, divergence = learning.step(batch, optimiser, max(shortest, 1 / (number + 1)))
            if not math.isfinite(value):
                raise NumericalError(
                    f"VaLLA: the objective is {value} at step {number}; expected a finite number. "
                    "Lower learning_rate, or give prior and noise."
                )
            steps.append(learning.points.trace_step(-value))
            bar.show(objective=value, KL=divergence)
            converged = learning.inducing is before  # no step length lowers the objective
            if converged or (stopping is not None and stopping.should_stop(number)):
                break
    if validation is None or stopping is None:
        learned, problem = learning.snapshot(), points.problem
        exact = optimiser is None and settings.batch_size >= points.n_samples
        findings = _convergence_findings(steps) if exact else ()
    else:
        learned, findings = validation.refine(stopping.best_state)
        problem = points.problem.with_known_prior()
    inducing = learned.inducing if settings.alpha > 0 else None
    return replace(learned, problem=problem, inducing=inducing, steps=tuple(steps), findings=findings)


def _convergence_findings(steps: list[Step]) -> tuple[str, ...]:
    """Return a finding if the objective over all data still changes at the end."""
    scores = [step.score for step in steps[-max(2, len(steps) // 4) :]]
    change = (max(scores) - min(scores)) / (1 + abs(scores[-1]))
    if change < CONVERGED:
        return ()
    return (
        f"the objective still changes by {change:.2g} of itself after {len(steps)} steps; raise steps or the noise",
    )


@dataclass(frozen=True, eq=False)
class Own:
    """The data of this process: each process takes its share of every batch."""

    count: int
    processes: Processes

    @classmethod
    def of(cls, data: Data, total: int) -> Own:
        """Return the share of this process, by a pass without the network if there are others."""
        alone = data.processes.is_single_process
        return cls(total if alone else sum(batch.n_samples for batch in data.batches("counting")), data.processes)

    def batches(self, data: Data, size: int, total: int, generator: torch.Generator) -> Iterator[Batch | None]:
        """Return this process's parts of batches of ``size`` rows, without end; None for a process without data."""
        if not self.count:
            return repeat(None)
        drawing = numbered_generator(generator, self.processes.rank) if self.processes.rank else generator
        return shuffle_batches(data, max(1, round(size * self.count / total)), drawing)

    def rows(self, batch: Batch | None) -> int:
        """Return the number of rows of a batch in all processes."""
        return sum(self.processes.gather_numbers(0 if batch is None else len(batch.targets)))


@dataclass(frozen=True, eq=False)
class Terms:
    """Some data of a batch, as far as the objective needs them, differentiable in all that is learned."""

    likelihood: Likelihood
    alpha: float
    f: Tensor
    y: Tensor
    prior_cov: Tensor
    rows: Tensor  # whitened, (B, [T,] C, r)

    def energy(self, q: Inducing) -> Tensor:
        """Return the sum of the energies."""
        return self._energy(q.posterior_cov(self.prior_cov, self.rows))

    def _energy(self, cov: Tensor) -> Tensor:
        return energy(self.likelihood, self.alpha, self.f, cov, self.y).sum()

    def information(self, q: Inducing) -> Tensor:
        """Return the information of these data, (r, r), from the slope of their energy in the covariance."""
        leaf = q.posterior_cov(self.prior_cov, self.rows).detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self._energy(leaf), leaf)
        return torch.einsum("...cr,...cd,...ds->rs", self.rows, -(slope + slope.mT), self.rows)

    def detach(self) -> Terms:
        """Return the same without a graph."""
        return replace(self, prior_cov=self.prior_cov.detach(), rows=self.rows.detach())


@dataclass(eq=False)
class Stochastic:
    """The state of learning on batches. It is mutable, as Adam is: ``step`` changes it."""

    points: InducingPoints  # at their initial locations, with the present prior variance and noise
    alpha: float
    moves: Tensor | None  # displacements of the points in their units; None if they are fixed
    inducing: Inducing
    own: Own

    @classmethod
    def of(cls, points: InducingPoints, alpha: float, own: Own | None = None) -> Stochastic:
        """Return the initial state: the points where they are, and a covariance without data."""
        points, moves = points.learnable(noise=alpha > 0)
        own = Own(points.n_samples, ALONE) if own is None else own
        return cls(points, alpha, moves, Inducing.before_data(len(points.anchors), points.log_scale), own)

    def optimiser(self, rate: float) -> torch.optim.Optimizer | None:
        """Return Adam over locations, prior and noise, as far as they are learned; None if none of them is."""
        groups = [{"params": [self.moves], "lr": rate}] if self.moves is not None else []
        scalars = [t for t in (self.points.log_scale, self.points.log_noise) if t is not None and t.requires_grad]
        groups += [{"params": scalars, "lr": 3 * rate}] if scalars else []
        return torch.optim.Adam(groups) if groups else None

    def snapshot(self) -> InducingPoints:
        """Return the points in their present state."""
        return replace(self.points.snapshot(self.moves), inducing=self.inducing)

    def step(self, batch: Batch | None, optimiser: torch.optim.Optimizer | None, length: float) -> tuple[float, float]:
        """Take a natural-gradient step of this length and one of Adam; return objective and KL before them.

        ``batch`` is this process's part of a batch; None if the process has no data.
        """
        points, processes = self.points, self.own.processes
        searching = optimiser is None and self.own.rows(batch) == points.n_samples
        learned = [t for t in (points.log_scale, points.log_noise, self.moves) if t is not None and t.requires_grad]
        value, information, slopes, seen = self._sums(batch, learned, searching)
        value, information, *slopes = processes.sum([value, information, *slopes])
        with torch.enable_grad():
            rest = self.inducing.divergence()
            if points.problem.learn_prior:  # below alpha = 1 the prior variance would otherwise shrink to zero
                rest = rest + 0.5 * (1 - self.alpha) * points.penalty / points.log_scale.exp()
            if optimiser is not None:
                for tensor, slope in zip(learned, slopes, strict=True):
                    tensor.grad = slope
                if rest.requires_grad:
                    rest.backward(inputs=learned)
                optimiser.step()
        with torch.no_grad():
            divergence = float(self.inducing.divergence())

            def objective(q: Inducing) -> float:
                own = torch.stack([torch.zeros_like(value), *(terms.energy(q) for terms in seen)]).sum()
                return float(q.divergence() - processes.sum([own])[0])

            if searching:
                self.inducing = self._line_search(information, objective)
            else:
                self.inducing = self.inducing.update(information, length)
        return float(value + rest.detach()), divergence

    def _sums(
        self, batch: Batch | None, learned: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Terms]]:
        """Return the data term of the objective, its information and its slopes in all that is learned.

        The sums are over the data of this process. If ``keep``, also return what they were computed from, without a
        graph.
        """
        inside = [t.detach().requires_grad_() for t in learned]
        information, seen = torch.zeros_like(self.inducing.average), []
        value = information.new_zeros(())
        with torch.enable_grad():
            for terms, share in self._terms(batch, inside) if batch is not None else ():
                term = -share * terms.energy(self.inducing)
                if inside:  # the graph contains the weights too, which must get no gradient
                    term.backward(inputs=inside, retain_graph=True)
                value += term.detach()
                terms = terms.detach()
                information += share * terms.information(self.inducing)
                seen += [terms] if keep else []
                del term, terms
        return value, information, [torch.zeros_like(t) if t.grad is None else t.grad for t in inside], seen

    def _terms(self, batch: Batch, inside: Sequence[Tensor]) -> Iterator[tuple[Terms, float]]:
        """Yield parts of a batch that fit the byte budget, differentiable in ``inside``, all that is learned.

        Each comes with its share: the number of data of this process for each datum of the batch.
        """
        values = iter(inside)
        given = (self.points.log_scale, self.points.log_noise, self.moves)
        log_scale, log_noise, moves = (next(values) if t is not None and t.requires_grad else t for t in given)
        assert log_scale is not None
        points = replace(self.points, log_scale=log_scale, log_noise=log_noise)
        anchors, white = self._anchors(moves)
        scale, share = points.log_scale.exp(), self.own.count / len(batch.targets)
        for part in self._parts(batch):
            f, y, prior_cov, rows = whitened_rows(points.problem, part, anchors, white)
            yield Terms(points.likelihood, self.alpha, f, y, scale * prior_cov, scale.sqrt() * rows), share
            del f, y, prior_cov, rows

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield the batch in parts whose kernel with the points, and its graph, fit the byte budget."""
        network, points = self.points.problem.network, len(self.points.anchors)
        outputs = torch.Size(network.for_inputs(batch.inputs).output_shape).numel()
        each = 8 * outputs * ((len(network.layout) + 4) * points + 8 * network.output_shape[-1])
        for rows in chunks(batch.n_samples, each, network.device):
            if rows == slice(0, batch.n_samples):
                yield batch
            else:
                yield Batch(network.take(batch.inputs, rows), batch.targets[rows])

    def _anchors(self, moves: Tensor | None) -> tuple[Iterable[LayerJacobians], Tensor]:
        """Return the rows J_Z after these moves, in parts, and the whitening of their kernel."""
        anchors, prior = self.points.anchors, self.points.problem.prior
        if moves is None:
            return anchors, smooth_whitening(anchors.kernel(prior))
        jacobian = anchors.differentiable(self.points.move(moves))
        return (jacobian,), smooth_whitening(prior_kernel(jacobian, prior))

    def _line_search(self, information: Tensor, objective: Callable[[Inducing], float]) -> Inducing:
        """Return the state after the longest of the steps 1, ½, ¼, ... that lowers the objective, or the present one.

        This needs all data, on which the objective is exact. Full steps would oscillate where residuals are larger than
        the noise allows: each datum alone asks for a variance that all of them together do not need.
        """
        now = objective(self.inducing)
        steps = (self.inducing.update(information, 0.5**k) for k in range(HALVINGS))
        return next((q for q in steps if objective(q) < now), self.inducing)


@dataclass(frozen=True, eq=False)
class Validation:
    """Held-out data, for the choice of a state and of its prior variance.

    Every state is scored at the prior variance that suits the validation data best. The learned one follows the
    training data, which say little about it at the start and, with alpha = 1, push it too far. A prior that the user
    gave stays.
    """

    data: Data

    def refine(self, points: InducingPoints) -> tuple[InducingPoints, tuple[str, ...]]:
        """Return the state with its prior variance chosen on a fine grid, and findings for the trace.

        Cost: one pass over the validation data, and another one for each time that the best factor is at the edge.
        """
        for _ in range(ROUNDS):
            _, points, factor = self.best_factor(points, FINE)
            if factor not in (FINE[0], FINE[-1]):
                return points, ()
        return points, ("the validation data prefer a prior variance beyond the range that was tried; give the prior",)

    def best_factor(self, points: InducingPoints, factors: tuple[float, ...]) -> tuple[float, InducingPoints, float]:
        """Return the highest mean log-likelihood, the state that has it and its factor, by one pass over the data.

        A factor multiplies the prior variance, and the information of the points grows with it. Of equally good factors
        it is the one nearest 1. A prior that is not learned has the factor 1.
        """
        assert points.inducing is not None
        factors = factors if points.problem.learn_prior else (1.0,)
        scores = zip(self.log_likelihoods(points, factors), factors, strict=True)
        score, factor = max(scores, key=lambda pair: (pair[0], -abs(math.log(pair[1]))))
        log_scale, inducing = points.log_scale + math.log(factor), points.inducing.times(factor)
        return score, replace(points, log_scale=log_scale, inducing=inducing), factor

    def log_likelihoods(self, points: InducingPoints, factors: tuple[float, ...]) -> list[float]:
        """Return the mean predictive log-likelihood under the prior variance times each factor, by one pass."""
        assert points.inducing is not None
        totals, count = [0.0] * len(factors), 0
        problem, likelihood, scale = points.problem, points.likelihood, points.log_scale.exp()
        with torch.no_grad():
            white = smooth_whitening(points.anchors.kernel(problem.prior))
            for batch in self.data.batches("validation"):
                f, y, prior_cov, rows = whitened_rows(problem, batch, points.anchors, white)
                refuse_ignored(likelihood, y, "validation targets")
                covs = points.inducing.posterior_covs(scale * prior_cov, scale.sqrt() * rows, factors)
                for i, cov in enumerate(covs):
                    totals[i] += float(likelihood.predict(FunctionGaussian(f, cov)).log_prob(y).sum())
                count += len(f)
        (sums,) = self.data.processes.sum([torch.tensor([*totals, count], dtype=torch.float64)])
        return (sums[:-1] / sums[-1]).tolist()
