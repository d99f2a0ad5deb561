"""The contracts between methods, tuners and the front door."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.core.data import Data, Inputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.trace import Trace
from lapwing.linalg.logdet import Logdet
from lapwing.linalg.solution import Solution
from lapwing.networks.functionals import Functional
from lapwing.networks.jacobians import LayerJacobians
from lapwing.priors.gaussian import Prior
from lapwing.problem import Problem


class Precision(Protocol):
    """Λ = H/φ + A, factorised once."""

    def logdet(self) -> Tensor: ...

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        """J Λ⁻¹ Jᵀ: (B, S, C, C), or its diagonal (B, S, C)."""
        ...

    def cross(self, jacobian: LayerJacobians) -> Tensor:
        """J Λ⁻¹ Jᵀ between all inputs and outputs, (B K, B K)."""
        ...

    def sample(self, eps: Tensor) -> Tensor:
        """Λ^-½ eps for eps (n, P)."""
        ...

    def adjoint(self, v: Tensor) -> Tensor:
        """The transpose of ``sample``, for v (n, P)."""
        ...

    def solve(self, v: Tensor) -> Tensor:
        """Λ⁻¹ v for v (n, P): ``sample`` after ``adjoint``."""
        ...

    def variances(self) -> Tensor:
        """The diagonal of Λ⁻¹, (P,)."""
        ...


@runtime_checkable
class HoldsDirections(Protocol):
    """A precision that gives some directions no variance at all, so that γ does not follow from variances alone."""

    def decided(self, precision: Tensor) -> Tensor:
        """Return γ of every weight, (P,), under prior precisions (P,)."""
        ...


class Curvature(Protocol):
    """H at unit dispersion in some structure. Where two add up, the sum is the curvature of both data sets."""

    def precision(self, phi: Tensor, prior: Prior) -> Precision: ...

    def logdet(self, phi: Tensor, prior: Prior) -> Tensor:
        """Of H/φ + A, by the cheapest way there is."""
        ...

    def diagonal(self) -> Tensor:
        """Of H, (P,), with dead entries raised to a thousandth of what is typical of their layer."""
        ...

    def tensors(self) -> dict[str, Tensor]: ...


class Solver(Protocol):
    """Samples of a posterior and its log-determinant, for any prior and noise."""

    def solved(self, problem: Problem, start: Tensor | None = None) -> Solution: ...

    def logdet(self, problem: Problem) -> Logdet: ...

    def gamma(self, problem: Problem, samples: Tensor) -> Tensor: ...


class Posterior(Protocol):
    """A fitted belief: what every method returns."""

    @property
    def problem(self) -> Problem: ...

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian: ...


@runtime_checkable
class Method(Protocol):
    """A way to compute the belief; a frozen dataclass of settings."""

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> Posterior: ...


@runtime_checkable
class Reweightable(Protocol):
    """Takes a new prior or noise without touching the data."""

    def with_problem(self, problem: Problem) -> Posterior: ...


@runtime_checkable
class Tunable(Protocol):
    """Takes other noise without touching the data, and remembers what a tuner did."""

    @property
    def noise(self) -> Tensor | None: ...

    def with_noise(self, noise: Tensor) -> Posterior: ...

    def with_problem(self, problem: Problem) -> Posterior: ...

    def with_trace(self, trace: Trace) -> Posterior: ...


@runtime_checkable
class SamplesGamma(Protocol):
    """A posterior whose evidence and γ are estimates from samples."""

    def gamma_samples(self) -> Tensor:
        """Return γ of every weight from each sample, (K, P)."""
        ...

    def warm_started(self, problem: Problem) -> Posterior:
        """Return the posterior of another problem, whose solves start from the present samples."""
        ...


@runtime_checkable
class HasUnseenGamma(Protocol):
    """A posterior whose evidence may be a bound, with a term for the curvature that its structure leaves out."""

    def unseen_gamma(self) -> Tensor | None:
        """Return what that term adds to γ of each weight, (P,), or None if the evidence has no such term."""
        ...


@runtime_checkable
class BoundsLogdet(Protocol):
    """A curvature whose log-determinant is a bound, with a term for the curvature that it leaves out."""

    def unseen(self, phi: Tensor, prior: Prior) -> Tensor:
        """Return that term for each weight, (P,)."""
        ...


@runtime_checkable
class Preconditions(Protocol):
    """A curvature whose precision couples all weights and so is a good preconditioner for the exact one.

    Blocks would spread the eigenvalues, and a subspace would keep all weights outside it fixed.
    """

    @property
    def preconditions(self) -> bool: ...


@runtime_checkable
class NeedsPrior(Protocol):
    """A method that may have no evidence to learn a prior with; ``fit`` then learns one beforehand.

    Where ``needs_prior`` is False, the method is fitted as those without it.
    """

    @property
    def needs_prior(self) -> bool: ...


@runtime_checkable
class HasVarianceOf(Protocol):
    """Knows how far a scalar function of the weights is undecided, or with inputs one of the outputs there."""

    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor: ...


@runtime_checkable
class Linearised(Protocol):
    """A belief about the weights, which the Jacobian takes to outputs; another prior or noise costs no data."""

    def covariance(self, jacobian: LayerJacobians) -> Tensor:
        """Of the outputs that the Jacobian belongs to, (B, S, C, C)."""
        ...

    def with_problem(self, problem: Problem) -> Posterior: ...


@runtime_checkable
class HasEvidence(Protocol):
    """Knows the log marginal likelihood of its data, for a tuner to raise and to compare models by."""

    def log_evidence(self) -> Tensor: ...


@runtime_checkable
class HasWeightSamples(Protocol):
    """Draws weights: (n, P), in the order of ``network.theta()``."""

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor: ...


@runtime_checkable
class HasFunctionSamples(Protocol):
    """Draws functions and gives their outputs at x, (n, B, [T,] C): each draw is one function at all inputs."""

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor: ...
