"""How many weights the data decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.curvature.base import layer_numbers
from lapwing.data.inputs import Inputs, check_finite
from lapwing.errors import UnsupportedError
from lapwing.networks.functionals import Functional
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.posteriors import draws
from lapwing.posteriors.draws import Kept, drawn_predictive, numbers_of
from lapwing.priors.base import BoundPrior
from lapwing.problem import Problem
from lapwing.runtime.memory import gathered
from lapwing.runtime.state import Latest
from lapwing.runtime.trace import Trace
from lapwing.values.functions import differentiable_beliefs
from lapwing.values.gaussian import ChosenOutputs, FunctionGaussian


class Posterior(Protocol):
    """A fitted belief, the result of every method.

    Classes inherit from it and define ``__call__``; every other member has a default.
    """

    problem: Problem
    trace: Trace | None = None  # the record of the tuner, without a name if only ``fit`` had remarks
    linearised: ClassVar[bool] = False  # whether it is ``Linearised``
    is_sampled: ClassVar[bool] = False  # whether evidence and γ are estimates from samples, solved for each prior
    solves_for_inputs: ClassVar[bool] = False  # whether each prediction solves systems over all data
    has_spread: ClassVar[bool] = True  # whether there is a covariance to scale
    differentiable: ClassVar[bool] = False  # whether beliefs are differentiable in inputs that require a gradient

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        """Return the belief about the outputs at x, with the covariance between inputs if joint."""
        ...

    def chosen(self, x: Inputs, outputs: ChosenOutputs, joint: bool = False) -> FunctionGaussian:
        """Return the belief about some outputs at x; taken from that about all, unless a class has a cheaper way."""
        return self(x, joint).chosen(outputs)

    @property
    def base(self) -> Posterior:
        """The posterior that was fitted; a mixture varies its prior and noise."""
        return self

    @property
    def of_one_network(self) -> bool:
        """Whether it belongs to ``problem.network`` alone, and not to several networks."""
        return True

    @property
    def findings(self) -> tuple[str, ...]:
        """Remarks on the posterior itself, in words; those of its tuner are in the trace."""
        return ()

    def plain(self) -> Posterior:
        """Return a posterior whose mean is the output of the network; this one, except for the mean of an ensemble."""
        return self

    @cached_property
    def kept_draws(self) -> Kept:
        """The draws of the weights that predictions from functions use."""
        return Latest()

    def predict(self, x: Inputs, samples: int | None = None) -> Any:
        """Return the predictive of the targets at x, from this many functions, or from variances if it is zero."""
        likelihood = self.problem.likelihood
        numbers = numbers_of([self], likelihood, [float(self.has_spread)], samples, x)
        if numbers:
            predict = lambda beliefs: likelihood.predict_samples(beliefs[0])
            return drawn_predictive([self], x, numbers, self.kept_draws, predict)
        (belief,) = differentiable_beliefs(lambda inner: [self(inner)], x)
        check_finite(belief.mean, "outputs of the network")
        return likelihood.predict(belief)

    def prepare(self) -> None:
        """Compute what predictions need of the data, if anything: several processes do it together."""
        return

    def with_trace(self, trace: Trace) -> Posterior:
        """Return the posterior with this record; the same one where it has no place for a record."""
        return self

    @property
    def evidence_error(self) -> float:
        """The standard error of ``log_evidence``; zero unless it is an estimate."""
        return 0.0

    def unseen_gamma(self) -> Tensor | None:
        """Return γ (P,) of the curvature that a bound on the evidence leaves out, or None if there is no such term."""
        return None


@runtime_checkable
class Reweightable(Protocol):
    """A posterior that takes a new prior or noise without a pass over the data."""

    problem: Problem

    def with_problem(self, problem: Problem) -> Any:
        """Return the posterior under another prior or noise."""
        ...

    def with_prior(self, prior: BoundPrior) -> Any:
        """Return the posterior under another prior, which takes its scale from the curvature if it needs one."""
        return self.with_problem(self.problem.with_prior(prior))


@runtime_checkable
class Tunable(Reweightable, Protocol):
    """A posterior that takes another noise without a pass over the data, and keeps the trace of its tuner."""

    @property
    def noise(self) -> Tensor | None: ...

    def with_noise(self, noise: Tensor) -> Posterior: ...

    def with_trace(self, trace: Trace) -> Posterior: ...


@runtime_checkable
class Bounded(Protocol):
    """A posterior that knows beyond which hyperparameters its evidence hardly changes; a search stays inside."""

    @property
    def limits(self) -> tuple[Tensor, Tensor]:
        """The smallest and largest logarithms of all values of the prior, flat, and of the noise after them."""
        ...


class Linearised(Posterior, Reweightable, Protocol):
    """A belief about the weights that the Jacobian maps to outputs; another prior or noise needs no data."""

    linearised: ClassVar[bool] = True
    differentiable: ClassVar[bool] = True

    def covariance(self, jacobian: LayerJacobians) -> Tensor:
        """Return the covariance of the outputs that the Jacobian belongs to, (B, S, C, C)."""
        ...

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        """Return the covariance between all inputs and outputs of two Jacobians, (B K, B' K'), or of one itself."""
        ...

    def chosen(self, x: Inputs, outputs: ChosenOutputs, joint: bool = False) -> FunctionGaussian:
        """Return the belief about some outputs at x, by backward passes for these alone."""
        network = self.problem.network
        if joint:
            return FunctionGaussian.across(*draws.joint(self.cross, network, x, outputs))
        return self.marginal(x, outputs)

    def marginal(self, x: Inputs, outputs: ChosenOutputs | None = None) -> FunctionGaussian:
        """Return the belief about all or some outputs of each input at x, whose covariance is computed at once."""
        network, means = self.passing, []

        def parts() -> Iterator[Tensor]:
            for _, tangent in network.tangents(x, chosen=outputs):
                means.append(tangent.f.to(network.dtype))
                runs = (self.covariance(jacobian) for jacobian in tangent.runs(whole_tokens=True))
                yield gathered(runs, tangent.tokens, 1).reshape(*means[-1].shape, -1)

        cov = gathered(parts(), network.count(x))
        return FunctionGaussian(gathered(means, len(cov)), cov)

    @property
    def passing(self) -> Network:
        """The network as a covariance passes through it: block by block where the posterior allows it."""
        return self.problem.network

    @property
    def shared(self) -> object:
        """What this posterior shares with those of other priors and noises: ``covariances`` takes them together."""
        return self

    def covariances(self, jacobian: LayerJacobians, members: Sequence[Any]) -> list[Tensor]:
        """Return ``covariance(jacobian)`` of every member, posteriors with the same ``shared`` as this one."""
        return [each.covariance(jacobian) for each in members]


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
class HasEvidence(Protocol):
    """A posterior with a log marginal likelihood, which tuners maximise and ``compare`` ranks models by."""

    def log_evidence(self) -> Tensor: ...


@runtime_checkable
class HasWeightSamples(Protocol):
    """A posterior that draws weights, (n, P), in the order of ``network.theta()``."""

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor: ...


@runtime_checkable
class HasDeviations(Protocol):
    """A posterior that draws weights of the tangent model as steps from their mean: (n, P)."""

    problem: Problem

    def deviations(self, n: int, generator: torch.Generator | None = None) -> Tensor: ...


@runtime_checkable
class HasFunctionSamples(Protocol):
    """A posterior that draws functions, evaluated at x: (n, B, [T,] C). Each draw is one function at all inputs."""

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor: ...


def required(posterior: Any, capability: Any, what: str, method: str = "") -> Any:
    """Return the posterior; raise if it has not this capability, with the name of the method in the message."""
    if not isinstance(posterior, capability):
        raise UnsupportedError(f"{method or type(posterior).__name__} has no {what}; choose a method that has.")
    return posterior


NEAR = 0.8  # share of the weights from which a network may be too small


@dataclass(frozen=True, eq=False)
class EffectiveParameters:
    r"""γ = tr(Λ⁻¹ H/φ), between zero and the number of weights P: how many directions the data determine.

    ``layers`` maps layer names to γ and ``sizes`` to numbers of weights; ``by_precision`` is γ of the weights that
    share a precision of the prior. Print it to read it.
    """

    total: float
    weights: int
    layers: dict[str, float]
    sizes: dict[str, int]
    by_precision: Tensor

    @property
    def findings(self) -> tuple[str, ...]:
        """Advice on the size of the network, if there is any to give (MacKay 1992)."""
        advice = []
        if self.total > NEAR * self.weights:
            advice.append(
                f"gamma is {self.total:.1f} of {self.weights} weights: nearly all are decided by the data, so the "
                "network may be too small. Try a larger one and compare the evidence."
            )
        for name, gamma in self.layers.items():
            if self.sizes[name] > 1 and gamma < 0.01 * self.sizes[name]:
                advice.append(
                    f"layer {name or '(top)'}: gamma is {gamma:.2g} of {self.sizes[name]} weights; the data decide "
                    "almost none of them, and a smaller layer may do."
                )
        return tuple(advice)

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.layers, "layer"))
        lines = [f"{'layer':{width}s} {'weights':>9s} {'gamma':>10s} {'share':>6s}"]
        for name, gamma in self.layers.items():
            size = self.sizes[name]
            lines.append(f"{name:{width}s} {size:9d} {gamma:10.2f} {gamma / size:6.1%}")
        lines.append(f"{'total':{width}s} {self.weights:9d} {self.total:10.2f} {self.total / self.weights:6.1%}")
        return "\n".join([*lines, *self.findings])


@runtime_checkable
class HasGammas(Protocol):
    """A posterior that knows how far the data determine each weight."""

    @property
    def problem(self) -> Problem: ...

    def gammas(self) -> Tensor:
        """Return γ of every weight, (P,)."""
        ...


def effective_parameters(posterior: HasGammas) -> EffectiveParameters:
    """Return γ of a posterior in weight space, in total and by layer.

    Cost: the posterior variance of every weight. Exact for the structure that the method has; an estimate for samples.
    """
    problem = posterior.problem
    selection, prior = problem.network.selection, problem.prior
    with torch.no_grad():
        each = posterior.gammas().to(prior.values)
    names, numbers = layer_numbers(selection)
    numbers = numbers.to(each.device)
    gammas = each.new_zeros(len(names)).index_add(0, numbers, each).tolist()
    sizes = torch.bincount(numbers, minlength=len(names)).tolist()
    return EffectiveParameters(
        float(each.sum()), len(each), dict(zip(names, gammas, strict=True)), dict(zip(names, sizes, strict=True)),
        prior.summed(each),
    )  # fmt: skip
