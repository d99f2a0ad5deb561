"""The contracts of predictives, with everything that follows from a few members: labels with probabilities, numbers.

Scores of predictives that fit their targets: classes, binary labels, numbers.

A predictive says by its ``scoring`` which scores fit it. A scoring turns predictions and targets into a few numbers of
each datum, batch by batch, and these into scores that can be computed again for data with other weights, as the
bootstrap needs it. The scores of equal weights are those of ``lapwing.metrics``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent

from lapwing.errors import DataError, UnsupportedError
from lapwing.runtime.settings import POSITIVE, PROBABILITY, TENSOR, integer, seen
from lapwing.runtime.threads import classes
from lapwing.values.arrays import mean_of_ties

BINS = 15  # of the calibration errors, as in ``lapwing.metrics.ece``
LEVELS = tuple(i / 20 for i in range(1, 20))  # of the central intervals whose coverages give ``cqm``
TINY = 1e-300  # probability below which a logarithm would be infinite
MANY_CLASSES = 100  # up to which the class-wise calibration error is computed: it keeps bins of every class and input
STEPS = 48  # nodes of the integrals of the CRPS on either side of the target
REACH = 9.0  # standard deviations over which it is integrated at least


class Score(Protocol):
    """One score of many data, as a function of the weights of the inputs that they belong to."""

    @property
    def name(self) -> str:
        """The name of the score."""
        ...

    @property
    def better(self) -> str:
        """What is better: "lower" or "higher"; empty if neither is by itself."""
        ...

    @property
    def target(self) -> float | None:
        """The best value, where it is neither the lowest nor the highest."""
        ...

    @property
    def unit(self) -> float | None:
        """The size that differences are compared with, where the score itself has none; None for the score."""
        ...

    @property
    def biased(self) -> bool:
        """Whether resampled data, which repeat, have a higher score than the data: a calibration error."""
        ...

    def at(self, weights: Tensor) -> Tensor:
        """Return the score under each row of weights (R, N) of the inputs, (R,) in float64."""
        ...


@dataclass(frozen=True, eq=False)
class MeanScore:
    """A function of weighted means over all data.

    Args:
        name: The name of the score.
        sums: Numbers of each input, summed over its data, (N, K).
        counts: The number of data of each input, (N,), or the sum of their weights.
        of: From means (R, K) to scores (R,).
        better: "lower", "higher" or "".
        target: The best value, if it is in the middle.
        biased: Whether the score of resampled data is higher.
        unit: The size that differences are compared with; None for that of the score.
    """

    name: str
    sums: Tensor
    counts: Tensor
    of: Callable[[Tensor], Tensor]
    better: str = "lower"
    target: float | None = None
    biased: bool = False
    unit: float | None = None

    def at(self, weights: Tensor) -> Tensor:
        return self.of(weights @ self.sums / (weights @ self.counts).unsqueeze(-1))


@dataclass(frozen=True, eq=False)
class AreaScore:
    """The area under the curve of risk against coverage, as ``lapwing.metrics.aurc`` has it.

    Args:
        owner: The input that each datum belongs to, (M,), from the most certain datum to the least.
        loss: The loss of each datum in that order, (M,); equal uncertainties have their mean.
    """

    owner: Tensor
    loss: Tensor
    name: str = "aurc"
    better: str = "lower"
    target: float | None = None
    biased: bool = False
    unit: float | None = None

    def at(self, weights: Tensor) -> Tensor:
        each = weights[:, self.owner]
        kept = each.cumsum(1)
        risk = (each * self.loss).cumsum(1) / kept.clamp_min(TINY)
        return (each * risk).sum(1) / kept[:, -1]


@dataclass(frozen=True, eq=False)
class ClassSums:
    """What was predicted and seen of every class, or label, summed over the data of each input that count.

    Args:
        probability: Of each class, (B, C) in float64, as the following.
        seen: How often the class was the target.
        data: The number of data, (B, C), or (B, 1) if all classes have the same.
        variance: The variance of ``seen`` if targets have exactly these probabilities and are independent.
        gaps: ``seen`` less ``probability``, in bins of the probability, (B, C, bins); None for many classes.
    """

    probability: Tensor
    seen: Tensor
    data: Tensor
    variance: Tensor
    gaps: Tensor | None

    @classmethod
    def of(cls, probs: Tensor, seen: Tensor, known: Tensor) -> ClassSums:
        """Return the sums of probabilities (B, D, C), of zeros and ones in the same shape, and of what counts."""
        known = known.to(probs)
        bins = torch.bucketize(probs, torch.arange(1, BINS).to(probs) / BINS)
        places = (bins + BINS * torch.arange(probs.shape[-1], device=probs.device)).flatten(1)
        gaps = probs.new_zeros(len(probs), BINS * probs.shape[-1])
        gaps.scatter_add_(1, places, ((seen - probs) * known).flatten(1))
        return cls(
            (probs * known).sum(1), (seen * known).sum(1), known.sum(1), (probs * (1 - probs) * known).sum(1),
            gaps.unflatten(1, (-1, BINS)),
        )  # fmt: skip

    @classmethod
    def of_classes(cls, probs: Tensor, y: Tensor, known: Tensor) -> ClassSums:
        """Return the sums of probabilities (B, D, C), class numbers (B, D), and whether each of these counts."""
        if probs.shape[-1] <= MANY_CLASSES:
            one_hot = torch.nn.functional.one_hot(y, probs.shape[-1]).to(probs)
            return cls.of(probs, one_hot, known.unsqueeze(-1))
        weight = known.unsqueeze(-1).to(probs)
        seen = probs.new_zeros(len(probs), probs.shape[-1]).scatter_add_(1, y, known.to(probs))
        return cls((probs * weight).sum(1), seen, weight.sum(1), (probs * (1 - probs) * weight).sum(1), None)


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers of each datum (M, K), and the input (M,) that it belongs to; inputs have one datum, or several tokens.

    ``gaps`` (N, C, bins) are those of ``ClassSums``, and ``data`` (N, C) or (N, 1) its numbers of data; None if there
    are none.
    """

    values: Tensor
    owner: Tensor
    inputs: int
    gaps: Tensor | None = None
    data: Tensor | None = None

    def summed(self, values: Tensor) -> Tensor:
        """Return the sums of values (M, K) over the data of each input, (N, K)."""
        return values.new_zeros(self.inputs, values.shape[1]).index_add_(0, self.owner, values)

    def mean(
        self, name: str, values: Tensor, of: Callable[[Tensor], Tensor] | None = None, *, share: Tensor | None = None,
        **more: Any,
    ) -> MeanScore:  # fmt: skip
        """Return the score that is a function of the means of values (M,) or (M, K); by default their mean.

        ``share`` (M,) is the weight of each datum, by default one.
        """
        values = values.unsqueeze(1) if values.ndim == 1 else values
        weight = torch.ones_like(values[:, :1]) if share is None else share.unsqueeze(1)
        counts = self.summed(weight).squeeze(1)
        return MeanScore(name, self.summed(weight * values), counts, _first if of is None else of, **more)

    def classwise(self) -> MeanScore | None:
        """Return the calibration error of each class by itself, averaged over classes; None for many classes."""
        if self.gaps is None or self.data is None:
            return None
        (_, classes, bins), data = self.gaps.shape, self.data.expand(self.gaps.shape[:2])

        def error(means: Tensor) -> Tensor:
            gaps, counts = means[:, : classes * bins].unflatten(1, (classes, bins)), means[:, classes * bins :]
            return (gaps.abs().sum(2) / counts.clamp_min(TINY)).mean(1)

        sums = torch.cat([self.gaps.flatten(1), data], 1)
        return MeanScore("classwise_ece", sums, torch.ones_like(sums[:, 0]), error, biased=True)

    def area(self, uncertainty: Tensor, loss: Tensor) -> AreaScore:
        """Return the area under the risk-coverage curve of losses (M,) in the order of uncertainties (M,)."""
        order = uncertainty.argsort()
        return AreaScore(self.owner[order], mean_of_ties(uncertainty, loss)[order])


