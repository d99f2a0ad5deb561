"""The contract of posteriors, the record of their tuners, predictions from drawn functions, effective parameters.

Draws are numbered, and each number is the same draw at every call: predictions do not depend on how inputs are split
into batches, and equal calls give equal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lapwing.curvature.base import layer_numbers
from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs, check_finite, wants_slopes
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.networks.jacobians import temporary_bytes
from lapwing.networks.network import Network
from lapwing.networks.passes import Functional, outputs_along
from lapwing.networks.tangent import LayerJacobians
from lapwing.predictives.base import Predictive
from lapwing.predictives.labels import AveragedClasses, SoftmaxSamples
from lapwing.problem import Problem, Statistics
from lapwing.runtime.settings import NONE, Latest, integer
from lapwing.runtime.states import UNLIMITED, Later, ListOf, MapOf, Maybe, Real, Record, State, Text
from lapwing.runtime.threads import derived_generator, normal
from lapwing.values.gaussian import FunctionGaussian, FunctionSamples, Query, differentiable_beliefs

# Outputs of an input (classes times tokens) above which classes are predicted from drawn functions. Variances take a
# backward pass for each output, 32 functions in pairs 33 forward passes, so that from some dozens of outputs on the
# functions are cheaper (``python -m benchmarks.scale_outputs``). Up to 256 the pairwise link stays nevertheless: it
# has no sampling error and knows the covariance of every two logits. Above, it does not: see ``PAIRED``.
MANY_OUTPUTS = 256
DEFAULT_SAMPLES = 32  # functions of a prediction, over all beliefs of a mixture
FUNCTION_COPIES = 3  # of the functions at some inputs: as they are computed, as they are, and what each adds to a sum
MIN_PAIRS = 2  # pairs of a belief, so that their spread gives a standard error
NOT_CONVERGED = 1e-2  # log-step above which a tuner has not converged
SAMPLES_RULE = integer(0) | NONE

Kept = Latest[tuple[range, ...], list[Tensor]]
ALL = Query()  # all outputs of each input by itself
OF_NETWORKS = ", mean of the networks"  # ends the name of a score that is a mean over several networks
SUM_OVER_DATA = "sum over the data that others can be added to, as Full, Diagonal, Kron and KernelSpace have"

T = TypeVar("T", bound="Tunable")
P = TypeVar("P", bound="Posterior")


def nll_text(score: float) -> str:
    """Return a mean negative log-likelihood as text: a thousandth is the smallest difference that matters.

    >>> nll_text(0.54467), nll_text(-1234.5)
    ('0.545', '-1.23e+03')
    """
    return f"{score:.3f}" if abs(score) < 1000 else f"{score:.3g}"


def short_number(value: float) -> str:
    """Return a positive number with three digits, without an exponent from a thousandth to a million.

    >>> [short_number(value) for value in (0.5371, 1698.2, 2.5e8)]
    ['0.537', '1,700', '2.5e+08']
    """
    return f"{float(f'{value:.3g}'):,.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"


@dataclass(frozen=True)
class Step:
    """One evaluation of a tuner. ``score`` is the log evidence, or a held-out metric.

    >>> print(Step(-12.5, (0.5,), gamma=3.0))
    -12.5 at precision 0.5, gamma 3
    """

    score: float
    precisions: tuple[float, ...]
    noise: tuple[float, ...] = ()  # noise variances, if they are learned
    gamma: float | None = None
    error: float | None = None  # standard error of gamma, if it is an estimate

    def __str__(self) -> str:
        precisions = ", ".join(f"{p:.3g}" for p in self.precisions[:4]) + (", ..." if len(self.precisions) > 4 else "")
        noise = f", noise {', '.join(f'{n:.3g}' for n in self.noise[:4])}" if self.noise else ""
        gamma = "" if self.gamma is None else f", gamma {self.gamma:.4g}"
        gamma += "" if self.error is None else f" ± {self.error:.2g}"
        return f"{self.score:.6g} at precision {precisions}{noise}{gamma}"


@dataclass(frozen=True)
class Trace:
    """The steps of a tuner in order. ``findings`` are remarks for the reader, in words."""

    tuner: str
    score: str = "log evidence"
    steps: tuple[Step, ...] = ()
    findings: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)  # NLL of the alternatives that were compared, by name
    scored_on: str = ""  # "training", "validation" (cross-validated) or "out-of-fold" data
    verdict: str = ""  # how the result compares with the alternatives, in a sentence

    @property
    def comparison(self) -> str:
        """The scores of the alternatives in words.

        >>> Trace("Integrate", scores={"plain network": 1.25, "mixture": 0.5}, scored_on="training").comparison
        'Mean negative log-likelihood on training data (lower is better): plain network 1.250, mixture 0.500'
        """
        scores = ", ".join(f"{name.removesuffix(OF_NETWORKS)} {nll_text(score)}" for name, score in self.scores.items())
        how = ", cross-validated" if self.scored_on == "validation" else ""
        how += ", averaged over the networks" if any(name.endswith(OF_NETWORKS) for name in self.scores) else ""
        return f"Mean negative log-likelihood on {self.scored_on} data{how} (lower is better): {scores}"

    def after(self, earlier: Trace | None) -> Trace:
        """Return this trace with the findings of an earlier one before its own.

        >>> Trace("Budget", findings=("guarded",)).after(Trace("SampleEM", findings=("few samples",))).findings
        ('few samples', 'guarded')
        """
        return self if earlier is None else replace(self, findings=(*earlier.findings, *self.findings))

    def __str__(self) -> str:
        lines = [f"{self.tuner}: {self.score}", *(f"{i:4d}  {step}" for i, step in enumerate(self.steps))]
        lines += [f"{score:10.4f}  {name}" for name, score in self.scores.items()]
        return "\n".join([*lines, *self.findings])


_NUMBERS = ListOf(Real(0, math.inf))
_STEP = Record(
    Step, score=UNLIMITED, precisions=_NUMBERS, noise=_NUMBERS, gamma=Maybe(UNLIMITED), error=Maybe(Real(0, math.inf))
)
TRACE = Maybe(  # what a file may hold
    Record(
        Trace, tuner=Text(), score=Text(), steps=ListOf(_STEP), findings=ListOf(Text()), scores=MapOf(UNLIMITED),
        scored_on=Text(("", "training", "validation", "out-of-fold")), verdict=Later(Text()),
    )
)  # fmt: skip


class Tunable:
    """A value with hyperparameters that tuners vary. ``Posterior`` and the posterior of ``lw.inverse`` inherit from it.

    A capability is a method with a default: one that a class need not have raises by default, and ``provides`` tells
    before the call whether a class has its own.
    """

    problem: Any  # the prior under ``prior``, and ``with_precisions`` for others
    trace: Trace | None = None  # the record of the tuner, without a name if only ``fit`` had remarks

    def provides(self, member: Callable[..., object]) -> bool:
        """Return whether the class has its own version of a member, as in ``provides(Posterior.log_evidence)``."""
        return getattr(type(self), member.__name__) is not member

    def require(self, member: Callable[..., object], what: str, method: str = "") -> None:
        """Raise unless the class provides the member; ``what`` says what it is, ``method`` is the name users know."""
        if not self.provides(member):
            raise self.lacks(what, method)

    def lacks(self, what: str, method: str = "") -> UnsupportedError:
        """Return the error of a member whose default raises."""
        return UnsupportedError(f"{method or type(self).__name__} has no {what}; use Kron, Full or KernelSpace.")

    @property
    def noise(self) -> Tensor | None:
        """The noise variances that may change without the data: (), (C,), or None if there are none to learn."""
        return None

    @property
    def limits(self) -> tuple[Tensor, Tensor] | None:
        """The smallest and largest logarithms of all values of the prior, flat, and of the noise after them.

        Beyond them the evidence hardly changes, so that a search stays inside. None if there are no limits.
        """
        return None

    def with_noise(self: T, noise: Tensor) -> T:
        """Return the posterior under other noise variances, of the shape of ``noise``."""
        raise self.lacks("noise to change")

    def with_problem(self: T, problem: Any) -> T:
        """Return the posterior under another prior or noise, without a pass over the data."""
        raise self.lacks("prior over weights to change")

    def with_prior(self: T, prior: Any) -> T:
        """Return the posterior under another prior, which takes its scale from the curvature if it needs one."""
        return self.with_problem(self.problem.with_prior(prior))

    def with_trace(self: T, trace: Trace) -> T:
        """Return the posterior with this record; the same one where it has no place for a record."""
        return self

    def log_evidence(self) -> Tensor:
        """Return the log marginal likelihood, which tuners maximise and ``compare`` ranks models by."""
        raise self.lacks("evidence")

    @property
    def evidence_error(self) -> float:
        """The standard error of ``log_evidence``; zero unless it is an estimate."""
        return 0.0


class Posterior(Tunable):
    """A fitted belief, the result of every method. Classes inherit from it and define ``belief``."""

    problem: Problem
    statistics: Statistics  # loss and counts of the data that it was fitted to
    theta: Tensor  # w̃, (P,); a mixture has none
    linearised: ClassVar[bool] = False  # whether it is ``Linearised``
    is_sampled: ClassVar[bool] = False  # whether evidence and γ are estimates from samples, solved for each prior
    solves_for_inputs: ClassVar[bool] = False  # whether each prediction solves systems over all data
    has_spread: ClassVar[bool] = True  # whether there is a covariance to scale
    differentiable: ClassVar[bool] = False  # whether beliefs are differentiable in inputs that require a gradient
    no_file: ClassVar[str] = ""  # why there is no file form, and what to do, if there is more to say than that

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        """Return the belief about all or some outputs at x, with the covariance between inputs if the query asks it."""
        raise NotImplementedError(f"{type(self).__name__} has no belief(x, query)")

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        """Return the belief about all outputs at x, with the covariance between inputs if joint."""
        return self.belief(x, Query(joint))

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

    def predict(self, x: Inputs, samples: int | None = None) -> Predictive:
        """Return the predictive of the targets at x, from this many functions, or from variances if it is zero."""
        likelihood = self.problem.likelihood
        numbers = draw_numbers([self], likelihood, [float(self.has_spread)], samples, x)
        if numbers:
            predict = lambda beliefs: likelihood.predict_samples(beliefs[0])
            return predict_from_draws([self], x, numbers, self.kept_draws, predict)
        (belief,) = differentiable_beliefs(lambda inner: [self(inner)], x)
        check_finite(belief.mean, "outputs of the network")
        return likelihood.predict(belief)

    def prepare(self) -> None:
        """Compute what predictions need of the data, if anything: several processes do it together."""
        return

    def updated(self: P, data: Data, generator: torch.Generator | None = None) -> P:
        """Return the posterior of the old data and these, at the same weights w̃, prior and noise."""
        raise self.lacks(SUM_OVER_DATA)

    def state(self) -> State:
        """Return the posterior as plain data, for a file; its class method ``from_state`` builds it again."""
        raise UnsupportedError(
            self.no_file
            or f"the posterior {type(self).__name__} has no file form, a method state(); fit again where it is needed."
        )

    def describe(self) -> str:
        """Return the cells of a mixture in words; nothing for other posteriors."""
        return ""

    @property
    def cell_count(self) -> int:
        """The number of cells of a mixture; zero for other posteriors."""
        return 0

    def log_likelihood(self) -> Tensor:
        """Return log p(D | theta) at the weights where the evidence is evaluated."""
        raise self.lacks("evidence")

    def gammas(self) -> Tensor:
        """Return γ of every weight, (P,): how far the data determine it."""
        raise self.lacks("evidence")

    def unseen_gamma(self) -> Tensor | None:
        """Return γ (P,) of the curvature that a bound on the evidence leaves out, or None if there is no such term."""
        return None

    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Return the variance of a scalar function of the weights, or of the outputs at x."""
        raise self.lacks("variance of functions of the weights")

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw weights, (n, P), in the order of ``network.theta()``."""
        raise self.lacks("weight samples")

    def deviations(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw weights of the tangent model as steps from their mean, (n, P)."""
        raise self.lacks("draws of the weights of the tangent model")

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw functions, evaluated at x: (n, B, [T,] C). Each draw is one function at all inputs."""
        raise self.lacks("function samples")

    def covariance(self, jacobian: LayerJacobians) -> Tensor:
        """Return the covariance of the outputs that the Jacobian belongs to, (B, S, C, C)."""
        raise self.lacks("covariance for a Jacobian")

    def covariances(self: P, jacobian: LayerJacobians, members: Sequence[P]) -> list[Tensor]:
        """Return ``covariance(jacobian)`` of every member, posteriors with the same ``shared`` as this one."""
        return [each.covariance(jacobian) for each in members]

    @property
    def shared(self) -> object:
        """The value that posteriors of other priors and noises share with this one, for ``covariances``."""
        return self

    @property
    def passing(self) -> Network:
        """The network as a covariance passes through it: block by block where the posterior allows it."""
        return self.problem.network

    def n_stored(self) -> int | None:
        """Return how many numbered draws there are; None if there is one for every number."""
        return None

    def numbered_steps(self, numbers: range) -> Tensor:
        """Return the draws with these numbers as steps from the mean of the weights, (n, P), the same at every call."""
        raise self.lacks("draws of the weights of the tangent model")


def numbered_normals(numbers: range, like: Tensor) -> Tensor:
    """Return standard normal numbers (n, P) in the form of ``like`` (P,); each row depends on its number alone."""
    seeded = [derived_generator(torch.Generator().manual_seed(k), torch.empty(0)) for k in numbers]
    return torch.stack([normal(tuple(like.shape), generator, like) for generator in seeded])


def prefers_draws(members: Sequence[Posterior], network: Network, likelihood: Likelihood, x: Inputs) -> bool:
    """Return whether predictions at x use drawn functions of these posteriors unless the user asks otherwise."""
    many = torch.Size(network.for_inputs(x).output_shape).numel() > MANY_OUTPUTS
    return many and likelihood.prefers_samples and all(each.provides(Posterior.numbered_steps) for each in members)


def draw_numbers(
    members: Sequence[Posterior], likelihood: Likelihood, shares: Sequence[float], samples: int | None, x: Inputs
) -> tuple[range, ...]:
    """Return the numbers of the pairs of functions that each belief draws; no ranges where variances are computed.

    Args:
        members: The posterior of each belief.
        likelihood: The likelihood that predicts.
        shares: The weights of the beliefs, without that of cells that have no spread.
        samples: The number of functions that the user asked for; zero asks for variances, None chooses.
        x: The inputs, whose number of outputs decides.
    """
    drawing = [number for number, share in enumerate(shares) if share > 0]
    count = samples
    if samples is None:
        network = members[0].problem.network
        count = DEFAULT_SAMPLES if prefers_draws([members[number] for number in drawing], network, likelihood, x) else 0
    if not count:
        return ()
    if wants_slopes(x):
        raise UnsupportedError(
            "x requires a gradient, and this prediction is drawn from functions, which has none. Use x.detach(), "
            "predict(x, samples=0), or functions(x)."
        )
    counts = dict(zip(drawing, allot([shares[number] for number in drawing], -(-count // 2)), strict=True))
    numbers, first = [], 0
    for number, each in enumerate(members):
        n = counts.get(number, 0)
        if n and not each.provides(Posterior.numbered_steps):
            raise UnsupportedError(
                f"samples is {samples}, and {type(each).__name__} has no draws of the weights of the tangent model; "
                "expected None or 0, for the prediction that it has."
            )
        stored = each.n_stored() if n else None
        if stored is not None and n > stored:
            if samples is not None:
                raise UnsupportedError(
                    f"samples is {samples}, for which a posterior draws {n} pairs; it has {stored}. Ask for fewer, or "
                    "fit with Sampled(num_samples=...) for more."
                )
            n = stored
        numbers.append(range(first, first + n))
        first += n
    return tuple(numbers)


def allot(shares: Sequence[float], total: int) -> list[int]:
    """Return how many pairs each share gets: ``total`` in proportion, but two at least, or one if two are too many.

    >>> allot([0.7, 0.28, 0.02], 16)
    [10, 4, 2]
    """
    least = MIN_PAIRS if total >= MIN_PAIRS * len(shares) else 1
    rest = max(0, total - least * len(shares))
    wanted = [max(0.0, total * share / sum(shares) - least) for share in shares]
    parts = [rest * each / (sum(wanted) or 1.0) for each in wanted]
    counts = [least + int(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: int(parts[i]) - parts[i])
    for i in by_remainder[: max(0, total - sum(counts))]:
        counts[i] += 1
    return counts


def draw_beliefs(
    members: Sequence[Posterior], x: Inputs, numbers: Sequence[range], kept: Kept
) -> Iterator[FunctionSamples]:
    """Yield the belief of every posterior about the outputs at x, made of the functions with these numbers.

    Cost: 1 + 2 n forward passes for n pairs. Draws that fit the budget together are kept for the next call.
    """
    network = members[0].problem.network
    most = max(1, temporary_bytes(network.device) // (network.selection.size * torch.finfo(network.dtype).bits // 8))
    pairs = list(zip(members, numbers, strict=True))
    all_steps = None
    if sum(map(len, numbers)) <= most:
        all_steps = kept.at(tuple(numbers), lambda: [_steps(each, part) for each, part in pairs])
    for i, (each, part) in enumerate(pairs):
        runs = [part[start : start + most] for start in range(0, len(part), most)] or [part]
        drawn = (_steps(each, run) for run in runs) if all_steps is None else [all_steps[i]]
        at_x = [outputs_along(each.problem.network, x, steps) for steps in drawn]
        yield FunctionSamples.of(at_x[0][0], torch.cat([products for _, products in at_x]))


def _steps(posterior: Posterior, numbers: range) -> Tensor:
    """Return the draws with these numbers, (n, P); a posterior of which none is wanted need not have any."""
    network = posterior.problem.network
    if not len(numbers):
        return torch.zeros(0, network.selection.size, dtype=network.dtype, device=network.device)
    return posterior.numbered_steps(numbers)


def predict_from_draws(
    members: Sequence[Posterior],
    x: Inputs,
    numbers: Sequence[range],
    kept: Kept,
    predict: Callable[[list[FunctionSamples]], Any],
) -> Predictive:
    """Return the predictive that ``predict`` makes of the beliefs of all posteriors at x.

    Probabilities of classes are averaged a few inputs at a time, so that no more functions than fit the budget are in
    memory; other predictives keep the functions.
    """
    parts = _by_parts(members, x, numbers, kept)
    first = next(parts)
    predictive = predict(first)
    if not isinstance(predictive, SoftmaxSamples):
        return predict([FunctionSamples.concat(each) for each in zip(first, *parts, strict=True)])
    return AveragedClasses.concat([predictive.averaged, *(predict(beliefs).averaged for beliefs in parts)])


def _by_parts(
    members: Sequence[Posterior], x: Inputs, numbers: Sequence[range], kept: Kept
) -> Iterator[list[FunctionSamples]]:
    """Yield the beliefs about a few inputs after another, as many as fit the budget with all their functions."""
    for _, part in pieces(members[0].problem.network, x, sum(map(len, numbers))):
        beliefs = list(draw_beliefs(members, part, numbers, kept))
        check_finite(beliefs[0].mean, "outputs of the network")
        yield beliefs


def pieces(network: Network, x: Inputs, pairs: int) -> Iterator[tuple[slice, Inputs]]:
    """Yield runs of inputs at which so many pairs of functions fit the budget for one result."""
    batch, outputs = network.count(x), torch.Size(network.for_inputs(x).output_shape).numel()
    each = FUNCTION_COPIES * (1 + pairs) * outputs * torch.finfo(network.dtype).bits // 8
    step = max(1, temporary_bytes(network.device) // each)
    for start in range(0, batch, step):
        rows = slice(start, min(batch, start + step))
        yield rows, x if step >= batch else network.take(x, rows)


SATURATED_SHARE = 0.8  # share of the weights from which a network may be too small


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
        if self.total > SATURATED_SHARE * self.weights:
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
            lines.append(f"{name:{width}s} {size:9,d} {gamma:10.2f} {gamma / size:6.1%}")
        lines.append(f"{'total':{width}s} {self.weights:9,d} {self.total:10.2f} {self.total / self.weights:6.1%}")
        lines.append("gamma: how many of the weights the data determine; the prior decides the others")
        return "\n".join([*lines, *self.findings])


def effective_parameters(posterior: Posterior) -> EffectiveParameters:
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
        prior.sum_groups(each),
    )  # fmt: skip
