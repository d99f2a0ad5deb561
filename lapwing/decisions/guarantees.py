"""What calibration data guarantee: sets and intervals that cover, when not to answer, and which inputs are strange.

Sets of classes and intervals of numbers are those of split conformal prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.data.known_rows import Sketching
from lapwing.decisions.collecting import (
    VOID,
    LabelledBatch,
    as_batches,
    input_batches,
    refuse_tokens,
    rows_of,
    warn_of_units,
)
from lapwing.errors import DataError, UnsupportedError
from lapwing.metrics import RiskCoverage, risk_coverage
from lapwing.predictives.base import LabelPredictive, NumberPredictive, Predictive
from lapwing.predictives.scores import Scoring
from lapwing.runtime.settings import NONE, PROBABILITY, Rule, integer, one_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing.fitted import Fitted


@dataclass(frozen=True, eq=False)
class PredictionSets:
    """Sets of classes, one for each input.

    Args:
        members: Whether each class is in the set, (B, C).
    """

    members: Tensor

    @property
    def size(self) -> Tensor:
        """The number of classes of each set, (B,)."""
        return self.members.sum(-1)

    @property
    def labels(self) -> list[list[int]]:
        """The classes of each set, as lists of numbers."""
        return [row.nonzero().flatten().tolist() for row in self.members]

    def numpy(self) -> Any:
        """Return ``members`` as a NumPy array."""
        return self.members.cpu().numpy()

    def __repr__(self) -> str:
        return f"<PredictionSets: {len(self.members)} inputs, {self.size.double().mean():.3g} classes on average>"


@dataclass(frozen=True)
class Coverage:
    """How often sets or intervals held the target, on data that were not used to calibrate them."""

    share: float
    error: float  # standard error of the share, for these data
    size: float  # mean number of classes, or mean width
    count: int  # inputs
    by_group: dict[int, float] = field(default_factory=dict)  # the share in each group


GROUPS = Rule(
    "a function from a batch of inputs to group numbers (B,), or the group numbers (N,) of all data",
    lambda v: v is None or callable(v) or torch.as_tensor(v).ndim == 1,
    DataError,
)

GroupNumbers = list[int] | None  # the group of each row; None without groups


class RowGroups:
    """The groups of the rows of one pass, batch by batch.

    Args:
        given: A function, the numbers of all rows, or None.
    """

    def __init__(self, given: Any) -> None:
        GROUPS.check("groups", given)
        self._given, self._count, self._found = given, 0, list[int]()

    def of(self, inputs: Inputs, count: int) -> GroupNumbers:
        """Return the groups of the next ``count`` rows; raise if there are fewer numbers than rows."""
        if self._given is None:
            return None
        if callable(self._given):
            found = group_numbers(self._given(inputs), count)
        else:
            numbers = torch.as_tensor(self._given)[self._count : self._count + count]
            if len(numbers) < count:
                raise DataError(
                    f"groups have the shape {tuple(torch.as_tensor(self._given).shape)}, and the data have more rows; "
                    "expected one number for each, rows with an ignored target included."
                )
            found = group_numbers(numbers, count)
        self._found += found
        self._count += count
        return found

    def whole(self) -> Tensor | None:
        """Return the groups of all rows; raise if there are more numbers than rows."""
        if self._given is None:
            return None
        return torch.tensor(self._found if callable(self._given) else group_numbers(self._given, self._count))


def grouped_rows(
    posterior: Fitted,
    data: Iterable[object],
    number: Callable[[Any, LabelledBatch, GroupNumbers], Tensor],
    groups: Any,
    **keys: Any,
) -> tuple[Tensor, Tensor | None, Scoring[Any]]:
    """Return ``number(predictive, batch, groups)`` of all rows whose target counts, and the groups of these rows.

    ``keys`` are those of ``rows_of``, which this extends.
    """
    members, count = RowGroups(groups), 0

    def add_place(predictive: Any, batch: LabelledBatch) -> Tensor:
        nonlocal count
        values = number(predictive, batch, members.of(batch.inputs, len(batch.targets))).double().cpu()
        place = torch.arange(count, count + len(values), dtype=torch.float64)
        count += len(values)
        return torch.cat([values, place.unsqueeze(1)], 1)

    rows, scoring = rows_of(posterior, data, add_place, **keys)
    whole = members.whole()
    return rows[:, :-1], None if whole is None else whole[rows[:, -1].long()], scoring


def group_numbers(given: Any, count: int) -> list[int]:
    """Return group numbers as a list; raise unless they are ``count`` whole numbers."""
    numbers = torch.as_tensor(given)
    if numbers.shape != (count,) or numbers.is_floating_point() or numbers.is_complex():
        raise DataError(
            f"groups have the shape {tuple(numbers.shape)} and dtype {numbers.dtype}; expected ({count},) whole "
            "numbers, the group of each input."
        )
    listed: list[int] = numbers.tolist()
    return [int(number) for number in listed]


@dataclass(frozen=True, eq=False)
class Calibrated:
    """What sets and intervals share: quantiles of the scores, one for each group."""

    posterior: Fitted
    level: float
    score: str
    quantiles: Mapping[int | None, Tensor]  # by group; under None without groups
    count: int
    groups: Any = None

    def predict_with_limits(self, x: Inputs, groups: Any) -> Iterator[tuple[Any, Tensor]]:
        """Yield predictives at x and the largest scores that are let in; of each batch if groups are a function."""
        given = self.groups if groups is None and callable(self.groups) else groups
        if not callable(given):
            predictive = self.posterior.predict(x)
            count = len(predictive.mean)
            yield predictive, self.limits(None if given is None else group_numbers(given, count), count)
            return
        members = RowGroups(given)
        for batch in input_batches(self.posterior, x, None, False):
            predictive = self.posterior.predict(batch)
            count = len(predictive.mean)
            yield predictive, self.limits(members.of(batch, count), count)

    def limits(self, members: GroupNumbers, count: int) -> Tensor:
        """Return the largest score that is let in for each input, (B, 1) or (B, C), from the group of each."""
        if self.groups is None:
            if members is not None:
                raise UnsupportedError("groups were given and the calibration had none; calibrate with groups=...")
            return self.quantiles[None].expand(count, -1)
        if members is None:
            raise DataError("groups is None; expected the group number of each input, since the calibration had those.")
        return torch.stack([self._of_group(group) for group in members])

    def _of_group(self, group: int) -> Tensor:
        if group not in self.quantiles:
            known = ", ".join(map(str, sorted(k for k in self.quantiles if k is not None)))
            raise DataError(f"an input is of group {group}, which no calibration datum has; expected one of {known}.")
        return self.quantiles[group]

    def coverage(
        self, data: Iterable[object], *, groups: Any = None, target_key: str | None = None, progress: bool | None = None
    ) -> Coverage:
        """Return how often the target is inside on other data, over all outputs, and the mean size of set or interval.

        ``groups`` are the group numbers (N,) of the data in their order, if the calibration was given numbers and no
        function.
        """

        def number(predictive: Any, batch: LabelledBatch, members: GroupNumbers) -> Tensor:
            return self.inside(predictive, batch, self.limits(members, len(batch.targets)))

        given = self.groups if groups is None and callable(self.groups) else groups
        rows, numbers, _ = grouped_rows(
            self.posterior, data, number, given, name="data", calibrates=False, target_key=target_key, progress=progress
        )
        share, count = float(rows[:, 0].mean()), len(rows)
        each = [] if numbers is None else numbers.unique().tolist()
        by_group = {int(group): float(rows[numbers == group, 0].mean()) for group in each}
        return Coverage(share, math.sqrt(share * (1 - share) / count), float(rows[:, 1].mean()), count, by_group)

    def inside(self, predictive: Any, batch: LabelledBatch, limits: Tensor) -> Tensor:
        """Return whether each target is inside, or for how many of its outputs, and the sizes: (B, 2)."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: level {self.level:g}, {self.score}, {self.count} calibration data>"