class Scoring(Protocol):
    """The scores that fit one kind of targets."""

    task: ClassVar[str]  # in words
    columns: ClassVar[tuple[str, ...]]  # the numbers of each datum
    conformal: ClassVar[tuple[str, ...]]  # the conformal scores that fit, the default first
    uncertainties: ClassVar[tuple[str, ...]]  # by which answers can be withheld, the default first

    def numbers(self, predictive: Any, y: Tensor, known: Tensor, level: float) -> Tensor:
        """Return numbers of each datum, (B, D, K) in float64: D tokens, labels or outputs of an input.

        Args:
            predictive: The predictive of the targets at (B, [T,] C) outputs.
            y: Targets that the likelihood has checked.
            known: Whether each target counts, in the shape of y; numbers of others are finite and have no meaning.
            level: The probability of intervals.
        """
        ...

    def known(self, known: Tensor) -> Tensor:
        """Return whether each datum counts, (B, D), from the same for each target."""
        return known.flatten(1) if known.ndim > 1 else known.unsqueeze(1)

    def by_class(self, predictive: Any, y: Tensor, known: Tensor) -> ClassSums | None:
        """Return what was predicted and seen of every class in each input; None if targets are no labels.

        Args:
            predictive: As for ``numbers``.
            y: As for ``numbers``.
            known: As for ``numbers``.
        """
        return None

    def scores(self, data: Numbers, level: float) -> tuple[Score, ...]:
        """Return all scores of the data."""
        ...

    def uncertainty(self, predictive: Any, by: str) -> Tensor:
        """Return one of ``uncertainties`` of each input, (B,) in float64: the higher, the less certain."""
        ...

    def wrong(self, predictive: Any, y: Tensor, tolerance: float | None) -> Tensor:
        """Return whether the answer to each input is wrong, (B,): a class, a label, or an error above the tolerance."""
        ...

    def answer(self, predictive: Any) -> Tensor:
        """Return the answer to each input: the most probable class (B,), labels (B, C), or means (B, C)."""
        ...

    def refuse_tolerance(self, tolerance: float | None) -> None:
        """Raise unless a tolerance is given where answers are numbers, and none otherwise."""
        if tolerance is not None:
            raise UnsupportedError(
                f"tolerance is {tolerance}, and the targets are {self.task}; expected none: an answer is right or "
                "wrong. Leave it out."
            )


