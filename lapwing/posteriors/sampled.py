"""Beliefs made of one function, of several, of samples, or of independent weights, without a matrix over weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.errors import FileError, UnsupportedError
from lapwing.linalg.krylov import Logdet
from lapwing.linalg.operators import Solution
from lapwing.networks.forward import outside_autocast, outside_inference
from lapwing.networks.network import Network
from lapwing.networks.passes import Functional, is_single_map, last_features, outputs_along, weight_slope
from lapwing.networks.tangent import LayerJacobians
from lapwing.posteriors.base import ALL, TRACE, Posterior, Trace
from lapwing.posteriors.weight_space import AtCentre, Mode
from lapwing.priors import BoundPrior
from lapwing.problem import STATISTICS, Problem, Statistics
from lapwing.runtime.settings import integer
from lapwing.runtime.states import (
    MEMBERS,
    SMALLEST,
    WEIGHTS,
    Array,
    Maybe,
    PartOf,
    Real,
    State,
    Stored,
    Whole,
    saved,
    stored,
)
from lapwing.runtime.threads import derived_generator, normal_rows
from lapwing.values.gaussian import Deferred, FunctionGaussian, Query


@saved
@dataclass(frozen=True, eq=False)
class PointPosterior(Stored, Posterior):
    """All mass at w̃: the plain network with its likelihood, the baseline for everything else."""

    problem: Problem
    statistics: Statistics = stored(STATISTICS)
    theta: Tensor = stored(WEIGHTS)
    has_spread: ClassVar[bool] = False
    differentiable: ClassVar[bool] = True

    def with_problem(self, problem: Problem) -> PointPosterior:
        return replace(self, problem=problem)

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        f = query.of(self._f(x))
        if query.joint:
            return FunctionGaussian.across(f, f.new_zeros(f.numel(), f.numel()))
        none = lambda: torch.zeros_like(f)
        return FunctionGaussian(f, Deferred(none, lambda: f.new_zeros(*f.shape, f.shape[-1]), none))

    def _f(self, x: Inputs) -> Tensor:
        network = self.problem.network
        return network(x).to(network.dtype)

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.theta.expand(n, -1).clone()

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        f = self._f(x)
        return f.expand(n, *f.shape).clone()


class OwnMean(Stored, Posterior):
    """A belief whose mean is not the output of the network."""

    def plain(self) -> PointPosterior:
        return PointPosterior(self.problem, self.statistics, self.theta)


class Members:
    """K functions of the input. Classes define ``__call__`` and ``__len__``."""

    together: bool = False  # whether inputs of a call must run together: drawn numbers would be others for parts of it
    of_one_network: ClassVar[bool] = True  # whether all members have the weights of one network

    def __call__(self, x: Inputs) -> Tensor:
        """Return the outputs of all members, (K, B, [T,] C)."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def refuse_changed(self) -> None:
        """Raise ``ModelError`` if a network has other weights than at the fit. By default there is none to change."""

    def state(self) -> State:
        """Return what a file needs; raise ``UnsupportedError`` if a file cannot hold the members."""
        raise NotImplementedError