@dataclass(frozen=True, eq=False, repr=False)
class ConformalSets(Calibrated):
    """Sets of classes that hold the label with probability ``level``; see ``Fitted.conformal`` for the guarantee.

    Args:
        posterior: What predicts.
        level: The guaranteed probability.
        score: "adaptive" or "threshold".
        quantiles: The largest score of a class in the set, (1,), by group.
        count: The number of calibration data.
        groups: The function or numbers that were given, or None.
        seed: Of the uniform numbers of "adaptive".
    """

    seed: int = 0

    def predict(self, x: Inputs, *, groups: Any = None) -> PredictionSets:
        """Return the sets at a batch of inputs or at those of a loader.

        Args:
            x: As for ``Fitted.predict``.
            groups: The group number of each input, (B,), if the calibration was given numbers and no function.
        """
        return PredictionSets(torch.cat([self._members(*each) for each in self.predict_with_limits(x, groups)]))

    def _members(self, predictive: LabelPredictive, limits: Tensor) -> Tensor:
        probs = predictive.class_probs
        scores = class_scores(self.score, probs, row_shares(probs, self.seed))
        return scores <= limits.to(scores)

    def inside(self, predictive: LabelPredictive, batch: LabelledBatch, limits: Tensor) -> Tensor:
        members = self._members(predictive, limits)
        return torch.cat([members.gather(1, safe_labels(batch, members)), members.sum(1, keepdim=True)], 1)


