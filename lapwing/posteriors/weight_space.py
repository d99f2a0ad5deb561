"""A Gaussian belief about the weights and what it says about the outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.data import Inputs
from lapwing.core.gaussian import Deferred, FunctionGaussian
from lapwing.core.random import normal
from lapwing.curvature.sweep import Statistics, residual_noise
from lapwing.posteriors.problem import Problem
from lapwing.posteriors.protocols import Curvature, Precision

WIDE = 32  # outputs above which a (B, C, C) covariance is built only when asked for


@dataclass(frozen=True, eq=False)
class WeightPosterior:
    """theta ~ N(w̃, Λ⁻¹) with Λ = H/φ + A.

    ``curvature`` holds H at unit dispersion; prior and dispersion come from the problem, so that changing them
    costs a factorisation and no data.
    """

    problem: Problem
    curvature: Curvature
    statistics: Statistics
    theta: Tensor  # w̃, (P,)

    @classmethod
    def fitted(cls, problem: Problem, curvature: Curvature, statistics: Statistics) -> WeightPosterior:
        """After the pass over the data: the noise, where it is to be found, is the mean squared residual at w̃."""
        likelihood = residual_noise(problem.likelihood, statistics, problem.network.device)
        problem = problem.with_likelihood(likelihood)
        return cls(problem, curvature, statistics, problem.network.theta())

    @cached_property
    def precision(self) -> Precision:
        return self.curvature.precision(self._phi, self.problem.prior)

    @property
    def _phi(self) -> Tensor:
        return self.problem.likelihood.dispersion.to(self.theta.device)

    def with_problem(self, problem: Problem) -> WeightPosterior:
        """The same curvature under another prior or noise."""
        return replace(self, problem=problem)

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        network = self.problem.network
        if joint:
            return self._joint(x)
        outputs = network.output_shape[-1]
        if outputs <= WIDE:
            mean, cov = self._quadratic(x, full=True)
            return FunctionGaussian(mean, cov)
        mean = network(x).to(network.dtype)
        return FunctionGaussian(
            mean,
            Deferred(lambda: self._quadratic(x, full=False)[1], lambda: self._quadratic(x, full=True)[1]),
        )

    def _quadratic(self, x: Inputs, full: bool) -> tuple[Tensor, Tensor]:
        network, precision = self.problem.network, self._settled
        means, covs = [], []
        for _, tangent in network.tangents(x):
            f = tangent.f.to(network.dtype)
            found = precision.quadratic(tangent.jacobians(), full)
            means.append(f)
            covs.append(found if f.ndim == 3 else found.squeeze(1))
        return _joined(means), _joined(covs)

    def _joint(self, x: Inputs) -> FunctionGaussian:
        network = self.problem.network
        tangent = network.linearise(x)
        f = tangent.f.to(network.dtype)
        cov = self._settled.cross(tangent.jacobians())
        return FunctionGaussian(f, cov.reshape(*f.shape, *f.shape), joint=True)

    @cached_property
    def _settled(self) -> Precision:
        """The precision for predictions: no gradient flows from them to the hyperparameters."""
        with torch.no_grad():
            return self.curvature.precision(self._phi.detach(), _detached(self.problem).prior)

    def log_likelihood(self) -> Tensor:
        """log p(D | w̃)."""
        phi, likelihood = self._phi, self.problem.likelihood
        normaliser = likelihood.log_normaliser(phi, self.statistics.outputs)
        return -self.statistics.loss / phi - self.statistics.data * normaliser

    def log_evidence(self) -> Tensor:
        r"""The Laplace evidence with every constant, differentiable in the prior and the dispersion.

        $$ \log p(D \mid \tilde w) + \tfrac12 \log\det A - \tfrac12 \|\tilde w - \mu\|_A^2 - \tfrac12 \log\det\Lambda $$
        """
        prior = self.problem.prior
        penalty = prior.penalty(self.theta.double()).double()
        return self.log_likelihood() + 0.5 * (
            prior.logdet().double() - penalty - self.curvature.logdet(self._phi, prior)
        )

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, P) around w̃."""
        return self.theta + self._deviations(n, generator)

    def _deviations(self, n: int, generator: torch.Generator | None) -> Tensor:
        eps = normal((n, len(self.theta)), generator, self.theta)
        with torch.no_grad():
            return self._settled.sample(eps).to(self.theta)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, [T,] C) of the tangent model: one draw of the weights for all inputs."""
        network = self.problem.network
        deviations = self._deviations(n, generator)
        found = []
        for _, tangent in network.tangents(x):
            f = tangent.f.to(network.dtype)
            found.append(f + tangent.jacobians().jvp(deviations).reshape(n, *f.shape))
        return torch.cat(found, 1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _detached(problem: Problem) -> Problem:
    prior = problem.prior
    return problem.with_prior(prior.with_precision(prior.values.detach()))