@dataclass(frozen=True)
class ClassScoring(Scoring):
    """Scores of one class out of C."""

    task: ClassVar[str] = "classes"
    columns: ClassVar[tuple[str, ...]] = ("nll", "correct", "brier", "confidence")
    conformal: ClassVar[tuple[str, ...]] = ("adaptive", "threshold")
    uncertainties: ClassVar[tuple[str, ...]] = ("confidence", "entropy", "mutual_information")

    def numbers(self, predictive: Any, y: Tensor, known: Tensor, level: float) -> Tensor:
        safe = y.masked_fill(~known, 0)
        nll = -predictive.log_prob(safe)
        probs = predictive.probs.double()
        confidence, guess = probs.max(-1)
        right = probs.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
        brier = probs.square().sum(-1) - 2 * right + 1
        each = torch.stack([nll.double(), (guess == safe).double(), brier, confidence.clamp_max(1)], -1)
        return each.flatten(1, -2) if each.ndim > 2 else each.unsqueeze(1)

    def by_class(self, predictive: Any, y: Tensor, known: Tensor) -> ClassSums:
        probs, safe = predictive.probs.double(), y.masked_fill(~known, 0)
        if probs.ndim == 2:
            probs, safe, known = probs.unsqueeze(1), safe.unsqueeze(1), known.unsqueeze(1)
        return ClassSums.of_classes(probs, safe.long(), known)

    def scores(self, data: Numbers, level: float) -> tuple[Score, ...]:
        """Return all scores. The calibration error is that of the guess, beside that of every class."""
        confidence, correct = (data.values[:, self.columns.index(name)] for name in ("confidence", "correct"))
        return _label_scores(data, confidence.contiguous(), correct.contiguous(), None)

    def uncertainty(self, predictive: Any, by: str) -> Tensor:
        if by == "confidence":  # from the other classes: one minus a probability near one would lose its digits
            log_probs = predictive.log_probs.double()
            top = log_probs.argmax(-1, keepdim=True)
            return log_probs.scatter(-1, top, -math.inf).exp().sum(-1)
        return _spread(predictive, by)

    def wrong(self, predictive: Any, y: Tensor, tolerance: float | None) -> Tensor:
        return self.answer(predictive) != y

    def answer(self, predictive: Any) -> Tensor:
        answer: Tensor = predictive.probs.argmax(-1)
        return answer