@dataclass(frozen=True, eq=False, repr=False)
class ConformalIntervals(Calibrated):
    """Intervals that hold each number with probability ``level``; see ``Fitted.conformal`` for the guarantee.

    Args:
        posterior: What predicts.
        level: The guaranteed probability.
        score: "scaled" or "constant".
        quantiles: Half the width of each output, (C,), over its standard deviation for "scaled", by group.
        count: The number of calibration data.
        groups: The function or numbers that were given, or None.
    """

    def predict(self, x: Inputs, *, groups: Any = None) -> tuple[Tensor, Tensor]:
        """Return (low, high), each (B, C), at a batch of inputs or at those of a loader.

        Args:
            x: As for ``Fitted.predict``.
            groups: The group number of each input, (B,), if the calibration was given numbers and no function.
        """
        ends = [self._ends(*each) for each in self.predict_with_limits(x, groups)]
        return torch.cat([low for low, _ in ends]), torch.cat([high for _, high in ends])

    def _ends(self, predictive: NumberPredictive, limits: Tensor) -> tuple[Tensor, Tensor]:
        mean = predictive.mean
        half = limits.to(mean) * number_scale(self.score, predictive)
        return mean - half, mean + half

    def inside(self, predictive: NumberPredictive, batch: LabelledBatch, limits: Tensor) -> Tensor:
        low, high = self._ends(predictive, limits)
        y = batch.targets.to(low).reshape(low.shape)
        return torch.stack([((low <= y) & (y <= high)).double().mean(1), (high - low).double().mean(1)], 1)


