"""The contracts between methods, tuners and the front door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.core.data import Inputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.trace import Trace
from lapwing.linalg.operators import Solution
from lapwing.networks.functionals import Functional
from lapwing.networks.jacobians import LayerJacobians
from lapwing.priors.bound import BoundPrior
from lapwing.problem import Problem


class Posterior(Protocol):
    """A fitted belief, the result of every method."""

    @property
    def problem(self) -> Problem: ...

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian: ...


@runtime_checkable
class Reweightable(Protocol):
    """A posterior that takes a new prior or noise without a pass over the data."""

    def with_problem(self, problem: Problem) -> Posterior: ...


@runtime_checkable
class Tunable(Reweightable, Protocol):
    """A posterior that takes another noise without a pass over the data, and keeps the trace of its tuner."""

    @property
    def noise(self) -> Tensor | None: ...

    def with_noise(self, noise: Tensor) -> Posterior: ...

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
class HasVarianceOf(Protocol):
    """A posterior with variances of scalar functions of the weights, or of the outputs at given inputs."""

    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor: ...


@runtime_checkable
class Linearised(Reweightable, Protocol):
    """A belief about the weights that the Jacobian maps to outputs; another prior or noise needs no data."""

    @property
    def problem(self) -> Problem: ...

    def covariance(self, jacobian: LayerJacobians) -> Tensor:
        """Return the covariance of the outputs that the Jacobian belongs to, (B, S, C, C)."""
        ...


@runtime_checkable
class SolvesForInputs(Protocol):
    """A linearised belief that solves systems over all data for the inputs of every prediction."""

    def solved(self, rows: Tensor) -> Solution:
        """Return Λ⁻¹ times every row (K, P)."""
        ...


@runtime_checkable
class SharesJacobian(Protocol):
    """A linearised belief that computes the covariances of several priors and noises from one rotated Jacobian."""

    @property
    def curvature(self) -> Any: ...

    def covariances(self, jacobian: LayerJacobians, members: Sequence[Any]) -> list[Tensor]:
        """Return ``covariance(jacobian)`` of every member, posteriors with the same curvature as this one."""
        ...


@runtime_checkable
class HasOwnMean(Protocol):
    """A posterior whose mean is not the output of the network, such as the mean of an ensemble."""

    def plain(self) -> Posterior:
        """Return the network without error bars."""
        ...


@runtime_checkable
class HasPredictive(Protocol):
    """A posterior with a predictive of its own, which is not that of its mean and covariance alone."""

    def predict(self, x: Inputs) -> Any: ...


@runtime_checkable
class HasEvidence(Protocol):
    """A posterior with a log marginal likelihood, which tuners maximise and ``compare`` ranks models by."""

    def log_evidence(self) -> Tensor: ...


@runtime_checkable
class EstimatesEvidence(Protocol):
    """A posterior whose evidence is an estimate."""

    @property
    def evidence_error(self) -> float:
        """The standard error of ``log_evidence``."""
        ...


@runtime_checkable
class HasCurvature(Protocol):
    """A posterior with a curvature H in weight space, at unit dispersion."""

    @property
    def curvature(self) -> Any: ...

    def with_prior(self, prior: BoundPrior) -> Posterior:
        """Return the same curvature under another prior, which takes its scale from the curvature if it needs one."""
        ...


@runtime_checkable
class HasWeightSamples(Protocol):
    """A posterior that draws weights, (n, P), in the order of ``network.theta()``."""

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor: ...


@runtime_checkable
class HasFunctionSamples(Protocol):
    """A posterior that draws functions, evaluated at x: (n, B, [T,] C). Each draw is one function at all inputs."""

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor: ...