@dataclass(frozen=True)
class LabelScoring(Scoring):
    """Scores of binary labels, each a datum; ``nll`` is that of all labels of an input that count, together."""

    task: ClassVar[str] = "binary labels"
    columns: ClassVar[tuple[str, ...]] = (
        "nll", "correct", "brier", "confidence", "share", "probability", "label",
    )  # fmt: skip
    conformal: ClassVar[tuple[str, ...]] = ("adaptive", "threshold")
    uncertainties: ClassVar[tuple[str, ...]] = ("confidence", "entropy", "mutual_information")

    def numbers(self, predictive: Any, y: Tensor, known: Tensor, level: float) -> Tensor:
        probs, y = predictive.probs.double(), y.double().masked_fill(~known, 0)
        nll = -predictive.known_log_prob(y, known).double().unsqueeze(-1).expand_as(probs)
        share = 1 / known.sum(-1, keepdim=True).clamp_min(1).to(probs).expand_as(probs)
        correct = (probs > 0.5) == (y > 0.5)
        confidence = torch.maximum(probs, 1 - probs).clamp_max(1)
        values = (nll, correct.double(), 2 * (probs - y).square(), confidence, share, probs.clamp_max(1), y)
        return torch.stack(values, -1).flatten(1, -2)

    def by_class(self, predictive: Any, y: Tensor, known: Tensor) -> ClassSums:
        probs, y = predictive.probs.double(), y.double().masked_fill(~known, 0)
        if probs.ndim == 2:
            probs, y, known = probs.unsqueeze(1), y.unsqueeze(1), known.unsqueeze(1)
        return ClassSums.of(probs, y, known)

    def scores(self, data: Numbers, level: float) -> tuple[Score, ...]:
        """Return all scores. An input, or a token, has one ``nll``, so each of its labels has a share of it.

        Calibration errors are those of the probability that a label is one. The confidence in the guess would hide a
        bias: a rare label whose probability is too high everywhere, and still below one half, is guessed right.
        """
        share, probability, label = data.values[:, 4:].unbind(1)
        return _label_scores(data, probability.contiguous(), label.contiguous(), share)

    def uncertainty(self, predictive: Any, by: str) -> Tensor:
        if by == "confidence":  # that of the label with the most doubt
            probs = predictive.probs.double()
            return torch.minimum(probs, 1 - probs).amax(-1)
        return _spread(predictive, by)

    def wrong(self, predictive: Any, y: Tensor, tolerance: float | None) -> Tensor:
        return (self.answer(predictive) != (y > 0.5)).any(-1)

    def answer(self, predictive: Any) -> Tensor:
        return (predictive.probs > 0.5).long()


@dataclass(frozen=True)
class NumberScoring(Scoring):
    """Scores of numbers, each output a datum; ``nll`` is that of all outputs of an input together.

    Args:
        discrete: Whether the targets are counts, whose PIT values are not uniform; ``cqm`` is then left out.
    """

    discrete: bool = False
    task: ClassVar[str] = "numbers"
    columns: ClassVar[tuple[str, ...]] = ("nll", "error", "crps", "covered", "width", "pit", "std", "mean")
    conformal: ClassVar[tuple[str, ...]] = ("scaled", "constant")
    uncertainties: ClassVar[tuple[str, ...]] = ("variance", "entropy", "mutual_information")

    def numbers(self, predictive: Any, y: Tensor, known: Tensor, level: float) -> Tensor:
        mean = predictive.mean
        y = y.to(mean).reshape(mean.shape)
        nll = -predictive.log_prob(y).double().unsqueeze(-1).expand(mean.shape)
        low, high = (end.double() for end in predictive.interval(level))
        covered = (low <= y) & (y <= high)
        values = (nll, y.double() - mean.double(), crps(predictive, y), covered.double(), high - low)
        each = torch.stack([*values, predictive.cdf(y).double(), predictive.std.double(), mean.double()], -1)
        return each.flatten(1, -2)

    def scores(self, data: Numbers, level: float) -> tuple[Score, ...]:
        columns = data.values[:, :7].unbind(1)
        nll, error, ranked, covered, width, pit, std = (column.contiguous() for column in columns)
        levels = torch.tensor(LEVELS, dtype=pit.dtype)
        inside = ((2 * pit - 1).abs().unsqueeze(1) <= levels).to(pit)
        scores: list[Score] = [
            data.mean("nll", nll, unit=1.0),  # nats: the density of a target depends on its unit
            data.mean("rmse", error.square(), lambda means: means[:, 0].sqrt()),
            data.mean("mae", error.abs()),
            data.mean("crps", ranked),
            data.mean("coverage", covered, better="", target=level, unit=1.0),
            data.mean("width", width, better=""),
        ]
        if not self.discrete:
            scores.append(data.mean("cqm", inside, lambda means: (means - levels).abs().mean(1), biased=True))
        return (*scores, data.area(std, error.square()))

    def uncertainty(self, predictive: Any, by: str) -> Tensor:
        if by == "variance":
            variance: Tensor = predictive.variance.double().sum(-1)
            return variance
        return _spread(predictive, by)

    def wrong(self, predictive: Any, y: Tensor, tolerance: float | None) -> Tensor:
        return ((y.to(predictive.mean).reshape(predictive.mean.shape) - predictive.mean).abs() > tolerance).any(-1)

    def answer(self, predictive: Any) -> Tensor:
        mean: Tensor = predictive.mean
        return mean

    def refuse_tolerance(self, tolerance: float | None) -> None:
        if tolerance is None:
            raise UnsupportedError(
                "tolerance is None, and the targets are numbers; expected the error above which an answer is wrong, in "
                "the units of the targets: tolerance=..."
            )
        POSITIVE.check("tolerance", tolerance)