def conformal_of(
    posterior: Fitted, calibration: Iterable[object], level: float, *, score: str | None, groups: Any,
    target_key: str | None, progress: bool | None, seed: int,
) -> ConformalSets | ConformalIntervals:  # fmt: skip
    """Return calibrated sets or intervals; see ``Fitted.conformal``."""
    PROBABILITY.check("level", level)
    integer(0).check("seed", seed)

    def number(predictive: Any, batch: LabelledBatch, members: GroupNumbers) -> Tensor:
        fitting = predictive.scoring.conformal
        (one_of(fitting) | NONE).check("score", score)
        chosen = fitting[0] if score is None else score
        if chosen in ("adaptive", "threshold"):
            probs = predictive.class_probs
            each = class_scores(chosen, probs, row_shares(probs, seed)).double()
            return each.gather(1, safe_labels(batch, each))
        mean = predictive.mean
        error = batch.targets.to(mean).reshape(mean.shape) - mean
        residuals.append(torch.stack([mean, error]).double().cpu())
        return (error.abs() / number_scale(chosen, predictive)).double()

    residuals: list[Tensor] = []
    rows, numbers, scoring = grouped_rows(
        posterior, calibration, number, groups, target_key=target_key, progress=progress
    )
    chosen = scoring.conformal[0] if score is None else score
    parts: dict[int | None, Tensor] = {None: rows}
    if numbers is not None:
        parts = {int(group): rows[numbers == group] for group in numbers.unique()}
    quantiles = {group: conformal_quantile(part, level, group) for group, part in parts.items()}
    if chosen in ("adaptive", "threshold"):
        return ConformalSets(posterior, level, chosen, quantiles, len(rows), groups, seed)
    mean, error = torch.cat(residuals, 1)
    warn_of_units(posterior, mean, error, "calibration")
    return ConformalIntervals(posterior, level, chosen, quantiles, len(rows), groups)


def safe_labels(batch: LabelledBatch, like: Tensor) -> Tensor:
    """Return the labels of a batch as columns (B, 1), on the device of a tensor; zero for those that are ignored."""
    safe = batch.targets.masked_fill(~batch.known, 0)
    return safe.reshape(len(safe), 1).long().to(like.device)


def conformal_quantile(scores: Tensor, level: float, group: int | None = None) -> Tensor:
    """Return the ⌈(n + 1) level⌉-th smallest of n scores, for each column of (n, C), (C,).

    Raises:
        DataError: If there are too few scores.

    >>> conformal_quantile(torch.arange(1.0, 20.0).unsqueeze(1), 0.9)
    tensor([18.])
    """
    rank = conformal_rank(len(scores), level)
    if rank > len(scores):
        exact = Fraction(repr(float(level)))
        where = "" if group is None else f" in group {group}"
        raise DataError(
            f"{len(scores)} calibration data{where}; expected at least {math.ceil(exact / (1 - exact))} for the level "
            f"{level:g}, since the set of a higher level than n/(n + 1) is everything. Give more, or a lower level."
        )
    return scores.sort(0).values[rank - 1]


def conformal_rank(count: int, level: float) -> int:
    """Return ⌈(n + 1) level⌉, computed with the decimal digits of the level, so that 0.9 · 20 is 18 and not above."""
    return math.ceil((count + 1) * Fraction(repr(float(level))))


def class_scores(score: str, probs: Tensor, shares: Tensor) -> Tensor:
    """Return the score of every class, (B, C): the larger, the stranger it would be as a label.

    ``shares`` (B, 1) are uniform numbers between 0 and 1, for "adaptive".
    """
    if score == "threshold":
        return 1 - probs
    probs = probs.double()
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = (ordered.cumsum(-1) - ordered).clamp_min(0)
    return torch.zeros_like(probs).scatter_(-1, order, before + shares.to(probs) * ordered)


def row_shares(probs: Tensor, seed: int) -> Tensor:
    """Return a number between 0 and 1 for each row of probabilities (B, C), (B, 1), as if drawn uniformly.

    It is a hash of the row, so an input has the same share whichever batch it comes in, and scores are a fixed function
    of input and label: the guarantee does not depend on how often and with how many rows predictions are asked for.
    Log-probabilities are rounded, so that the last digits of a processor rarely matter.
    """
    rounded = probs.detach().double().clamp_min(1e-300).log().mul(64).round().long()
    factors = torch.randint(-(2**62), 2**62, (probs.shape[1],), generator=torch.Generator().manual_seed(seed))
    mixed = (rounded * (2 * factors.to(rounded.device) + 1)).sum(1)  # overflow wraps around
    for factor in (-49064778989728563, -4265267296055464877):  # Stafford's mix of 64 bits
        mixed = (mixed ^ ((mixed >> 33) & 0x7FFFFFFF)) * factor
    high = (mixed ^ ((mixed >> 33) & 0x7FFFFFFF)) >> 11 & (2**53 - 1)
    return (high.double() / 2**53).unsqueeze(1)


