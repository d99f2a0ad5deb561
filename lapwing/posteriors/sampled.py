"""A belief made of samples: no matrix over the weights is ever formed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.data import Inputs
from lapwing.core.gaussian import Deferred, FunctionGaussian
from lapwing.core.settings import refuse_other_than_whole
from lapwing.core.trace import Trace
from lapwing.errors import UnsupportedError
from lapwing.linalg.cg import Solution
from lapwing.linalg.ridge import Logdet
from lapwing.losses import Statistics
from lapwing.networks.forward import outside_autocast, outside_inference
from lapwing.networks.functionals import Functional, weight_slope
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.tangent import Tangent
from lapwing.posteriors.protocols import Solver
from lapwing.problem import Problem


@dataclass(frozen=True, eq=False)
class SampledPosterior:
    """theta = w̃ + z_j, with z_1 .. z_K drawn from N(0, Λ⁻¹) of the full GGN by solving one linear system for each.

    The noise of the samples is fixed: another prior or noise gives the same samples moved, so that what is learned from
    them changes smoothly. Mean, variance, covariance and function samples come from the same K vectors; predictions
    cost one product with the Jacobian for all of them. ``solution`` says how far the systems were solved.
    """

    problem: Problem
    solver: Solver
    statistics: Statistics
    theta: Tensor  # w̃, (P,)
    trace: Trace | None = None
    start: Tensor | None = None  # samples that are near those looked for, (K, P)

    @cached_property
    @outside_autocast
    @outside_inference
    def solution(self) -> Solution:
        """The samples (K, P) around nought, with the relative residual of each."""
        with torch.no_grad():
            return self.solver.solved(self.problem, self.start)

    @property
    def samples(self) -> Tensor:
        return self.solution.x.to(self.theta)

    def with_problem(self, problem: Problem) -> SampledPosterior:
        prior, mine = problem.prior, self.problem.prior
        if prior.needs_curvature:
            if mine.scale is None:
                raise UnsupportedError(
                    "samples keep no curvature for a g-prior to take; fit again with prior=g_prior()."
                )
            problem = problem.with_prior(prior.scaled(mine.scale))
        return replace(self, problem=problem)

    def with_trace(self, trace: Trace) -> SampledPosterior:
        return replace(self, trace=trace)

    @property
    def noise(self) -> Tensor | None:
        likelihood = self.problem.likelihood
        return likelihood.dispersion if likelihood.learns_dispersion else None

    def with_noise(self, noise: Tensor) -> SampledPosterior:
        return replace(self, problem=self.problem.with_likelihood(self.problem.likelihood.with_dispersion(noise)))

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        f, moved = self._moved(x)
        belief = FunctionGaussian.of_deviations(f, moved, len(moved), joint)
        if isinstance(belief.covariance, Deferred):
            recipes = belief.covariance
            return FunctionGaussian(f, Deferred(outside_autocast(recipes.variance), outside_autocast(recipes.cov)))
        return belief

    def covariance(self, jacobian: LayerJacobians) -> Tensor:
        """Of each datum, (B, S, C, C): the mean of J z zᵀ Jᵀ over the samples."""
        moved = jacobian.jvp(self.samples)
        moved = moved.reshape(*moved.shape[:2], jacobian.tokens, -1)
        return torch.einsum("nbsc,nbsd->bscd", moved, moved) / len(moved)

    def _moved(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """f and J z for every sample: (B, [T,] C) and (K, B, [T,] C)."""
        network = self.problem.network
        outputs, moved = [], []
        for _, tangent in network.tangents(x):
            f = tangent.f.to(network.dtype)
            outputs.append(f)
            moved.append(self._along(tangent, f))
        return torch.cat(outputs), torch.cat(moved, 1)

    def _along(self, tangent: Tangent, f: Tensor) -> Tensor:
        """J z: forward mode costs two passes for each sample; the layer factors one for each output and sample."""
        if len(self.samples) <= f[0].numel() + 1:
            return self.problem.network.jvp(tangent.inputs, self.samples).to(f.dtype)
        return tangent.jacobians().jvp(self.samples).reshape(len(self.samples), *f.shape)

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """The first n of the K stored samples, around w̃; the generator has no say."""
        self._refuse_more(n)
        return self.theta + self.samples[:n]

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, [T,] C), of the first n stored samples: the same functions at whatever inputs."""
        self._refuse_more(n)
        f, moved = self._moved(x)
        return f + moved[:n]

    @outside_inference
    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Of a scalar function of the weights by name, or of the outputs at x: the mean of (∇g·z)² over the samples."""
        return (self.samples @ weight_slope(self.problem.network, function, x)).square().mean()

    def _refuse_more(self, n: int) -> None:
        refuse_other_than_whole("n", n)
        if n > len(self.samples):
            raise UnsupportedError(
                f"{n} samples were asked for and {len(self.samples)} are stored; fit with Sampled(num_samples=...)."
            )

    @outside_inference
    def gammas(self) -> Tensor:
        """γ of every weight, (P,): the mean over the samples of z (G z) / φ."""
        with torch.no_grad():
            return self.solver.gamma(self.problem, self.samples).mean(0)

    @property
    def loss(self) -> float:
        """At w̃, summed over the data, at unit dispersion."""
        return self.statistics.loss

    def log_likelihood(self) -> Tensor:
        """log p(D | w̃)."""
        phi, likelihood = self.problem.likelihood.dispersion.to(self.theta.device), self.problem.likelihood
        normaliser = likelihood.log_normaliser(phi, self.statistics.outputs)
        return -self.loss / phi - self.statistics.data * normaliser

    @outside_inference
    def log_evidence(self) -> Tensor:
        """As for the full posterior, with the log-determinant estimated; ``evidence_error`` is its standard error."""
        return self.log_likelihood() - 0.5 * (
            self.problem.prior.penalty(self.theta.double()) + self.solver.logdet(self.problem).value
        )

    @property
    @outside_autocast
    @outside_inference
    def evidence_error(self) -> float:
        return 0.5 * float(self.solver.logdet(self.problem).error)

    @property
    def centre(self) -> Tensor:
        return self.theta.double()


@dataclass(frozen=True, eq=False)
class StoredSamples:
    """Samples from a file: without the data they answer only for the prior and noise they were solved for."""

    precision: Tensor  # of every weight, (P,)
    dispersion: Tensor
    solution: Solution
    log_determinant: Logdet

    def solved(self, problem: Problem, start: Tensor | None = None) -> Solution:
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