def _spread(predictive: Any, by: str) -> Tensor:
    """Return the entropy or the mutual information of each input, (B,) in float64."""
    value: Tensor = predictive.entropy if by == "entropy" else predictive.mutual_information
    return value.double()


def _label_scores(data: Numbers, stated: Tensor, true: Tensor, share: Tensor | None) -> tuple[Score, ...]:
    """Return the scores of guesses with a confidence; each datum has the weight ``share`` (M,) in the ``nll``.

    Calibration errors compare probabilities ``stated`` (M,) with what came ``true`` (M,). Labels have a class-wise
    error if an input has several; of one label it would be the same error again.
    """
    nll, correct, brier, confidence = (column.contiguous() for column in data.values[:, :4].unbind(1))
    inner = torch.arange(1, BINS, dtype=stated.dtype) / BINS
    bins = torch.nn.functional.one_hot(torch.bucketize(stated, inner), BINS).to(stated)
    gap = mean_of_ties(stated, true) - stated
    order, count = stated.argsort(), len(stated)
    parts = torch.empty(count, dtype=torch.long)
    parts[order] = torch.cat([torch.full((len(p),), i) for i, p in enumerate(order.tensor_split(min(BINS, count)))])
    equal = torch.nn.functional.one_hot(parts, BINS).to(stated)
    absolute = lambda means: means.abs().sum(1)
    classwise = None if data.gaps is None or data.gaps.shape[1] == 1 else data.classwise()
    return (
        data.mean("nll", nll, share=share),
        data.mean("accuracy", correct, better="higher"),
        data.mean("brier", brier),
        data.mean("ece", (true - stated).unsqueeze(1) * bins, absolute, biased=True),
        *(() if classwise is None else (classwise,)),
        data.mean("adaptive_ece", gap.unsqueeze(1) * equal, absolute, biased=True),
        data.area(1 - confidence, 1 - correct),
    )


def crps(predictive: Any, y: Tensor) -> Tensor:
    r"""Return the continuous ranked probability score of every number, in the shape of y, in float64.

    $$ \int_{-\infty}^{y} F(z)^2 \, dz + \int_y^\infty (1 - F(z))^2 \, dz , $$

    by the trapezoidal rule from the target to nine standard deviations beyond the mean, or beyond the target; nodes are
    dense near the target. Its error is below 1 % of the standard deviation for normal predictives; for counts the steps
    of F are seen at the nodes alone.
    """
    mean, std, y = predictive.mean.double(), predictive.std.double(), y.double()
    total = torch.zeros_like(mean)
    steps = torch.linspace(0, 1, STEPS, dtype=torch.float64).square()  # dense at the target
    for sign in (-1.0, 1.0):
        reach = (sign * (mean - y)).clamp_min(0) + REACH * std
        before: Tensor | None = None
        for low, high in zip([0.0, *steps[:-1].tolist()], steps.tolist(), strict=True):
            cumulative = predictive.cdf((y + sign * high * reach).to(predictive.mean)).double()
            now = (cumulative if sign < 0 else 1 - cumulative).square()
            if before is not None:
                total += 0.5 * (high - low) * reach * (before + now)
            before = now
    return total


def _first(means: Tensor) -> Tensor:
    return means[:, 0]


def log_density(z: Tensor, degrees: float) -> Tensor:
    """Return the log-density of the standard Student distribution; of the normal one for infinite degrees."""
    if degrees == math.inf:
        return -0.5 * (z.square() + math.log(2 * math.pi))
    constant = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return constant - (degrees + 1) / 2 * torch.log1p(z.square() / degrees)