def number_scale(score: str, predictive: NumberPredictive) -> Tensor:
    """Return what errors are divided by, in the shape of the mean."""
    return predictive.std if score == "scaled" else torch.ones_like(predictive.mean)


THRESHOLDS = 20  # that are tested: at these shares of the calibration data, 1/20 to all


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers, and to which inputs they are given.

    Args:
        labels: The answer to every input: the class (B,), labels (B, C), or the mean (B, C).
        answered: Whether it is given, (B,).
    """

    labels: Tensor
    answered: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        """Yield labels and mask, so that ``labels, answered = rule.answers(x)`` works."""
        return iter((self.labels, self.answered))

    def numpy(self) -> tuple[Any, Any]:
        """Return labels and mask as NumPy arrays."""
        return self.labels.cpu().numpy(), self.answered.cpu().numpy()

    def __repr__(self) -> str:
        return f"<Answers: {int(self.answered.sum())} of {len(self.answered)} inputs answered>"


@dataclass(frozen=True, eq=False)
class Abstention:
    """A rule for when to answer; see ``Fitted.abstain`` for the guarantee.

    Args:
        posterior: What predicts.
        by: The uncertainty.
        threshold: Answers are given below it; infinity answers everything.
        risk: The bound that was asked for.
        confidence: The probability that it holds.
        bound: The bound on the risk at this threshold, at most ``risk``.
        observed: The share of wrong answers among the calibration data that are answered.
        share: The share of the calibration data that is answered.
        count: The number of calibration data.
        curve: Risk against coverage on the calibration data.
    """

    posterior: Fitted
    by: str
    threshold: float
    risk: float
    confidence: float
    bound: float
    observed: float
    share: float
    count: int
    curve: RiskCoverage

    @property
    def area(self) -> float:
        """The area under the curve of risk against coverage (AURC); lower is better."""
        return float(self.curve.risk.mean())

    def answers(self, x: Inputs) -> Answers:
        """Return the answer to every input of a batch or a loader, and whether it is given."""
        predictive = self.posterior.predict(x)
        scoring = predictive.scoring
        return Answers(scoring.answer(predictive), scoring.uncertainty(predictive, self.by) < self.threshold)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw risk against coverage, with the threshold; return the Matplotlib axis.

        Raises:
            UnsupportedError: If Matplotlib is not installed.
        """
        from lapwing import plots

        return plots.risk_coverage(self.curve, ax=ax)

    def __repr__(self) -> str:
        return (
            f"<Abstention: answers {100 * self.share:.3g} % by {self.by}, risk at most {self.risk:g} with probability "
            f"{self.confidence:g}>"
        )


def abstention_of(
    posterior: Fitted, calibration: Iterable[object], risk: float, confidence: float, *, by: str | None,
    tolerance: float | None, target_key: str | None, progress: bool | None,
) -> Abstention:  # fmt: skip
    """Return the rule that answers most; see ``Fitted.abstain``."""
    PROBABILITY.check("risk", risk)
    PROBABILITY.check("confidence", confidence)

    def number(predictive: Predictive, batch: LabelledBatch) -> Tensor:
        scoring = predictive.scoring
        scoring.refuse_tolerance(tolerance)
        (one_of(scoring.uncertainties) | NONE).check("by", by)
        doubt = scoring.uncertainty(predictive, by or scoring.uncertainties[0])
        return torch.stack([doubt, scoring.wrong(predictive, batch.targets, tolerance).to(doubt)], 1)

    rows, scoring = rows_of(posterior, calibration, number, target_key=target_key, progress=progress)
    doubt, wrong = rows.unbind(1)
    tests = threshold_tests(doubt, wrong, confidence)
    passed = [test for test in tests if test.bounds(risk)]
    if not passed:
        raise DataError(
            f"no threshold bounds the risk by {risk:g} with probability {confidence:g}, given {len(doubt)} calibration "
            f"data; {_advice(tests)}: {fewest_without_error(risk, confidence)} without an error would do."
        )
    best = max(passed, key=lambda test: test.threshold)
    return Abstention(
        posterior, by or scoring.uncertainties[0], best.threshold, risk, confidence, best.bound,
        best.errors / best.below, best.share, len(doubt), risk_coverage(doubt, wrong),
    )  # fmt: skip