@saved
@dataclass(frozen=True, eq=False)
class MembersPosterior(OwnMean):
    """f(x) ~ N(mean of the members, their covariance). A prediction costs a forward pass for each member."""

    problem: Problem
    members: Members = stored(PartOf(Members))
    statistics: Statistics = stored(STATISTICS)
    theta: Tensor = stored(WEIGHTS)

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        return gaussian_of(query.of(self._outputs(x)), query.joint)

    @property
    def of_one_network(self) -> bool:
        return self.members.of_one_network

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the first n members, (n, B, [T,] C); the generator is not used."""
        if n > len(self.members):
            raise UnsupportedError(f"{n} samples were asked for and there are {len(self.members)} members.")
        return self._outputs(x)[:n]

    def _outputs(self, x: Inputs) -> Tensor:
        self.members.refuse_changed()
        return outputs_of(self.members, self.problem.network, x).to(self.theta.dtype)


def gaussian_of(outputs: Tensor, joint: bool) -> FunctionGaussian:
    """Return the mean and covariance of K functions with outputs (K, B, [T,] C)."""
    mean = outputs.mean(0)
    return FunctionGaussian.of_deviations(mean, outputs - mean, max(1, len(outputs) - 1), joint)


def outputs_of(members: Members, network: Network, x: Inputs) -> Tensor:
    """Return the outputs of all members, (K, B, [T,] C), in runs of inputs that fit the byte budget."""
    return members(x) if members.together else network.in_chunks(x, members, dim=1)


def mean_of(members: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
    """Return the mean of the members as a function of the inputs, in float64."""
    return lambda x: members(x).double().mean(0)


@saved
@dataclass(frozen=True, eq=False)
class MeanFieldPosterior(OwnMean):
    """W ~ N(mean, diag(variance)) for f = W a, with a the input of the last layer and a one for its bias.

    Outputs are independent, f_c ~ N(m_c·a, Σ_i v_ci a_i²): exactly, since the network is linear in W. The mean is not
    the output of the network. A prediction costs one forward pass.
    """

    problem: Problem
    mean: Tensor = stored(Array(("C", "D"), dtype=torch.float64))
    variance: Tensor = stored(Array(("C", "D"), SMALLEST, dtype=torch.float64))
    statistics: Statistics = stored(STATISTICS)  # of the network itself
    theta: Tensor = stored(WEIGHTS)  # w̃, (P,)
    elbo: float = stored(
        Real()
    )  # below log p(D) for Gaussian noise; else estimated by the draws of the search, and a little too high

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        a = features(self.problem.network, x)
        mean = (a @ self.mean.mT).to(self.theta.dtype)
        if query.joint:
            blocks = torch.einsum("bi,ci,di->cbd", a, self.variance, a).to(mean)  # (C, B, B)
            cov = torch.diag_embed(blocks.permute(1, 2, 0), dim1=1, dim2=3)  # (B, C, B, C)
            return query.of_belief(FunctionGaussian(mean, cov, joint=True))
        variance = (a.square() @ self.variance.mT).to(mean)
        deferred = Deferred(lambda: variance, lambda: torch.diag_embed(variance), lambda: _centred_variance(variance))
        return query.of_belief(FunctionGaussian(mean, deferred))

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n functions, (n, B, C): one draw of the weights for all inputs."""
        a = features(self.problem.network, x)
        return torch.einsum("bi,nci->nbc", a, self._draw_matrices(n, generator)).to(self.theta.dtype)

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n sets of weights, (n, P): those of ``function_samples``."""
        network = self.problem.network
        parameters = dict(network.layout[0].split(self._draw_matrices(n, generator).unsqueeze(1)))
        return torch.cat([parameters[name] for name in network.selection.names], -1).to(self.theta.dtype)

    def _draw_matrices(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n matrices, (n, C, D)."""
        noise = normal_rows(n, self.mean.numel(), generator, self.mean).reshape(n, *self.mean.shape)
        return self.mean + self.variance.sqrt() * noise

    @classmethod
    def from_state(cls, state: State, owner: Any = None) -> MeanFieldPosterior:
        if not is_single_map(owner.network):
            raise FileError("the weights of a mean-field posterior are not one linear map; expected a last layer")
        posterior: MeanFieldPosterior = super().from_state(state, owner)
        if posterior.mean.shape != (form := owner.network.layout[0].form[1:]):
            raise FileError(f"the mean has the shape {tuple(posterior.mean.shape)}; expected {tuple(form)}")
        return posterior


def _centred_variance(variance: Tensor) -> Tensor:
    """Return the variance of each output after the mean over outputs is taken off, for independent outputs (B, C)."""
    count = variance.shape[-1]
    return variance * (1 - 2 / count) + variance.sum(-1, keepdim=True) / count**2