def cdf(z: Tensor, degrees: float) -> Tensor:
    r"""Return the cumulative probability; degrees are an even number, for which it is a finite sum, or infinite.

    With $\theta = \arctan(z/\sqrt\nu)$: $P(|Z| < z) = \sin\theta\,(1 + \tfrac12 \cos^2\theta + \tfrac{1\cdot3}{2\cdot4}
    \cos^4\theta + \dots)$, ν/2 terms (Abramowitz and Stegun 26.7.4).
    """
    if degrees == math.inf:
        return torch.special.ndtr(z)
    value = z.double()
    sine, cosine2 = value / (degrees + value.square()).sqrt(), degrees / (degrees + value.square())
    term = total = torch.ones_like(value)
    for k in range(1, int(degrees) // 2):
        term = term * cosine2 * (2 * k - 1) / (2 * k)
        total = total + term
    return (0.5 + 0.5 * sine * total).to(z.dtype)


def quantile(cdf: Callable[[Tensor], Tensor], level: float, centre: Tensor, width: Tensor) -> Tensor:
    """Return y with cdf(y) = level, by doubling a bracket around ``centre`` and then bisecting it to rounding."""
    PROBABILITY.check("level", level)
    low, high = centre - width, centre + width
    for _ in range(200):
        short, long = cdf(low) > level, cdf(high) < level
        if not bool((short | long).any()):
            break
        low = torch.where(short, centre - 2 * (centre - low), low)
        high = torch.where(long, centre + 2 * (high - centre), high)
    for _ in range(60 if centre.dtype == torch.float64 else 30):
        middle = 0.5 * (low + high)
        below = cdf(middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)


def whole_quantile(cdf: Callable[[Tensor], Tensor], level: float, reach: Tensor) -> Tensor:
    """Return the smallest whole numbers, up to ``reach``, whose cumulative probability is at least ``level``."""
    PROBABILITY.check("level", level)
    low, high = torch.zeros_like(reach), reach.ceil()
    for _ in range(int(high.max().log2().item()) + 2):
        middle = ((low + high) / 2).floor()
        enough = cdf(middle) >= level
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1).minimum(high)
    return high


SUM = 1e-3  # by which the sum of a row of soft targets may differ from one: targets in half precision are coarse


@runtime_checkable
class Mixable(Protocol):
    """A predictive that can be averaged with others of the same inputs."""

    @staticmethod
    def mixed(components: tuple[Any, ...], weights: Tensor) -> Any:
        """Return the mixture of these predictives; the weights sum to one."""
        ...


class Predictive(Protocol):
    """A distribution of the targets at every input."""

    @property
    def mean(self) -> Tensor:
        """The expected targets, or the probabilities of labels, (B, C)."""
        ...

    @property
    def distribution(self) -> Distribution:
        """The targets of one input, jointly, as a ``torch.distributions`` object."""
        ...

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability or log-density of the targets, (B,), jointly over the outputs of an input."""
        ...

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the targets, (n, B, C), or (n, B) class numbers; inputs are independent.

        Args:
            n: The number of draws.
            generator: Source of randomness; torch's global one if None.

        Raises:
            UnsupportedError: ``n`` is not a positive integer.
        """
        ...

    @property
    def scoring(self) -> Scoring:
        """The scores that fit such targets."""
        ...

    @property
    def main_members(self) -> tuple[str, ...]:
        """The names of the members that ``numpy`` returns."""
        return ("mean",)

    def numpy(self) -> dict[str, Any]:
        """Return the main members as NumPy arrays, by name: ``probs`` of labels, ``mean`` and ``std`` of numbers."""
        return {name: getattr(self, name).detach().cpu().numpy() for name in self.main_members}

    def __repr__(self) -> str:
        """Return the shape in a line; the numbers are in the members."""
        listed = ", ".join(self.main_members)
        return f"<{type(self).__name__}: {listed} {tuple(self.mean.shape)}>"


