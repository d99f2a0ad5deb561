"""Learning inducing points on batches: Adam for locations, prior and noise, natural gradients for the covariance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Batch, Data
from lapwing.core.pool import shuffled
from lapwing.core.progress import EarlyStopping, ProgressBar
from lapwing.core.trace import Step
from lapwing.errors import NumericalError
from lapwing.likelihoods.energies import energy
from lapwing.likelihoods.protocol import Likelihood
from lapwing.linalg.variational import Inducing
from lapwing.linalg.whitening import smooth_whitening
from lapwing.methods.inducing.points import InducingPoints, whitened_rows
from lapwing.methods.inducing.validation import Snapshot, Validation
from lapwing.networks.jacobians import LayerJacobians
from lapwing.priors.kernel import prior_kernel

STEPS = {"adam": 500, "natural": 200}  # default number of steps; "natural" where only the covariance is learned
CONVERGED = 1e-2  # relative change of the objective over the last quarter of the steps
HALVINGS = 30  # of a natural-gradient step before it is given up


@dataclass(frozen=True, eq=False)
class StochasticSettings:
    """Settings of VaLLA that concern learning on batches."""

    alpha: float = 0.0
    steps: int | None = None
    learning_rate: float = 0.01
    batch_size: int = 100
    validation: Any = None
    patience: int = 5


def learn_stochastic(
    points: InducingPoints, data: Data, settings: StochasticSettings, generator: torch.Generator
) -> InducingPoints:
    """Return the points as learned on batches; with validation data the best state on these.

    Cost of a step: the work of C backward passes over a batch, a differentiable backward pass over the M points, their
    (B C, M) kernel and M³. It does not depend on the number of training data.
    """
    return Stochastic.of(points, data, settings, generator).run()


@dataclass(eq=False)
class Stochastic:
    """The state of learning on batches. It is mutable, as Adam is: ``step`` changes it."""

    points: InducingPoints
    data: Data
    settings: StochasticSettings
    generator: torch.Generator
    moves: Tensor | None  # displacements of the points in their units; None if they are fixed
    log_scale: Tensor
    log_noise: Tensor | None
    inducing: Inducing

    @classmethod
    def of(
        cls, points: InducingPoints, data: Data, settings: StochasticSettings, generator: torch.Generator
    ) -> Stochastic:
        """Return the initial state: the points where they are, and a covariance without data."""
        problem = points.problem
        device, likelihood = problem.network.device, problem.likelihood
        moves = points.zero_moves() if points.movable else None
        log_scale = torch.zeros((), dtype=torch.float64, device=device, requires_grad=problem.learn_prior)
        log_noise = None
        if settings.alpha > 0 and likelihood.learns_dispersion:
            log_noise = likelihood.dispersion.detach().double().log().to(device).requires_grad_()
        inducing = Inducing.before_data(len(points.anchors), torch.empty(0, device=device))
        return cls(points, data, settings, generator, moves, log_scale, log_noise, inducing)

    @property
    def z(self) -> Any:
        """The present inputs of the points."""
        start = self.points.anchors.inputs
        return start if self.moves is None else (start.detach() + self.unit * self.moves).to(start)

    @cached_property
    def unit(self) -> Tensor:
        """The unit of the displacements."""
        return self.points.unit()

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood with the present noise."""
        likelihood = self.points.problem.likelihood
        return likelihood if self.log_noise is None else likelihood.with_dispersion(self.log_noise.exp())

    @property
    def _only_covariance(self) -> bool:
        """Whether the covariance is all that is learned."""
        return self.moves is None and not self.log_scale.requires_grad and self.log_noise is None

    def run(self) -> InducingPoints:
        """Take all steps and return the learned points."""
        settings, optimiser = self.settings, self._optimiser()
        total = settings.steps or STEPS["natural" if optimiser is None else "adam"]
        validation = self._validation()
        stopping = None
        if validation is not None:
            stopping = EarlyStopping(lambda: validation.check(self.snapshot()), max(1, total // 20), settings.patience)
        bar, steps = ProgressBar(range(total), "inducing points", self.data.progress), []
        batches = shuffled(self.data, settings.batch_size, self.generator)
        with torch.inference_mode(False):
            for number in bar:
                batch, before = next(batches), self.inducing
                value, divergence = self.step(batch, optimiser, max(self._least_length(batch), 1 / (number + 1)))
                if not math.isfinite(value):
                    raise NumericalError(
                        f"VaLLA: the objective is {value} at step {number}; expected a finite number. "
                        "Lower learning_rate, or give prior and noise."
                    )
                steps.append(self.points.trace_step(-value, self.log_scale.detach(), self.log_noise))
                bar.show(objective=value, KL=divergence)
                converged = self.inducing is before  # no step length lowers the objective
                if converged or (stopping is not None and stopping.should_stop(number)):
                    break
        if validation is None or stopping is None:
            state, findings = self.snapshot(), self._not_converged(steps)
        else:
            state, findings = validation.refine(stopping.best_state)
        return self._learned(state, tuple(steps), findings)

    def _optimiser(self) -> torch.optim.Optimizer | None:
        """Return Adam over locations, prior and noise, as far as they are learned; None if none of them is."""
        rate = self.settings.learning_rate
        groups = [{"params": [self.moves], "lr": rate}] if self.moves is not None else []
        scalars = [t for t in (self.log_scale, self.log_noise) if t is not None and t.requires_grad]
        groups += [{"params": scalars, "lr": 3 * rate}] if scalars else []
        return torch.optim.Adam(groups) if groups else None

    def _validation(self) -> Validation | None:
        source = self.settings.validation
        if source is None:
            return None
        return Validation(self.points, Data(source, self.data.device, self.data.target_key, name="validation"))

    def _least_length(self, batch: Batch) -> float:
        """Return the shortest natural-gradient step: a batch that is a small share of the data is a noisy estimate."""
        return max(0.02, 0.1 * len(batch.targets) / self.points.n_samples)

    def _not_converged(self, steps: list[Step]) -> tuple[str, ...]:
        """Return a finding if the covariance was learned on all data at each step and still changes at the end."""
        scores = [step.score for step in steps[-max(2, len(steps) // 4) :]]
        change = (max(scores) - min(scores)) / (1 + abs(scores[-1]))
        whole = self.settings.batch_size >= self.points.n_samples
        if not self._only_covariance or not whole or change < CONVERGED:
            return ()
        return (
            f"the objective still changes by {change:.2g} of itself after {len(steps)} steps; raise steps or the noise",
        )

    def _learned(self, state: Snapshot, steps: tuple[Step, ...], findings: tuple[str, ...]) -> InducingPoints:
        points, settings = self.points, self.settings
        return replace(
            points,
            problem=points.problem if settings.validation is None else points.problem.with_known_prior(),
            anchors=points.anchors.at(state.z),
            log_scale=state.log_scale,
            log_noise=state.log_noise,
            inducing=state.inducing if settings.alpha > 0 else None,
            steps=steps,
            findings=(*points.findings, *findings),
        )

    def snapshot(self) -> Snapshot:
        """Return a copy of the present state."""
        noise = None if self.log_noise is None else self.log_noise.detach().clone()
        z = self.z.detach() if isinstance(self.z, Tensor) else self.z
        return Snapshot(z, self.log_scale.detach().clone(), noise, self.inducing)

    def step(self, batch: Batch, optimiser: torch.optim.Optimizer | None, length: float) -> tuple[float, float]:
        """Take a natural-gradient step of this length and one of Adam; return objective and KL before them."""
        points, alpha = self.points, self.settings.alpha
        share = points.n_samples / len(batch.targets)
        with torch.enable_grad():
            anchors, white = self._anchors()
            likelihood = self.likelihood
            f, y, prior_cov, rows = whitened_rows(points.problem, batch, anchors, white)
            scale = self.log_scale.exp()
            cov = self.inducing.left(scale * prior_cov, scale.sqrt() * rows)
            leaf = cov.detach().requires_grad_()
            (slope,) = torch.autograd.grad(energy(likelihood, alpha, f, leaf, y).sum(), leaf)
            value = -share * energy(likelihood, alpha, f, cov, y).sum() + self.inducing.divergence()
            if points.problem.learn_prior:  # below alpha = 1 the prior variance would otherwise shrink to zero
                value = value + 0.5 * (1 - alpha) * points.penalty / scale
            if optimiser is not None:
                optimiser.zero_grad()
                variables = [t for group in optimiser.param_groups for t in group["params"]]
                value.backward(inputs=variables)  # the graph contains the weights too, which must get no gradient
                optimiser.step()
        with torch.no_grad():
            prior_cov, scaled = scale * prior_cov, scale.sqrt() * rows
            gained = share * torch.einsum("...cr,...cd,...ds->rs", scaled, -(slope + slope.mT), scaled)
            divergence = float(self.inducing.divergence())

            def objective(q: Inducing) -> float:
                return float(q.divergence() - energy(likelihood, alpha, f, q.left(prior_cov, scaled), y).sum())

            if self._only_covariance and len(batch.targets) == points.n_samples:
                self.inducing = self._line_search(gained, objective)
            else:
                self.inducing = self.inducing.updated(gained, length)
        return float(value.detach()), divergence

    def _anchors(self) -> tuple[tuple[LayerJacobians, ...], Tensor]:
        """Return the rows J_Z at the present locations, in parts, and the whitening of their kernel."""
        anchors, prior = self.points.anchors, self.points.problem.prior
        if not self.points.movable:
            return anchors.parts, smooth_whitening(anchors.kernel(prior))
        jacobian = anchors.differentiable(self.z)
        return (jacobian,), smooth_whitening(prior_kernel(jacobian, prior))

    def _line_search(self, gained: Tensor, objective: Callable[[Inducing], float]) -> Inducing:
        """Return the state after the longest of the steps 1, ½, ¼, ... that lowers the objective, or the present one.

        This needs all data, on which the objective is exact. Full steps would oscillate where residuals are larger than
        the noise allows: each datum alone asks for a variance that all of them together do not need.
        """
        now = objective(self.inducing)
        steps = (self.inducing.updated(gained, 0.5**k) for k in range(HALVINGS))
        return next((q for q in steps if objective(q) < now), self.inducing)