def features(network: Network, x: Inputs) -> Tensor:
    """Return the input (B, D) of the last layer in float64, in runs of inputs that fit the byte budget."""
    return network.in_chunks(x, feature_function(network))


def feature_function(network: Network) -> Callable[[Inputs], Tensor]:
    """Return a function that computes the input of the last layer, and raises if outputs are not W a."""

    def run(x: Inputs) -> Tensor:
        both = last_features(network, x)
        if both is None:
            raise UnsupportedError(
                "the last layer is used several times for one input, as for tokens or pixels; expected once. Use "
                "Diagonal() or Kron() with weights=lw.last_layer."
            )
        a, f = (t.detach().double() for t in both)
        weights = network.layout[0].arrange(network.selection.split(network.theta().double()))[0]
        gap, size = (f - a @ weights.mT).abs().max(), f.abs().max().clamp_min(1.0)
        if not bool(gap <= torch.finfo(network.arithmetic).eps ** 0.5 * size):
            raise UnsupportedError(
                f"the outputs differ from the last layer's by up to {float(gap):.3g}; expected the same. Something "
                "follows the last layer, such as a nonlinearity or a factor: use Diagonal() with weights=lw.last_layer."
            )
        return a

    return run


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
class SampledPosterior(AtCentre):
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

    def warm_start(self, problem: Problem) -> SampledPosterior:
        """Return the posterior of another problem, whose solves start from the present samples."""
        return replace(self.with_problem(problem), start=self.solution.x)

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

    def numbered_steps(self, numbers: range) -> Tensor:
        """Return stored samples, (n, P): number k stands for sample k mod K."""
        return self.samples[[k % self.n_stored() for k in numbers]]

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

    def state(self) -> State:
        solution, logdet = self.solution, self.solver.logdet(self.problem)
        settings, tensors = self.state_at_centre()
        settings |= {
            "iterations": solution.iterations, "tolerance": solution.tolerance, "logdet_error": logdet.error
        }  # fmt: skip
        tensors |= {"samples": solution.x, "residuals": solution.residuals, "logdet": logdet.value.detach()}
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
        mode = Mode.from_numbers(fields["mode"], fields["mode_loss"])
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


@dataclass(frozen=True, eq=False)
class Drawn(OwnMean):
    """f(x) ~ N(mean, covariance) of the network under ``count`` draws of its weights.

    Draw k has the seed ``seed + k`` at all inputs. Draws are not kept but made again for every call: a prediction costs
    a forward pass for each. Classes define ``draw_step``.
    """

    problem: Problem
    statistics: Statistics = stored(STATISTICS)  # of the mean of the draws
    theta: Tensor = stored(WEIGHTS)  # w̃, (P,)
    count: int = stored(Whole(2, MEMBERS))  # K
    seed: int = stored(Whole())

    def draw_step(self, generator: torch.Generator | None) -> Tensor:
        """Draw a step from w̃, (P,)."""
        raise NotImplementedError

    def outputs(self, x: Inputs) -> Tensor:
        """Return the outputs of the network under all draws, (K, B, [T,] C)."""
        return torch.stack([self.problem.network.at(d, x) for d in self._steps(self.count, None)])

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        return gaussian_of(query.of(self.outputs(x).to(self.theta.dtype)), query.joint)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n outputs of the network, (n, B, [T,] C); without a generator those of the seeds seed, seed + 1, ..."""
        network = self.problem.network
        return torch.stack([network.at(d, x).to(self.theta.dtype) for d in self._steps(n, generator)])

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n sets of weights, (n, P): those of ``function_samples``."""
        return torch.stack([self.theta + d for d in self._steps(n, generator)])

    def _steps(self, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Draw n steps from w̃, (P,) each, one after another; without a generator those of the seeds."""
        for k in range(n):
            source = generator
            if source is None:
                source = derived_generator(torch.Generator().manual_seed(self.seed + k), torch.empty(0))
            yield self.draw_step(source)