class LabelPredictive(Predictive, Protocol):
    """A predictive of labels, by the probabilities of their values."""

    @property
    def probs(self) -> Tensor:
        """Probabilities of the classes, or of label one, (B, C)."""
        ...

    @property
    def integrated_probs(self) -> Tensor:
        """The same by quadrature or quasi-random draws of the logits, whatever the link is, (B, C)."""
        ...

    @property
    def aleatoric(self) -> Tensor:
        """The expected entropy given the logits in nats, (B,): doubt that more data would not remove."""
        ...

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        """Return the entropy of labels with these probabilities (..., C) in nats, (...)."""
        ...

    @property
    def main_members(self) -> tuple[str, ...]:
        return ("probs",)

    @property
    def class_probs(self) -> Tensor:
        """Probabilities of all values of one label, (B, C): those of the classes, or of zero and one.

        Raises:
            UnsupportedError: If there are several binary labels.
        """
        ...

    @property
    def mean(self) -> Tensor:
        """The same as ``probs``."""
        return self.probs

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of labels with ``probs`` in nats, (B,)."""
        return self.entropy_of(self.probs)

    @cached_property
    def mutual_information(self) -> Tensor:
        """The mutual information of labels and logits in nats, (B,): doubt that more data would remove."""
        return (self.entropy_of(self.integrated_probs) - self.aleatoric).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        """The same as ``mutual_information``."""
        return self.mutual_information


class ClassPredictive(LabelPredictive, Protocol):
    """A predictive of one class out of C."""

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities of the classes, (B, C); finite where the probability itself rounds to zero."""
        ...

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities of the classes, (B, C)."""
        return self.log_probs.exp()

    @property
    def distribution(self) -> Categorical:
        """The class of each input as a ``torch.distributions`` object."""
        return Categorical(probs=self.probs, validate_args=False)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of the labels, (B,).

        Labels are class numbers (B,), or probabilities of the classes (B, C) in floating point: then it is the mean
        over them, Σ_c y_c log p_c.

        Raises:
            DataError: A label is not one of the classes, or a row is no distribution.
        """
        if is_soft(y, self.log_probs):
            y = checked_distributions(y.to(self.log_probs))
            return torch.where(y > 0, y * self.log_probs, 0.0).sum(-1)
        return self.log_probs.gather(-1, checked_labels(y, self.log_probs)).squeeze(-1)

    @property
    def standard_error(self) -> Tensor:
        """The standard error of ``probs``, (B, C): zero unless they are averages over drawn functions."""
        return torch.zeros_like(self.probs)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        integer().check("n", n)
        return classes(self.probs.expand(n, *self.probs.shape), generator)

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        return torch.special.entr(probs).sum(-1)

    @property
    def class_probs(self) -> Tensor:
        return self.probs

    @property
    def scoring(self) -> Scoring:
        return ClassScoring()


class MultilabelPredictive(LabelPredictive, Protocol):
    """A predictive of one binary label or many."""

    def known_log_prob(self, y: Tensor, known: Tensor) -> Tensor:
        """Return the log-probability of the labels that count, (B, [T]): of these together, zero where none does.

        Args:
            y: Labels (B, [T,] C) that were checked; those that do not count may have any value.
            known: Whether each counts, in the same shape.
        """
        ...

    @property
    def distribution(self) -> Distribution:
        """The labels of one input, each with its own probability, as independent Bernoulli variables."""
        return Independent(Bernoulli(probs=self.probs, validate_args=False), 1)

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        return (torch.special.entr(probs) + torch.special.entr(1 - probs)).sum(-1)

    @property
    def class_probs(self) -> Tensor:
        if self.probs.shape[-1] != 1:
            raise UnsupportedError(
                f"{self.probs.shape[-1]} binary labels for each input; expected one label, or classes. Take the labels "
                "one by one."
            )
        return torch.cat([1 - self.probs, self.probs], -1)

    @property
    def scoring(self) -> Scoring:
        return LabelScoring()