@dataclass(frozen=True)
class ThresholdTest:
    """A threshold, and the errors among the calibration data below it."""

    threshold: float
    errors: int
    below: int  # calibration data with an uncertainty below the threshold
    share: float  # of all calibration data
    level: float  # of the bound

    def bounds(self, risk: float) -> bool:
        """Return whether the risk below the threshold is bounded by this: fewer errors than that would be too rare."""
        return self.below > 0 and binomial_cdf(self.errors, self.below, risk) <= self.level

    @property
    def bound(self) -> float:
        """The smallest risk that it bounds."""
        return binomial_bound(self.errors, self.below, self.level)


def threshold_tests(doubt: Tensor, wrong: Tensor, confidence: float) -> list[ThresholdTest]:
    """Return thresholds whose bounds on the risk below them all hold together with probability ``confidence``.

    A threshold is the k-th smallest uncertainty. Given its value, the data strictly below it are independent draws from
    the distribution of data below it, so the exact binomial bound of their errors holds whatever the uncertainty is;
    each has the level (1 - confidence) / 20. The last threshold is infinite and takes all data.
    """
    ordered, order = doubt.sort()
    errors = torch.cat([wrong.new_zeros(1), wrong[order].cumsum(0)])
    tests = []
    for k in range(1, THRESHOLDS + 1):
        place = math.ceil(k * len(doubt) / THRESHOLDS)
        threshold = math.inf if place == len(doubt) else float(ordered[place])
        below = int((ordered < threshold).sum())
        level = (1 - confidence) / THRESHOLDS
        tests.append(ThresholdTest(threshold, round(float(errors[below])), below, below / len(doubt), level))
    return tests


def binomial_bound(errors: int, count: int, level: float) -> float:
    """Return the largest probability of an error under which at most this many have at least probability ``level``.

    The upper end of the one-sided Clopper-Pearson interval.

    >>> round(binomial_bound(0, 299, 0.05), 4)  # 1 - 0.05^(1/299)
    0.01
    """
    if errors >= count:
        return 1.0
    low, high = errors / count, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if binomial_cdf(errors, count, middle) > level else (low, middle)
    return high


def binomial_cdf(errors: int, count: int, probability: float) -> float:
    """Return the probability of at most this many errors among ``count`` that each has this probability, in (0, 1].

    >>> round(binomial_cdf(1, 3, 0.5), 4)
    0.5
    """
    if probability >= 1:
        return float(errors >= count)
    k = torch.arange(errors + 1, dtype=torch.float64)
    choose = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    logs = choose + k * math.log(probability) + (count - k) * math.log1p(-probability)
    return min(1.0, float(logs.logsumexp(0).exp()))


def fewest_without_error(risk: float, confidence: float) -> int:
    """Return how many answered data without an error are needed to bound the risk."""
    return math.ceil(math.log((1 - confidence) / THRESHOLDS) / math.log1p(-risk))


def _advice(tests: list[ThresholdTest]) -> str:
    """Return the smallest bound in words, and what to do."""
    best = min(tests, key=lambda test: test.bound)
    bound = math.ceil(1e4 * best.bound) / 1e4  # not below it, so that asking for it succeeds
    if bound >= 1:
        return "none bounds it below one. Give more data"
    where = f"the smallest bound is {bound:g}, where {100 * best.share:.3g} % are answered"
    return f"{where}. Ask for that risk, or give more data"


