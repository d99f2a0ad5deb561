"""A belief made of samples: no matrix over the weights is ever formed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.errors import UnsupportedError
from lapwing.linalg.krylov import Logdet
from lapwing.linalg.operators import Solution
from lapwing.networks.forward import outside_autocast, outside_inference
from lapwing.networks.functionals import Functional, weight_slope
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.networks.passes import outputs_along
from lapwing.posteriors.base import ALL, Posterior
from lapwing.posteriors.members import PointPosterior, spread
from lapwing.posteriors.weight_space import Linearised, Mode
from lapwing.priors.base import BoundPrior
from lapwing.problem import STATISTICS, Problem, Statistics
from lapwing.runtime.settings import integer
from lapwing.runtime.state import Array, Maybe, Real, State, Whole, plain, saved
from lapwing.runtime.threads import derived_generator
from lapwing.runtime.trace import TRACE, Trace
from lapwing.values.gaussian import Deferred, FunctionGaussian
from lapwing.values.outputs import Query


class Solver:
    """A solver for samples of a posterior, its log-determinant and γ, for any prior and noise."""

    def solve(self, problem: Problem, start: Tensor | None = None) -> Solution:
        """Return the samples around zero, (K, P), by solves that begin at ``start``."""
        raise NotImplementedError

    def logdet(self, problem: Problem) -> Logdet:
        """Return the log-determinant of Λ A⁻¹."""
        raise NotImplementedError

    def gamma(self, problem: Problem, samples: Tensor) -> Tensor:
        """Return γ of every weight from each sample, (K, P)."""
        raise NotImplementedError


@saved
@dataclass(frozen=True, eq=False)
class SampledPosterior(Linearised):
    """K samples theta = w̃ + z_j with z_j ~ N(0, Λ⁻¹) of the full GGN, each the solution of one linear system.

    The noise of the samples is fixed, so they change smoothly with the prior and the noise variance, and so do the
    hyperparameters that are learned from them. Mean, variance, covariance and function samples come from the same K
    vectors; predictions cost one product with the Jacobian for all of them. ``solution`` holds the residuals of the
    systems.
    """

    problem: Problem
    solver: Solver
    statistics: Statistics
    theta: Tensor  # w̃, or the point that the network is shifted to, (P,)
    trace: Trace | None = None
    start: Tensor | None = None  # initial values for the solver, (K, P)
    mode: Mode | None = None
    is_sampled: ClassVar[bool] = True

    @cached_property
    @outside_autocast
    @outside_inference
    def solution(self) -> Solution:
        """The samples (K, P) around zero, with the relative residual of each."""
        with torch.no_grad():
            return self.solver.solve(self.problem, self.start)

    def prepare(self) -> None:
        self.solution  # noqa: B018

    @property
    def samples(self) -> Tensor:
        return self.solution.x.to(self.theta)

    def with_problem(self, problem: Problem) -> SampledPosterior:
        scale = self.problem.prior.scale
        if problem.prior.needs_curvature:
            if scale is None:
                raise UnsupportedError(
                    "samples keep no curvature for a g-prior to take; fit again with prior=g_prior()."
                )
            problem = problem.with_prior(problem.prior.with_scale(scale))
        return replace(self, problem=problem)

    def with_prior(self, prior: BoundPrior) -> SampledPosterior:
        """Return the samples of another prior, without the mode, which belongs to the old one."""
        return replace(self.with_problem(self.problem.with_prior(prior)), mode=None)

    def warm_started(self, problem: Problem) -> SampledPosterior:
        """Return the posterior of another problem, whose solves start from the present samples."""
        return replace(self.with_problem(problem), start=self.solution.x)

    def with_trace(self, trace: Trace) -> SampledPosterior:
        return replace(self, trace=trace)

    @property
    def noise(self) -> Tensor | None:
        likelihood = self.problem.likelihood
        return likelihood.dispersion if likelihood.learns_dispersion else None

    def with_noise(self, noise: Tensor) -> SampledPosterior:
        return replace(self, problem=self.problem.with_likelihood(self.problem.likelihood.with_dispersion(noise)))

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        f, deviations = outputs_along(self.problem.network, x, self.samples, query.outputs)
        belief = FunctionGaussian.of_deviations(f, deviations, len(deviations), query.joint)
        if query.joint:
            return belief
        recipes: Any = belief.covariance
        parts = [outside_autocast(part) for part in (recipes.variance, recipes.cov, recipes.centred)]
        return FunctionGaussian(f, Deferred(*parts))

    def covariance(self, jacobian: LayerJacobians) -> Tensor:
        """Return the covariance of each datum, (B, S, C, C): the mean of J z zᵀ Jᵀ over the samples."""
        deviations = jacobian.jvp(self.samples).unflatten(-1, (jacobian.tokens, -1))
        return torch.einsum("nbsc,nbsd->bscd", deviations, deviations) / len(deviations)

    def deviations(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the first n of the K stored samples, (n, P), around zero; the generator is not used."""
        self._refuse_more(n)
        return self.samples[:n]

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        flat = jacobian.jvp(self.samples).flatten(1)
        return flat.mT @ (flat if other is None else other.jvp(self.samples).flatten(1)) / len(flat)

    def n_stored(self) -> int:
        return len(self.samples)

    def numbered(self, numbers: range) -> Tensor:
        """Return stored samples, (n, P): number k stands for sample k mod K."""
        return self.samples[[k % self.n_stored() for k in numbers]]

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the first n of the K stored samples, around w̃; the generator is not used."""
        return self.theta + self.deviations(n)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the functions of the first n stored samples, (n, B, [T,] C): the same ones at all inputs."""
        f, products = outputs_along(self.problem.network, x, self.deviations(n))
        return products.add_(f)

    @outside_inference
    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Return the variance of a scalar function of the weights, or of the outputs at x: the mean of (∇g·z)²."""
        return (self.samples @ weight_slope(self.problem.network, function, x)).square().mean()

    def _refuse_more(self, n: int) -> None:
        integer().check("n", n)
        if n > len(self.samples):
            raise UnsupportedError(
                f"{n} samples were asked for and {len(self.samples)} are stored; fit with Sampled(num_samples=...)."
            )

    @outside_inference
    def gammas(self) -> Tensor:
        """Return γ of every weight, (P,): the mean over the samples of z (G z) / φ."""
        return self.gamma_samples().mean(0)

    @outside_inference
    def gamma_samples(self) -> Tensor:
        """Return γ of every weight from each sample, z (G z) / φ, (K, P)."""
        with torch.no_grad():
            return self.solver.gamma(self.problem, self.samples)

    @property
    def loss(self) -> float:
        """The loss at the centre, summed over the data, at unit dispersion."""
        return self.statistics.loss if self.mode is None else self.mode.loss

    def log_likelihood(self) -> Tensor:
        """Return log p(D | theta) at the centre."""
        phi, likelihood = self.problem.likelihood.dispersion.to(self.theta.device), self.problem.likelihood
        normaliser = likelihood.log_normaliser(phi, self.statistics.outputs)
        return -self.loss / phi - self.statistics.data * normaliser

    @outside_inference
    def log_evidence(self) -> Tensor:
        """Return the evidence of the full posterior, with an estimated log-determinant and error ``evidence_error``."""
        return self.log_likelihood() - 0.5 * (
            self.problem.prior.penalty(self.centre) + self.solver.logdet(self.problem).value
        )

    @property
    @outside_autocast
    @outside_inference
    def evidence_error(self) -> float:
        return 0.5 * float(self.solver.logdet(self.problem).error)

    @property
    def centre(self) -> Tensor:
        """The weights at which the evidence is evaluated, (P,) in float64: w̃, or the tangent model's own optimum."""
        return self.theta.double() if self.mode is None else self.mode.theta

    def state(self) -> State:
        solution, logdet = self.solution, self.solver.logdet(self.problem)
        settings = {
            "statistics": asdict(self.statistics), "iterations": solution.iterations, "tolerance": solution.tolerance,
            "logdet_error": logdet.error, "trace": plain(self.trace),
            "mode_loss": None if self.mode is None else self.mode.loss,
        }  # fmt: skip
        tensors = {
            "theta": self.theta, "samples": solution.x, "residuals": solution.residuals,
            "logdet": logdet.value.detach(),
        }  # fmt: skip
        tensors |= {} if self.mode is None else {"mode": self.mode.theta}
        return State("SampledPosterior", settings, tensors)

    @classmethod
    def from_state(cls, state: State, problem: Problem) -> SampledPosterior:
        fields = state.read(
            theta=Array(("P",), dtype=problem.network.dtype), samples=Array(("K", "P")), residuals=Array(("K",), 0),
            logdet=Array(()), logdet_error=Real(0, math.inf), iterations=Whole(), tolerance=Real(0),
            statistics=STATISTICS, trace=TRACE, mode=Maybe(Array(("P",))), mode_loss=Maybe(Real()),
        )  # fmt: skip
        solution = Solution(*(fields[name] for name in ("samples", "residuals", "iterations", "tolerance")))
        logdet = Logdet(fields["logdet"], fields["logdet_error"])
        stored = StoredSamples(problem.prior.vector, problem.likelihood.dispersion, solution, logdet)
        mode = Mode.stored(fields["mode"], fields["mode_loss"])
        return cls(problem, stored, fields["statistics"], fields["theta"], fields["trace"], mode=mode)