class NumberPredictive(Predictive, Protocol):
    """A predictive of C numbers, such as regression targets or counts."""

    @property
    def main_members(self) -> tuple[str, ...]:
        return ("mean", "std")

    @property
    def epistemic_variance(self) -> Tensor:
        """The variance of y from f, which more data would lower, (B, C)."""
        ...

    @property
    def aleatoric_variance(self) -> Tensor:
        """The variance of y that is expected at a known f, which more data would not lower, (B, C)."""
        ...

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats, (B,)."""
        ...

    @property
    def known_entropy(self) -> Tensor:
        """The entropy of y in nats that is expected at a known f, (B,)."""
        ...

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return the probability of at most y, for each output by itself, (B, C).

        Args:
            y: One number, or (B, C).

        Raises:
            DataError: ``y`` has another shape.
        """
        ...

    def quantile(self, level: float) -> Tensor:
        """Return the numbers that y is below with probability ``level``, for each output by itself, (B, C)."""
        ...

    @property
    def epistemic(self) -> Tensor:
        """The same as ``epistemic_variance``."""
        return self.epistemic_variance

    @property
    def aleatoric(self) -> Tensor:
        """The same as ``aleatoric_variance``."""
        return self.aleatoric_variance

    @cached_property
    def variance(self) -> Tensor:
        """The variance of y, (B, C)."""
        return self.epistemic_variance + self.aleatoric_variance

    @property
    def std(self) -> Tensor:
        """The standard deviation of y, (B, C)."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return (low, high), each (B, C): the quantiles of each output at (1 - level)/2 and (1 + level)/2.

        Raises:
            DataError: ``level`` is not between 0 and 1.
            NumericalError: Counts overflow.
        """
        PROBABILITY.check("level", level)
        return self.quantile(0.5 - 0.5 * level), self.quantile(0.5 + 0.5 * level)

    @property
    def mutual_information(self) -> Tensor:
        """The mutual information of y and f in nats, (B,): entropy minus that expected at a known f."""
        return (self.entropy - self.known_entropy.to(self.mean)).clamp_min(0)

    @property
    def scoring(self) -> Scoring:
        return NumberScoring()


def is_soft(y: Any, like: Tensor) -> bool:
    """Return whether these are probabilities of the classes by their form, for logits or probabilities ``like``."""
    return isinstance(y, Tensor) and y.is_floating_point() and y.shape == like.shape


def checked_distributions(y: Tensor) -> Tensor:
    """Return probabilities of classes (..., C); raise unless every row is a distribution."""
    low, sums = float(y.min()) if y.numel() else 0.0, y.double().sum(-1)
    wrong = (sums - 1).abs() > SUM
    if low < 0 or bool(wrong.any()):
        found = f"an entry {low:g}" if low < 0 else f"a row with the sum {float(sums[wrong][0]):g}"
        raise DataError(
            f"soft targets have {found}; expected probabilities of the classes, at least zero and with sum one for "
            "each datum. Use y.softmax(-1) for logits, or Bernoulli() for several labels at once."
        )
    return y


def checked_labels(y: Any, like: Tensor) -> Tensor:
    """Return class numbers as (..., 1) for logits or probabilities ``like`` (..., C); raise unless they are such."""
    shape, count, y = like.shape[:-1], like.shape[-1], given_tensor(y)
    whole = isinstance(y, Tensor) and not y.is_floating_point() and not y.is_complex()
    if not whole or y.shape not in (shape, (*shape, 1)):
        raise DataError(
            f"y is {seen(y)}; expected whole class numbers of the shape {tuple(shape)}, or probabilities in floating "
            f"point of the shape {tuple(like.shape)}."
        )
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < count:
        low, high = int(y.min()), int(y.max())
        advice = (
            f" If {low} marks targets that do not count, leave these out: log_prob(y.clamp_min(0))[y >= 0]; the scores "
            "of lw.metrics leave -100 out by themselves."
        )
        raise DataError(f"classes run from {low} to {high}; expected 0..{count - 1}.{advice if low < 0 else ''}")
    numbers: Tensor = y.to(like.device).long().reshape(*shape, 1)
    return numbers


def checked_numbers(y: Any, like: Tensor, one: bool = True, within: tuple[float, float] | None = None) -> Tensor:
    """Return numbers in the shape and dtype of ``like``; raise for another shape, complex numbers and NaN.

    A single output may come without its dimension. ``one`` allows one number for all. ``within`` has the lowest and
    the highest that is possible.
    """
    given = given_tensor(y)
    TENSOR.check("y", given)
    if (given.ndim or not one) and given.shape != like.shape and (*given.shape, 1) != like.shape:
        expected = f"{tuple(like.shape)}, one number for each output" + (", or one for all" if one else "")
        raise DataError(f"y has the shape {tuple(given.shape)}; expected {expected}.")
    numbers = given.to(like)
    if within is not None and not bool(((numbers >= within[0]) & (numbers <= within[1])).all()):
        low, high = numbers.aminmax()
        raise DataError(f"y runs from {low:.4g} to {high:.4g}; expected numbers from {within[0]:g} to {within[1]:g}.")
    return numbers.reshape(like.shape) if numbers.ndim else numbers


def given_tensor(y: Any) -> Any:
    """Return a number, a list or an array as a tensor; anything else as it is, for the error message."""
    try:
        return torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        return y
