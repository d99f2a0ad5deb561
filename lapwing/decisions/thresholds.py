"""Thresholds with a guarantee: when not to answer, and which inputs are unlike the calibration data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.data.known_rows import Sketching
from lapwing.decisions.collecting import (
    LabelledBatch,
    as_batches,
    input_batches,
    refuse_reused,
    refuse_tokens,
    rows_of,
)
from lapwing.errors import DataError, UnsupportedError
from lapwing.metrics import RiskCoverage, risk_coverage
from lapwing.predictives.base import Predictive
from lapwing.runtime.settings import PROBABILITY, one_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing.fitted import Fitted

if TYPE_CHECKING:
    pass

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
        one_of(scoring.uncertainties).check("by", scoring.uncertainties[0] if by is None else by)
        doubt = scoring.uncertainty(predictive, scoring.uncertainties[0] if by is None else by)
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
        posterior, scoring.uncertainties[0] if by is None else by, best.threshold, risk, confidence, best.bound,
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
    bound = _round_up(best.bound)
    if bound >= 1:
        return "none bounds it below one. Give more data"
    where = f"the smallest bound is {bound:g}, where {100 * best.share:.3g} % are answered"
    return f"{where}. Ask for that risk, or give more data"


def _round_up(bound: float) -> float:
    """Return the bound with four decimals, not below it, so that asking for it succeeds."""
    return math.ceil(1e4 * bound) / 1e4


SCORES = ("entropy", "mutual_information", "variance")  # under the whole posterior
BASE = "base_information"  # the mutual information under the posterior that a mixture varies
SCALED = "scaled_information"  # the same times the standard deviation of its outputs
KNOWN = (*SCORES, BASE, SCALED)


@dataclass(frozen=True, eq=False)
class Detector:
    """A detector of strange inputs; see ``Fitted.ood`` for the guarantee.

    Args:
        posterior: What predicts.
        by: The score.
        rate: The largest probability of a false alarm.
        scores: Those of the calibration data in ascending order, (n,) in float64.
    """

    posterior: Fitted
    by: str
    rate: float
    scores: Tensor

    @property
    def threshold(self) -> float:
        """The calibration score above which inputs are flagged."""
        return float(self.scores[len(self.scores) - flagged_ranks(len(self.scores), self.rate)])

    def score(self, x: Inputs, *, target_key: str | None = None, progress: bool | None = None) -> Tensor:
        """Return the score of every input of a batch or a loader, (B,) in float64 on the CPU; higher is stranger."""
        return score_inputs(self.posterior, x, self.by, target_key, progress)

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
    scores = score_inputs(posterior, given, chosen, target_key, progress, sketching).sort().values
    refuse_reused(posterior, sketching.value(), "calibration inputs", of_inputs=True)
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
    return Detector(posterior, chosen, rate, scores)


def default_score(posterior: Fitted) -> str:
    """Return the score that finds strange inputs best for this kind of posterior, as measured in the documentation.

    A mixture that trusts the plain network is nearly certain everywhere, so that labels take the information of its
    base. Far from all data this stops growing, since margins grow as the standard deviation does; its factor keeps far
    inputs apart. A posterior without spread has nothing but its entropy.
    """
    if not posterior.base.has_spread:
        return "entropy"
    return SCALED if posterior.likelihood.has_logits else "variance"


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
    posterior: Fitted, x: Inputs, by: str, target_key: str | None, progress: bool | None,
    sketching: Sketching | None = None,
) -> Tensor:  # fmt: skip
    """Return the score of every input of a batch or a loader, (B,) in float64 on the CPU; add them to a sketch."""
    refuse_tokens(posterior.network, "ood")
    posterior._refuse_changed()
    parts = []
    with torch.no_grad():
        for batch in input_batches(posterior, x, target_key, progress):
            parts.append(_scores(posterior, batch, by))
            if sketching is not None:
                sketching.add(batch, None, len(parts[-1]))
    return torch.cat(parts)


def _scores(posterior: Fitted, batch: Inputs, by: str) -> Tensor:
    """Return the scores of one batch, (B,)."""
    if by == "variance":
        return posterior.posterior(batch).variance.double().sum(-1).cpu()
    predictive = (posterior.base if by in (BASE, SCALED) else posterior.posterior).predict(batch)
    if by == SCALED:
        doubt = posterior.base(batch).variance.double().sum(-1).sqrt()
        return (doubt * predictive.mutual_information.double()).cpu()
    value: Tensor = predictive.entropy if by == "entropy" else predictive.mutual_information
    return value.double().cpu()