@dataclass(frozen=True, eq=False)
class StoredSamples(Solver):
    """Samples from a file. Without data they are valid only for the prior and noise they were solved for."""

    precision: Tensor  # of every weight, (P,)
    dispersion: Tensor
    solution: Solution
    log_determinant: Logdet

    def solve(self, problem: Problem, start: Tensor | None = None) -> Solution:
        self._refuse_other(problem)
        return self.solution

    def logdet(self, problem: Problem) -> Logdet:
        self._refuse_other(problem)
        return self.log_determinant

    def gamma(self, problem: Problem, samples: Tensor) -> Tensor:
        raise UnsupportedError("samples from a file have no data to compute gamma with; fit again.")

    def _refuse_other(self, problem: Problem) -> None:
        same = torch.equal(problem.prior.vector.detach(), self.precision)
        if not same or not torch.equal(problem.likelihood.dispersion.detach(), self.dispersion):
            raise UnsupportedError("samples from a file belong to the prior and noise they were saved with; fit again.")


class WeightDraws:
    """The network under ``count`` draws of its weights; draw k has the seed ``seed + k`` at all inputs.

    Classes inherit from it and define ``drawn``. Draws are not kept but made again for every call.
    """

    network: Network
    count: int
    seed: int

    def drawn(self, generator: torch.Generator | None) -> Tensor:
        """Draw a step from w̃, (P,)."""
        raise NotImplementedError

    def __call__(self, x: Inputs) -> Tensor:
        """Return the outputs of all draws, (K, B, [T,] C)."""
        return torch.stack([self.outputs(x, self.numbered(k)) for k in range(self.count)])

    def outputs(self, x: Inputs, d: Tensor) -> Tensor:
        """Return f (B, [T,] C) with the weights moved by d (P,)."""
        return self.network.at(d, x)

    def numbered(self, k: int) -> Tensor:
        """Return draw k as a step from w̃, (P,)."""
        return self.drawn(derived_generator(torch.Generator().manual_seed(self.seed + k), torch.empty(0)))


class Drawn(Posterior):
    """f(x) ~ N(mean of the draws, covariance of the draws). A prediction costs one forward pass for each draw."""

    problem: Problem
    draws: WeightDraws
    statistics: Statistics  # of the mean of the draws
    theta: Tensor  # w̃, (P,)

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        return spread(query.of(self.draws(x).to(self.theta.dtype)), query.joint)

    def plain(self) -> PointPosterior:
        return PointPosterior(self.problem, self.statistics, self.theta)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n outputs of the network, (n, B, [T,] C); without a generator those of the seeds seed, seed + 1, ..."""
        return torch.stack([self.draws.outputs(x, d).to(self.theta.dtype) for d in self._steps(n, generator)])

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n sets of weights, (n, P): those of ``function_samples``."""
        return torch.stack([self.theta + d for d in self._steps(n, generator)])

    def _steps(self, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Draw n steps from w̃, (P,) each, one after another."""
        draws = self.draws
        return (draws.numbered(k) if generator is None else draws.drawn(generator) for k in range(n))
