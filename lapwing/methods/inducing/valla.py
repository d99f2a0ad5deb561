"""Variational inducing points for linearised Laplace (Ortega, Rodríguez-Santana, Hernández-Lobato 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Batch, Data
from lapwing.core.early_stopping import EarlyStopping
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.pool import Pool, shuffled
from lapwing.core.progress import ProgressBar
from lapwing.core.random import independent_generator
from lapwing.core.settings import is_real, require_integer, require_positive
from lapwing.core.trace import Step, Trace
from lapwing.curvature.blockwise import prior_precision
from lapwing.curvature.sweep import SquaredSum, Sweep
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.likelihoods.energies import energy, refuse_energy, refuse_ignored
from lapwing.likelihoods.protocol import Likelihood
from lapwing.linalg.variational import Inducing
from lapwing.linalg.whitening import smooth_whitening, whitening
from lapwing.losses import Statistics, summed_loss
from lapwing.methods.inducing.anchors import AnchoredCurvature, Anchors
from lapwing.methods.inducing.placement import STARTS, every_output, placed
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors.kernel import prior_kernel
from lapwing.priors.start import single_starting_precision
from lapwing.problem import Problem

OPTIMISERS = ("lbfgs", "adam", "none")
STEPS = {"lbfgs": 300, "adam": 500, "none": 200}  # at most; "none" is natural gradients alone
COARSE = tuple(math.exp(k) for k in range(-6, 7))  # factors on the prior variance, at each look at validation data
FINE = tuple(math.exp(k / 8) for k in range(-12, 13))  # and at the end
ROUNDS = 8  # of the latter, each from the last of the one before: five decades to either side


@dataclass(frozen=True)
class VaLLA:
    r"""The posterior that ``num_inducing`` outputs of the network, at learned inputs, can tell of.

    The mean stays the network's output. Given the inducing points, the covariance is in closed form; only their
    locations (and, where no prior is given, its precision) are learned by gradient, on the bound of the evidence
    (``alpha=0``) or on the predictive log-likelihood of the training data (``alpha=1``, as published; it then learns
    prior and noise with it, and is no longer the Laplace posterior of a given prior); between the two for Gaussians.

    ``start`` places the points: at training outputs of the largest variance left ("greedy"), at those that take most
    off the sum of all ("trace"), at centres of the inputs of each class ("kmeans"), or at random data; None tries the
    first two where the data are few and keeps the better bound. ``optimiser``: "lbfgs" on all data, "adam" on batches
    of ``batch_size`` (time and memory of a step do not depend on the number of data), "none"; by default "lbfgs" where
    the data are few. With ``validation`` data the locations, prior and noise of the best validation log-likelihood are
    kept, and learning ends after ``patience`` checks without a better one.

    Cost of a step: a backward pass over a batch for every output, a double one over the M points, their (BC, M) kernel
    and M³. Afterwards one pass over the data (alpha 0). Predictions cost a backward pass and the kernel with M points.
    Exact when: the points are at all outputs of all data.
    """

    num_inducing: int = 100
    alpha: float = 0.0
    start: str | None = None
    optimiser: str | None = None
    steps: int | None = None
    learning_rate: float = 0.01
    batch_size: int = 100
    validation: Any = field(default=None, repr=False)
    patience: int = 5
    candidates: int = 1000

    def __post_init__(self) -> None:
        for name in ("num_inducing", "batch_size", "patience", "candidates"):
            require_integer(name, getattr(self, name))
        if self.steps is not None:
            require_integer("steps", self.steps)
        require_positive("learning_rate", self.learning_rate)
        if not is_real(self.alpha) or not 0 <= self.alpha <= 1:
            raise UnsupportedError(f"alpha is {self.alpha!r:.80}; expected a number between 0 and 1.")
        if self.start is not None and self.start not in STARTS:
            raise UnsupportedError(f"start is {self.start!r}; expected one of {', '.join(STARTS)}.")
        if self.optimiser is not None and self.optimiser not in OPTIMISERS:
            raise UnsupportedError(f"optimiser is {self.optimiser!r}; expected one of {', '.join(OPTIMISERS)}.")
        if self.alpha > 0 and self.optimiser in ("lbfgs", "none"):
            raise UnsupportedError('the collapsed bound belongs to alpha=0; use optimiser="adam" with others.')
        if self.validation is not None and self.optimiser in ("lbfgs", "none"):
            raise UnsupportedError('only optimiser="adam" looks at validation data; leave them out, or use it.')

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        refuse_energy(problem.likelihood, self.alpha)
        network = problem.network
        if problem.prior.needs_curvature:
            raise UnsupportedError("VaLLA() has no curvature before its points; g_prior() needs one. Use Kron().")
        if self.alpha > 0 and len(network.output_shape) > 1:
            raise UnsupportedError("alpha other than 0 takes outputs (B, C), not tokens (B, T, C); use alpha=0.")
        generator = independent_generator(generator)
        statistics = summed_loss(network, problem.likelihood, data)
        problem = problem.with_residual_noise(statistics)
        if problem.learn_prior:
            problem = problem.with_prior(started(problem, statistics))
        pool = Pool.drawn(data, max(self.candidates, self.num_inducing), generator)
        rows = pool.total * torch.Size(network.output_shape).numel()
        if self.num_inducing >= rows:
            anchors = every_output(network, pool)
            chosen = "none" if self.alpha == 0 and self.validation is None else "adam"
        else:
            put = lambda start: placed(
                network, problem.prior, pool, self.num_inducing, start, self.candidates, generator
            )
            anchors, chosen = put(self.start or "greedy"), self.optimiser or self.optimiser_for(network, rows)
        learnable = isinstance(anchors.inputs, Tensor) and anchors.inputs.is_floating_point()
        learner = Learner(problem, anchors, statistics, self, pool.total, learnable and self.num_inducing < rows)
        if chosen == "lbfgs" and learnable:
            starts = [learner] if self.start else [learner, replace(learner, anchors=put("trace"))]
            return max((each.by_lbfgs(data) for each in starts), key=lambda each: each.score).finished(data)
        if chosen == "adam":
            return learner.better(learner.by_adam(data, generator), data)
        return learner.finished(data)

    def optimiser_for(self, network: Network, rows: int) -> str:
        """All data at once where their layer factors are no more than a gigabyte, and no validation data are given."""
        held = 8.0 * rows * network.footprint.width
        few = held < 2**30 and rows <= 20_000
        return "lbfgs" if few and self.alpha == 0 and self.validation is None else "adam"


def started(problem: Problem, statistics: Statistics) -> Any:
    """A precision to begin with: half of what the data could decide over the squared weights."""
    guess = single_starting_precision(problem.network.theta(), statistics.data * statistics.outputs)
    return problem.prior.with_precision(guess.expand(problem.prior.values.shape).clone())


@dataclass(frozen=True, eq=False)
class Learner:
    """Inducing points on their way: where they are, what they know, and by how much the prior variance has changed.

    Kernels are computed under the prior as it came; ``log_scale`` multiplies them, so that learning it costs nothing.
    """

    problem: Problem
    anchors: Anchors
    statistics: Statistics
    method: VaLLA
    samples: int  # how many there are in all, ignored ones included
    moving: bool  # whether the locations are learned
    log_scale: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    log_noise: Tensor | None = None  # log φ, where it is learned
    inducing: Inducing | None = None  # where no closed form gives it at the end
    steps: tuple[Step, ...] = ()
    findings: tuple[str, ...] = ()

    @property
    def _phi(self) -> Tensor:
        return self.problem.likelihood.dispersion.to(self.problem.network.device).double()

    def unit(self) -> Tensor:
        """How far the points spread, in the shape of one: each column of a table by itself, images as a whole.

        Locations are learned in these units. Nothing moves in a column that is constant.
        """
        z = self.anchors.inputs
        spread = z.detach().double().std(0, correction=0)
        spread = spread if z.ndim == 2 else spread.mean().expand_as(spread)
        return (spread if bool(spread.any()) else torch.ones_like(spread)).to(z)

    def still(self) -> Tensor:
        """No moves yet, in their units; not in half precision, in which steps are lost."""
        z = self.anchors.inputs
        return torch.zeros_like(z, dtype=torch.promote_types(z.dtype, torch.float32), requires_grad=True)

    def _penalty(self) -> Tensor:
        prior = self.problem.prior
        return prior.penalty(self.problem.network.theta().double()).double().detach()

    def by_lbfgs(self, data: Data) -> Learner:
        """Locations and prior on the collapsed bound, with the layer factors of all data kept."""
        sweep = Sweep(self.problem.network, self.problem.likelihood, data, label="inducing points")
        parts = [jacobians.held().double().held() for jacobians in sweep]
        prior = self.problem.prior
        before = sum(float(_spread(part, self)) for part in parts)
        phi, penalty, learn = self._phi, self._penalty(), self.problem.learn_prior
        start, unit = self.anchors.inputs.detach(), self.unit()
        moves, there = self.still(), lambda moves: (start + unit * moves).to(start)
        scale = torch.zeros((), dtype=torch.float64, device=start.device, requires_grad=learn)
        steps, total = [], self.method.steps or STEPS["lbfgs"]
        bar, shown = ProgressBar(range(total), "inducing points", data.progress), {"KL": 0.0}

        def objective() -> Tensor:
            jacobian = self.anchors.differentiable(there(moves))
            kernel = prior_kernel(jacobian, prior)
            if not bool(torch.isfinite(kernel.detach()).all()):
                return torch.nan * (moves.sum() + scale)  # a line search that went too far: the best before it is kept
            white = smooth_whitening(kernel)
            rows = torch.cat([prior_kernel(part, prior, jacobian) for part in parts]) @ white
            s = scale.exp()
            eye = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
            factor = torch.linalg.cholesky(eye + s / phi * (rows.mT @ rows))
            logdet = factor.diagonal().log().sum()
            with torch.no_grad():
                shown["KL"] = float(logdet - 0.5 * (len(eye) - torch.cholesky_inverse(factor).diagonal().sum()))
            value = 0.5 * s / phi * (before - rows.square().sum()) + logdet
            return value + 0.5 * penalty / s if learn else value

        variables = [moves, scale] if learn else [moves]
        optimiser = torch.optim.LBFGS(
            variables, max_iter=1, max_eval=25, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=0.0,
            tolerance_change=0.0,
        )  # fmt: skip
        best, kept, still, left = math.inf, (moves.detach().clone(), scale.detach().clone()), 0, False

        def closure() -> Tensor:
            optimiser.zero_grad()
            value = objective()
            value.backward(inputs=variables)  # and not into the weights, which the graph holds too
            return value

        with torch.inference_mode(False), torch.enable_grad():
            for _ in bar:
                value = float(optimiser.step(closure).detach())
                left = not math.isfinite(value)
                if left:
                    break
                steps.append(self._step(-value, scale.detach(), None))
                bar.show(objective=value, **shown)
                still = still + 1 if value > best - 1e-9 * (1 + abs(best)) else 0
                if value < best:
                    best, kept = value, (moves.detach().clone(), scale.detach().clone())
                if still >= 5:
                    break
            last = float(objective().detach())
            if last < best:
                best, kept = last, (moves.detach().clone(), scale.detach().clone())
        finding = "" if still >= 5 else f"{total} steps did not end the search; the bound still rises"
        if left:
            finding = f"the search left what numbers can hold after {len(steps)} steps; the best before is kept"
        return replace(self, anchors=self.anchors.at(there(kept[0])), log_scale=kept[1], steps=tuple(steps),
                       findings=(finding,) if finding else ())  # fmt: skip

    @property
    def score(self) -> float:
        """The best objective on the way, up to its sign."""
        return max((step.score for step in self.steps), default=-math.inf)

    def better(self, learned: Learner, data: Data) -> WeightPosterior:
        """What was learned, or the start where its bound is higher: batches are noisy, and kernels of kinks jump."""
        found = learned.finished(data)
        if self.method.alpha > 0 or not self.moving or self.method.validation is not None:  # those chose another way
            return found
        begun = replace(self, log_scale=learned.log_scale).finished(data)
        if float(begun.log_evidence()) <= float(found.log_evidence()):
            return found
        told = "the start had a higher bound than what was learned, and is kept"
        trace = Trace("VaLLA", "bound", learned.steps, (*learned.findings, told))
        return begun.with_trace(trace)

    def by_adam(self, data: Data, generator: torch.Generator) -> Learner:
        """Locations, prior and noise on batches; what the points know by natural gradients."""
        return Stochastic.of(self, data, generator).run()

    def _step(self, score: float, scale: Tensor, noise: Tensor | None) -> Step:
        values = (self.problem.prior.values.detach().double() / scale.exp()).reshape(-1).tolist()
        phi = self._phi if noise is None else noise.detach().exp()
        return Step(score, tuple(values) if len(values) <= 16 else (values[0],), (float(phi),))

    def finished(self, data: Data) -> WeightPosterior:
        """The posterior: what the points know in closed form by one pass over the data, or as it was learned."""
        prior = self.problem.prior
        moved = prior.with_precision(prior.values.detach() / self.log_scale.exp().to(prior.values))
        likelihood = self.problem.likelihood
        if self.log_noise is not None:
            likelihood = likelihood.with_dispersion(self.log_noise.exp().detach())
        problem = replace(self.problem, prior=moved, likelihood=likelihood)
        if self.inducing is None:
            white = whitening(self.anchors.kernel(problem.prior))
            known, own = _known(problem, data, self.anchors, white)
            values, turn = torch.linalg.eigh(known)
            mix = white @ (turn * values.clamp_min(0).sqrt())
        else:
            white = smooth_whitening(self.anchors.kernel(problem.prior))
            values, turn = torch.linalg.eigh(self.inducing.known)
            mix = white @ (turn * values.clamp_min(0).sqrt()) * likelihood.dispersion.to(white).sqrt()
            own = None
        if self.inducing is not None or self.method.validation is not None:  # they chose the prior
            problem = replace(problem, learn_prior=False)
        curvature = AnchoredCurvature(self.anchors, mix, own)
        trace = Trace("VaLLA", "bound" if self.method.alpha == 0 else "energy", self.steps, self.findings)
        found = WeightPosterior(problem, curvature, self.statistics, problem.network.theta())
        return found.with_trace(trace) if self.steps else found


def _spread(part: LayerJacobians, learner: Learner) -> Tensor:
    """The trace of the prior covariance of a batch's seeded outputs."""
    network = learner.problem.network
    return prior_precision(learner.problem.prior, network.layout, network.selection).quadratic(part, False).sum()


