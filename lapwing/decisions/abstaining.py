"""When not to answer: a threshold on the uncertainty, with a bound on the risk of what is answered."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.decisions.collecting import Labelled, rows_of
from lapwing.errors import DataError
from lapwing.metrics import RiskCoverage, risk_coverage
from lapwing.runtime.settings import PROBABILITY, one_of

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

    def __iter__(self) -> Any:
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

    posterior: Any
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

    def plot(self, ax: Any = None) -> Any:
        """Draw risk against coverage, with the threshold; return the Matplotlib axis.

        Raises:
            UnsupportedError: If Matplotlib is not installed.
        """
        from lapwing import plots

        draw: Any = plots.risk_coverage
        return draw(self.curve, ax=ax)

    def __repr__(self) -> str:
        return (
            f"<Abstention: answers {100 * self.share:.3g} % by {self.by}, risk at most {self.risk:g} with probability "
            f"{self.confidence:g}>"
        )


def abstention_of(
    posterior: Any, calibration: Iterable[Any], risk: float, confidence: float, *, by: str | None,
    tolerance: float | None, target_key: str | None, progress: bool | None,
) -> Abstention:  # fmt: skip
    """Return the rule that answers most; see ``Fitted.abstain``."""
    PROBABILITY.check("risk", risk)
    PROBABILITY.check("confidence", confidence)

    def number(predictive: Any, batch: Labelled) -> Tensor:
        scoring = predictive.scoring
        scoring.refuse_tolerance(tolerance)
        one_of(scoring.uncertainties).check("by", scoring.uncertainties[0] if by is None else by)
        doubt = scoring.uncertainty(predictive, scoring.uncertainties[0] if by is None else by)
        return torch.stack([doubt, scoring.wrong(predictive, batch.targets, tolerance).to(doubt)], 1)

    rows, scoring = rows_of(posterior, calibration, number, target_key=target_key, progress=progress)
    doubt, wrong = rows.unbind(1)
    tests = tested(doubt, wrong, confidence)
    passed = [test for test in tests if test.bounds(risk)]
    if not passed:
        raise DataError(
            f"no threshold bounds the risk by {risk:g} with probability {confidence:g}, given {len(doubt)} calibration "
            f"data; {_advice(tests)}: {needed(risk, confidence)} without an error would do."
        )
    best = max(passed, key=lambda test: test.threshold)
    return Abstention(
        posterior, scoring.uncertainties[0] if by is None else by, best.threshold, risk, confidence, best.bound,
        best.errors / best.below, best.share, len(doubt), risk_coverage(doubt, wrong),
    )  # fmt: skip


@dataclass(frozen=True)
class Tested:
    """A threshold, and the errors among the calibration data below it."""

    threshold: float
    errors: int
    below: int  # calibration data with an uncertainty below the threshold
    share: float  # of all calibration data
    level: float  # of the bound

    def bounds(self, risk: float) -> bool:
        """Return whether the risk below the threshold is bounded by this: fewer errors than that would be too rare."""
        return self.below > 0 and at_most(self.errors, self.below, risk) <= self.level

    @property
    def bound(self) -> float:
        """The smallest risk that it bounds."""
        return binomial_bound(self.errors, self.below, self.level)


def tested(doubt: Tensor, wrong: Tensor, confidence: float) -> list[Tested]:
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
        tests.append(Tested(threshold, round(float(errors[below])), below, below / len(doubt), level))
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
        low, high = (middle, high) if at_most(errors, count, middle) > level else (low, middle)
    return high


def at_most(errors: int, count: int, probability: float) -> float:
    """Return the probability of at most this many errors among ``count`` that each has this probability, in (0, 1].

    >>> round(at_most(1, 3, 0.5), 4)
    0.5
    """
    if probability >= 1:
        return float(errors >= count)
    k = torch.arange(errors + 1, dtype=torch.float64)
    choose = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    logs = choose + k * math.log(probability) + (count - k) * math.log1p(-probability)
    return min(1.0, float(logs.logsumexp(0).exp()))


def needed(risk: float, confidence: float) -> int:
    """Return how many answered data without an error bound the risk."""
    return math.ceil(math.log((1 - confidence) / THRESHOLDS) / math.log1p(-risk))


def _advice(tests: list[Tested]) -> str:
    """Return the smallest bound in words, and what to do."""
    best = min(tests, key=lambda test: test.bound)
    bound = _rounded_up(best.bound)
    if bound >= 1:
        return "none bounds it below one. Give more data"
    where = f"the smallest bound is {bound:g}, where {100 * best.share:.3g} % are answered"
    return f"{where}. Ask for that risk, or give more data"


def _rounded_up(bound: float) -> float:
    """Return the bound with four decimals, not below it, so that asking for it succeeds."""
    return math.ceil(1e4 * bound) / 1e4