SCORES = ("entropy", "mutual_information", "variance")  # under the whole posterior
BASE = "base_information"  # the mutual information under the posterior that a mixture varies
SCALED = "scaled_information"  # the same times the standard deviation of its outputs
EXTENDED = "extended_information"  # the same, with the log of a standard deviation beyond the calibration data's added
KNOWN = (*SCORES, BASE, SCALED, EXTENDED)
BEYOND = 0.01  # share of the calibration inputs whose outputs may have a larger standard deviation than the usual ones


@dataclass(frozen=True, eq=False)
class Detector:
    """A detector of strange inputs; see ``Fitted.ood`` for the guarantee.

    Args:
        posterior: What predicts.
        by: The score.
        rate: The largest probability of a false alarm.
        scores: Those of the calibration data in ascending order, (n,) in float64.
        usual: The standard deviation of the outputs from which "extended_information" adds its logarithm.
    """

    posterior: Fitted
    by: str
    rate: float
    scores: Tensor
    usual: float = math.inf

    @property
    def threshold(self) -> float:
        """The calibration score above which inputs are flagged."""
        return float(self.scores[len(self.scores) - flagged_ranks(len(self.scores), self.rate)])

    def score(self, x: Inputs, *, target_key: str | None = None, progress: bool | None = None) -> Tensor:
        """Return the score of every input of a batch or a loader, (B,) in float64 on the CPU; higher is stranger."""
        return score_inputs(self.posterior, x, self.by, target_key, progress, usual=self.usual)

    def p_values(self, x: Inputs, *, target_key: str | None = None, progress: bool | None = None) -> Tensor:
        """Return the conformal p-value of every input, (B,): (1 + calibration scores that reach its own) / (n + 1)."""
        score = self.score(x, target_key=target_key, progress=progress)
        below = torch.searchsorted(self.scores, score)  # strictly smaller ones
        return (1 + len(self.scores) - below).double() / (len(self.scores) + 1)

    def flags(self, x: Inputs, *, target_key: str | None = None, progress: bool | None = None) -> Tensor:
        """Return whether every input is flagged, (B,): whether its score is above ``threshold``."""
        return self.score(x, target_key=target_key, progress=progress) > self.threshold

    def __repr__(self) -> str:
        return f"<Detector: {self.by} above {self.threshold:.4g}, false alarms at most {self.rate:g}>"


def detector_of(
    posterior: Fitted, calibration: Iterable[object], *, by: str | None, rate: float, target_key: str | None,
    progress: bool | None,
) -> Detector:  # fmt: skip
    """Return a detector; see ``Fitted.ood``."""
    PROBABILITY.check("rate", rate)
    chosen = default_score(posterior) if by is None else by
    one_of(KNOWN).check("by", chosen)
    given = as_batches(posterior.network, calibration)
    sketching = Sketching()
    parts = _read_parts(posterior, given, chosen, target_key, progress, sketching)
    usual, usual_of_others = _usual_spreads(parts[:, 1]) if chosen == EXTENDED else (math.inf, torch.tensor(math.inf))
    scores = _join(parts, usual_of_others).sort().values
    posterior.rows.warn_reused(sketching.value(), "calibration inputs", VOID, refuses=True, of_inputs=True)
    if not flagged_ranks(len(scores), rate):
        raise DataError(
            f"{len(scores)} calibration data; expected at least {fewest_data(rate)} for "
            f"false alarms at a rate of {rate:g}: with fewer, no input could be flagged. Give more, or a higher rate."
        )
    if bool(scores[0] == scores[-1]) and not posterior.base.has_spread:
        raise UnsupportedError(
            f"the posterior has no error bars from its weights, so that {chosen!r} is {float(scores[0]):.3g} for every "
            "calibration input; expected a posterior that doubts some inputs more than others. Fit one by another "
            "method than MapOnly()."
        )
    return Detector(posterior, chosen, rate, scores, usual)