def _known(problem: Problem, data: Data, anchors: Anchors, white: Tensor) -> tuple[Tensor, Tensor]:
    """Σ T Tᵀ over the data at unit dispersion (r, r), and the diagonal of the GGN (P,): one pass."""
    known, squares = white.new_zeros(white.shape[1], white.shape[1]), SquaredSum(problem.network)
    for jacobians in Sweep(problem.network, problem.likelihood, data, label="inducing points"):
        wide = jacobians.double()  # what the points miss is a difference, in which rounding is all
        rows = anchors.against(wide, problem.prior) @ white
        known += rows.mT @ rows
        squares.add(wide)
    return known, squares.diagonal()


@dataclass(eq=False)
class Stochastic:
    """Learning on batches. The only part of this file with a state: Adam has one."""

    learner: Learner
    data: Data
    generator: torch.Generator
    moves: Tensor | None  # of the points, in their units, where they move
    log_scale: Tensor
    log_noise: Tensor | None
    inducing: Inducing

    @classmethod
    def of(cls, learner: Learner, data: Data, generator: torch.Generator) -> Stochastic:
        problem, method = learner.problem, learner.method
        device = problem.network.device
        moves = learner.still() if learner.moving else None
        scale = torch.zeros((), dtype=torch.float64, device=device, requires_grad=problem.learn_prior)
        noise = None
        if method.alpha > 0 and problem.likelihood.learns_dispersion:
            noise = problem.likelihood.dispersion.detach().double().log().to(device).requires_grad_()
        inducing = Inducing.before_data(len(learner.anchors), torch.empty(0, device=device))
        return cls(learner, data, generator, moves, scale, noise, inducing)

    @property
    def z(self) -> Any:
        """Where the points are."""
        start = self.learner.anchors.inputs
        return start if self.moves is None else (start.detach() + self.unit * self.moves).to(start)

    @cached_property
    def unit(self) -> Tensor:
        return self.learner.unit()

    def run(self) -> Learner:
        learner, method = self.learner, self.learner.method
        groups = [{"params": [self.moves], "lr": method.learning_rate}] if self.moves is not None else []
        rest = [t for t in (self.log_scale, self.log_noise) if t is not None and t.requires_grad]
        groups += [{"params": rest, "lr": 3 * method.learning_rate}] if rest else []
        optimiser = torch.optim.Adam(groups) if groups else None
        total = method.steps or STEPS["adam" if groups else "none"]
        watch = self._watch(total)
        bar, steps = ProgressBar(range(total), "inducing points", self.data.progress), []
        batches = shuffled(self.data, method.batch_size, self.generator)
        with torch.inference_mode(False):
            for step in bar:
                batch, known = next(batches), self.inducing
                value, divergence = self.step(batch, optimiser, max(self._shortest(batch), 1 / (step + 1)))
                if not math.isfinite(value):
                    raise NumericalError(
                        f"VaLLA: the objective is {value} at step {step}; expected a number. Lower learning_rate, or "
                        "give prior and noise."
                    )
                steps.append(learner._step(-value, self.log_scale.detach(), self.log_noise))
                bar.show(objective=value, KL=divergence)
                if self.inducing is known or (
                    watch is not None and watch.should_stop(step)
                ):  # no step was better, or late
                    break
        state, findings = (self.state(), self._unsettled(steps)) if watch is None else self._rescaled(watch.best_state)
        return replace(learner, anchors=learner.anchors.at(state.z), log_scale=state.log_scale,
                       log_noise=state.log_noise, inducing=state.inducing if method.alpha > 0 else None,
                       steps=tuple(steps), findings=(*learner.findings, *findings))  # fmt: skip

    @property
    def _alone(self) -> bool:
        """Whether there is nothing but the covariance to learn."""
        return self.moves is None and not self.log_scale.requires_grad and self.log_noise is None

    def _lower(self, gained: Tensor, objective: Callable[[Inducing], float]) -> Inducing:
        """The longest of the steps 1, ½, ¼ ... after which the objective is lower; where none is, there is no step.

        With all data the objective is no estimate and can be compared. Without that, data that are further off than the
        noise allows for make the steps swing: each alone asks for a variance that all together do not need.
        """
        now = objective(self.inducing)
        steps = (self.inducing.updated(gained, 0.5**k) for k in range(30))
        return next((q for q in steps if objective(q) < now), self.inducing)

    def _unsettled(self, steps: list[Step]) -> tuple[str, ...]:
        """What to know where every step had all data and nothing but the covariance to learn, and it did not settle."""
        scores = [step.score for step in steps[-max(2, len(steps) // 4) :]]
        moved = (max(scores) - min(scores)) / (1 + abs(scores[-1]))
        if not self._alone or self.learner.method.batch_size < self.learner.samples or moved < 1e-2:
            return ()
        return (
            f"the objective still changes by {moved:.2g} of itself after {len(steps)} steps; raise steps or the noise",
        )

    def _shortest(self, batch: Batch) -> float:
        """The least length of a step: a part of the data is noisy, the more so where some are far from the network."""
        return max(0.02, 0.1 * len(batch.targets) / self.learner.samples)

    def _watch(self, total: int) -> EarlyStopping[Snapshot] | None:
        method = self.learner.method
        if method.validation is None:
            return None
        return EarlyStopping(lambda: self._looked(self.state(), COARSE)[:2], max(1, total // 20), method.patience)

    def _looked(self, state: Snapshot, factors: tuple[float, ...]) -> tuple[float, Snapshot, float]:
        """The best log-likelihood of the validation data, the state that has it, and its factor on the prior variance.

        One pass. A state is judged by what it can do: its prior variance follows the training data, which at the start
        say little and with alpha = 1 too much, and is chosen by validation data at the end. Given priors stay.
        """
        factors = factors if self.log_scale.requires_grad else (1.0,)
        found = zip(self.log_likelihoods(state, factors), factors, strict=True)
        score, factor = max(found, key=lambda pair: (pair[0], -abs(math.log(pair[1]))))
        return score, state.scaled(factor), factor

    def _rescaled(self, state: Snapshot) -> tuple[Snapshot, tuple[str, ...]]:
        """The prior variance of the best state once more and finely; and what to know.

        A pass over the validation data, and one more wherever the best factor is the last of those tried.
        """
        for _ in range(ROUNDS):
            _, state, factor = self._looked(state, FINE)
            if factor not in (FINE[0], FINE[-1]):
                return state, ()
        return state, ("the validation data want a prior variance further out than was looked: they know of no best",)

    def state(self) -> Snapshot:
        noise = None if self.log_noise is None else self.log_noise.detach().clone()
        z = self.z.detach() if isinstance(self.z, Tensor) else self.z
        return Snapshot(z, self.log_scale.detach().clone(), noise, self.inducing)

    def likelihood(self) -> Likelihood:
        likelihood = self.learner.problem.likelihood
        return likelihood if self.log_noise is None else likelihood.with_dispersion(self.log_noise.exp())

    def step(self, batch: Batch, optimiser: torch.optim.Optimizer | None, length: float) -> tuple[float, float]:
        """One natural-gradient step on what the points know, and one of Adam on the rest; objective and KL before."""
        problem, method = self.learner.problem, self.learner.method
        share = self.learner.samples / len(batch.targets)
        with torch.enable_grad():
            if self.learner.moving:
                points: tuple[LayerJacobians, ...] = (self.learner.anchors.differentiable(self.z),)
                white = smooth_whitening(prior_kernel(points[0], problem.prior))
            else:
                points = self.learner.anchors.parts
                white = smooth_whitening(self.learner.anchors.kernel(problem.prior))
            likelihood = self.likelihood()
            f, y, before, rows = self._rows(batch, points, white)
            s = self.log_scale.exp()
            cov = self.inducing.left(s * before, s.sqrt() * rows)
            watched = cov.detach().requires_grad_()
            weights = torch.autograd.grad(
                energy(likelihood, method.alpha, f, watched, y).sum(), watched, retain_graph=False
            )[0]
            value = -share * energy(likelihood, method.alpha, f, cov, y).sum() + self.inducing.divergence()
            if problem.learn_prior:  # without it nothing would hold the prior variance up below alpha = 1
                value = value + 0.5 * (1 - method.alpha) * self.learner._penalty() / s
            if optimiser is not None:
                optimiser.zero_grad()
                moved = [t for group in optimiser.param_groups for t in group["params"]]
                value.backward(inputs=moved)  # and not into the weights, which the graph holds too
                optimiser.step()
        with torch.no_grad():
            scaled = rows.detach() * s.detach().sqrt()
            gained = share * torch.einsum("...cr,...cd,...ds->rs", scaled, -(weights + weights.mT), scaled)
            divergence = float(self.inducing.divergence())
            if not (self._alone and len(batch.targets) == self.learner.samples):
                self.inducing = self.inducing.updated(gained, length)
                return float(value.detach()), divergence

            def objective(q: Inducing) -> float:
                cov = q.left(s * before, s.sqrt() * rows)
                return float(q.divergence() - energy(likelihood, method.alpha, f, cov, y).sum())

            self.inducing = self._lower(gained, objective)
        return float(value.detach()), divergence

    def _rows(
        self, batch: Batch, points: tuple[LayerJacobians, ...], white: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """f (B, [T,] C), checked targets, prior covariance (B, [T,] C, C) and whitened rows (B, [T,] C, r)."""
        problem = self.learner.problem
        network = problem.network
        precision = prior_precision(problem.prior, network.layout, network.selection)
        outputs, before, rows = [], [], []
        for _, tangent in network.tangents(batch.inputs):
            seeded = tangent.jacobians().double()
            outputs.append(tangent.f.double())
            before.append(precision.quadratic(seeded).reshape(*tangent.f.shape, -1))
            rows.append(torch.cat([prior_kernel(seeded, problem.prior, part) for part in points], 1) @ white)
        f = torch.cat(outputs)
        y = problem.likelihood.targets(f, batch.targets)
        return f, y, torch.cat(before), torch.cat(rows).reshape(*f.shape, -1)

    def log_likelihoods(self, state: Snapshot, factors: tuple[float, ...] = (1.0,)) -> list[float]:
        """Of the validation data under the predictive, for each datum; with the prior variance times each factor."""
        learner, total, count = self.learner, [0.0] * len(factors), 0
        s = state.log_scale.exp()
        likelihood = learner.problem.likelihood
        if state.log_noise is not None:
            likelihood = likelihood.with_dispersion(state.log_noise.exp())
        data = Data(learner.method.validation, self.data.device, self.data.target_key, name="validation")
        with torch.no_grad():
            anchors = learner.anchors.at(state.z)
            white = smooth_whitening(anchors.kernel(learner.problem.prior))
            for batch in data.batches("validation"):
                f, y, before, rows = self._rows(batch, anchors.parts, white)
                refuse_ignored(likelihood, y, "validation targets")
                for i, cov in enumerate(state.inducing.lefts(s * before, s.sqrt() * rows, factors)):
                    total[i] += float(likelihood.predict(FunctionGaussian(f, cov)).log_prob(y).sum())
                count += len(f)
        return [each / count for each in total]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What is learned, as it was at one step."""

    z: Any
    log_scale: Tensor
    log_noise: Tensor | None
    inducing: Inducing

    def scaled(self, factor: float) -> Snapshot:
        """With the prior variance times a factor; what the points know grows with it."""
        if factor == 1.0:
            return self
        return replace(self, log_scale=self.log_scale + math.log(factor), inducing=self.inducing.times(factor))