def default_score(posterior: Fitted) -> str:
    """Return the score that finds strange inputs best for this kind of posterior, as measured in the documentation.

    A mixture that trusts the plain network is nearly certain everywhere, so that labels take the information of its
    base. Far from all data this stops growing, or vanishes, since margins grow as the standard deviation does; the
    standard deviation, and its logarithm beyond that of the calibration data, keep far inputs apart. A posterior
    without spread has nothing but its entropy.
    """
    if not posterior.base.has_spread:
        return "entropy"
    return EXTENDED if posterior.likelihood.has_logits else "variance"


def flagged_ranks(count: int, rate: float) -> int:
    """Return the largest k with k / (count + 1) ≤ rate: the p-values of flagged inputs are 1/(n + 1) ... k/(n + 1).

    Quotients are rounded as those of ``p_values`` are, so that ``flags`` is ``p_values <= rate``.

    >>> flagged_ranks(19, 0.05), flagged_ranks(18, 0.05), flagged_ranks(2, 1 / 3)
    (1, 0, 1)
    """
    k = math.floor((count + 1) * rate) + 1  # at most two too high by rounding
    while k / (count + 1) > rate:
        k -= 1
    return k


def fewest_data(rate: float) -> int:
    """Return the smallest number of calibration data with which an input can be flagged.

    >>> fewest_data(0.05), fewest_data(1 / 3)
    (19, 2)
    """
    count = max(0, math.ceil(1 / rate) - 2)
    while not flagged_ranks(count, rate):
        count += 1
    return count


def score_inputs(
    posterior: Fitted, x: Inputs, by: str, target_key: str | None, progress: bool | None, usual: float = math.inf
) -> Tensor:
    """Return the score of every input of a batch or a loader, (B,) in float64 on the CPU."""
    return _join(_read_parts(posterior, x, by, target_key, progress), usual)


def _read_parts(
    posterior: Fitted, x: Inputs, by: str, target_key: str | None, progress: bool | None,
    sketching: Sketching | None = None,
) -> Tensor:  # fmt: skip
    """Return what the score of every input is made of, (B, 2), see ``_join``; add the inputs to a sketch."""
    refuse_tokens(posterior.network, "ood")
    posterior._refuse_changed()
    parts = []
    with torch.no_grad():
        for batch in input_batches(posterior, x, target_key, progress):
            parts.append(_parts_of(posterior, batch, by))
            if sketching is not None:
                sketching.add(batch, None, len(parts[-1]))
    return torch.cat(parts)


def _parts_of(posterior: Fitted, batch: Inputs, by: str) -> Tensor:
    """Return a number for each input of one batch and the factor of it, (B, 2) in float64 on the CPU."""
    if by == "variance":
        value: Tensor = posterior.posterior(batch).variance.sum(-1)
    else:
        predictive = (posterior.base if by in (BASE, SCALED, EXTENDED) else posterior.posterior).predict(batch)
        value = predictive.entropy if by == "entropy" else predictive.mutual_information
    value = value.double()
    scaled = by in (SCALED, EXTENDED)
    spread = posterior.base(batch).variance.double().sum(-1).sqrt() if scaled else torch.ones_like(value)
    return torch.stack([value, spread], -1).cpu()


def _join(parts: Tensor, usual: Tensor | float) -> Tensor:
    """Return the scores, (B,): the information with what the spread is beyond the usual one, in nats, times the spread.

    A ReLU network may be certain of a class far from all data, however large its spread: it has no information there.
    """
    value, spread = parts.unbind(-1)
    return spread * (value + (spread / usual).clamp_min(1).log())


def _usual_spreads(spread: Tensor) -> tuple[float, Tensor]:
    """Return the spread that the share ``BEYOND`` of the calibration inputs exceeds, and the same among the others.

    The score of a calibration input has to be that of a new one, which is not among those that it is compared with.
    """
    count = int(BEYOND * len(spread))
    largest = spread.clamp_min(torch.finfo(spread.dtype).tiny).sort(descending=True).values
    usual, next_one = largest[count], largest[min(count + 1, len(largest) - 1)]
    return float(usual), torch.where(spread >= usual, next_one, usual)
