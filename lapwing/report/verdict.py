"""The verdict on a posterior: sentences that follow from scores and their uncertainty by fixed rules.

Answers have one of three marks: "good", "unclear" or "bad". A difference counts only if its interval leaves zero out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.metrics.classification import calibration
from lapwing.plots.observed import Answers, Residuals, separate, wilson

CLOSE = 0.02  # error of probabilities and coverages that is small whatever the number of data
DOUBTFUL = 0.1  # share of the inputs that count as the most uncertain ones
DRAWS = 1000  # of what chance does to a calibrated predictor
BINS = 15  # of the calibration error, as in ``lapwing.metrics.ece``
FEW = 100  # inputs below which little can be told


@dataclass(frozen=True)
class Answer:
    """One question about the posterior with its answer in words and the numbers behind it."""

    question: str
    mark: str  # "good", "unclear" or "bad"; empty if the question asks for a place
    short: str  # a clause for the verdict
    sentence: str  # with numbers
    rule: str  # how it follows from them


@dataclass(frozen=True)
class Verdict:
    """What a reader should know first."""

    sentences: str
    answers: tuple[Answer, ...]


def verdict_of(evaluation: Any, has_spread: bool = True) -> Verdict:
    """Return the verdict that follows from an evaluation of a posterior beside the plain network.

    Args:
        evaluation: What ``posterior.evaluate(data)`` returns.
        has_spread: Whether the posterior has error bars at all; the plain network has none.
    """
    found = separate(evaluation)["posterior"]
    real = isinstance(found, Residuals)
    inputs = evaluation.inputs
    calibrated = _intervals(evaluation, found) if real else _probabilities(found, inputs)
    better = _better(evaluation, has_spread)
    trust = _doubtful_numbers(found) if real else _doubtful_labels(found)
    few = f" Only {inputs} inputs were scored, so that little can be told." if inputs < FEW else ""
    first = f"The error bars {calibrated.short}" if real else f"The probabilities {calibrated.short}"
    sentences = f"{first}, and the predictions {better.short}. {trust.short}{few}"
    return Verdict(sentences, (calibrated, better, trust))


def _probabilities(found: Answers, inputs: int) -> Answer:
    """Return whether confidences agree with how often answers are right."""
    error, likely = calibration_error(found), calibration_error_by_chance(found)
    confidence, right = float(found.probability.mean()), float(found.true.mean())
    numbers = (
        f"Mean confidence is {percent(confidence)}, and {percent(right)} of the answers are right. Confidences differ "
        f"from the share that is right by {points(error)} on average; for a calibrated predictor it would be up to "
        f"{points(likely)} by chance, with {len(found.true):,} answers."
    )
    rule = (
        f"Calibrated if the expected calibration error ({BINS} bins) is below the 95 % quantile of what chance does to "
        f"answers that are right with exactly the stated probability ({DRAWS} draws); nearly so if it is below "
        f"{points(CLOSE)}."
    )
    question = "Is it calibrated?"
    if error <= likely:
        return Answer(question, "good", f"are calibrated, as far as {inputs:,} inputs can tell", numbers, rule)
    if error <= CLOSE:
        return Answer(question, "good", f"are off by {points(error)} only", numbers, rule)
    kind = "overconfident" if confidence > right else "underconfident"
    short = f"are {kind}: {percent(confidence)} on average where {percent(right)} of the answers are right"
    if abs(confidence - right) < CLOSE:
        short = f"are not calibrated: too high in places and too low in others, by {points(error)} on average"
    return Answer(question, "bad", short, numbers, rule)


def calibration_error(found: Answers) -> float:
    """Return the expected calibration error of the answers."""
    binned = calibration(found.probability, found.true, BINS)
    return float((binned.weight * (binned.accuracy - binned.confidence).abs()).nansum())


def calibration_error_by_chance(found: Answers, level: float = 0.95) -> float:
    """Return the quantile of the calibration error if answers are right with exactly the stated probability.

    The seed is fixed (Bröcker and Smith 2007: consistency resampling).
    """
    probability = found.probability.double().cpu().clamp(0, 1)
    inner = torch.arange(1, BINS, dtype=torch.float64) / BINS
    which = torch.bucketize(probability, inner)
    sums = torch.zeros(DRAWS, BINS, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for row in sums:
        right = (torch.rand(len(probability), generator=generator, dtype=torch.float64) < probability).double()
        row.index_add_(0, which, right - probability)
    return float((sums.abs().sum(1) / len(probability)).quantile(level))


def _intervals(evaluation: Any, found: Residuals) -> Answer:
    """Return whether intervals hold as many targets as they should."""
    level, share = evaluation.level, evaluation["coverage"].posterior.value
    count = evaluation.inputs  # outputs of one input may depend on each other
    low, high = wilson(share, count)
    numbers = (
        f"The {percent(level)} intervals hold {percent(share)} of the targets "
        f"[{percent(low)} to {percent(high)}, {count:,} inputs]; the plain network's hold "
        f"{percent(evaluation['coverage'].plain.value)}."
    )
    rule = (
        f"Calibrated if the 95 % interval (Wilson) of the share that the intervals hold contains {percent(level)}; "
        f"nearly so if the share is within {points(CLOSE)} of it."
    )
    question, says = "Are the intervals calibrated?", f"{percent(level)} intervals hold {percent(share)} of the targets"
    if low <= level <= high:
        return Answer(question, "good", f"are calibrated, as far as {count:,} inputs can tell: {says}", numbers, rule)
    if abs(share - level) <= CLOSE:
        return Answer(question, "good", f"are nearly calibrated: {says}", numbers, rule)
    width = "too narrow" if share < level else "too wide"
    return Answer(question, "bad", f"are {width}: {says}", numbers, rule)


def _better(evaluation: Any, has_spread: bool) -> Answer:
    """Return whether the posterior predicts better than the plain network, by its likelihood of the targets."""
    row, question = evaluation["nll"], "Is it better than the plain network?"
    confidence = percent(evaluation.confidence)
    numbers = (
        f"The negative log-likelihood of an input is {row.posterior.value:.4g}, and {row.plain.value:.4g} for the plain "
        f"network: a difference of {signed(row.difference.value)} [{signed(row.difference.low)}, "
        f"{signed(row.difference.high)}]; lower is better."
    )
    rule = (
        f"Better or worse if the {confidence} bootstrap interval of the difference in log-likelihood, of the same "
        "inputs, is on one side of zero; otherwise no difference can be told."
    )
    if not has_spread:
        return Answer(question, "unclear", "are those of the plain network itself", numbers, rule)
    words = {
        "better": ("good", "are better than those of the plain network"),
        "worse": ("bad", "are worse than those of the plain network"),
        "undecided": ("unclear", "cannot be told apart from those of the plain network"),
    }
    return Answer(question, *words[row.verdict], numbers, rule)


def _doubtful_labels(found: Answers) -> Answer:
    """Return where answers are often wrong: at the inputs with the lowest confidence."""
    worst, rest, limit = _parted(found.uncertainty)
    wrong = found.wrong
    (a, b), (c, d) = (wilson(float(wrong[rows].mean()), len(rows)) for rows in (worst, rest))
    first, second = float(wrong[worst].mean()), float(wrong[rest].mean())
    numbers = (
        f"Of the {len(worst):,} answers with the lowest confidence, up to {percent(1 - limit)}, {percent(first)} are "
        f"wrong [{percent(a)} to {percent(b)}]; of the others {percent(second)} [{percent(c)} to {percent(d)}]."
    )
    short = (
        f"Do not rely on answers with a confidence of {percent(1 - limit)} or less: {percent(first)} of them are wrong."
    )
    return _doubt(numbers, short, a > d, "wrong answers")


def _doubtful_numbers(found: Residuals) -> Answer:
    """Return where errors are large: at the inputs with the widest intervals."""
    worst, rest, limit = _parted(found.std)
    squares = found.error.square()
    first, second = (float(squares[rows].mean().sqrt()) for rows in (worst, rest))
    spread = lambda rows: float(squares[rows].std(correction=0)) / max(1, len(rows)) ** 0.5
    apart = float(squares[worst].mean() - squares[rest].mean()) > 1.96 * (spread(worst) ** 2 + spread(rest) ** 2) ** 0.5
    numbers = (
        f"The {len(worst):,} predictions with the largest standard deviation, from {limit:.3g} on, have an RMSE of "
        f"{first:.3g}; the others {second:.3g}."
    )
    short = f"Do not rely on predictions with a standard deviation of {limit:.3g} or more: their RMSE is {first:.3g}, "
    return _doubt(numbers, f"{short}that of the others {second:.3g}.", apart, "large errors")


def _doubt(numbers: str, short: str, apart: bool, what: str) -> Answer:
    question = "On what should it not be trusted?"
    rule = (
        f"The tenth of the data that is most uncertain is named if its 95 % interval of {what} is above that of the "
        "rest. Inputs unlike the training data are not in this test; posterior.ood(calibration) finds them."
    )
    if apart:
        return Answer(question, "", short, numbers, rule)
    short = f"On these data its uncertainty does not show where {what} are."
    return Answer(question, "unclear", short, numbers, rule)


def _parted(uncertainty: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the rows of the most uncertain tenth, those of the others, and the least uncertainty of the former."""
    order = uncertainty.argsort(descending=True, stable=True)
    count = min(len(order) - 1, max(1, round(DOUBTFUL * len(order)))) if len(order) > 1 else 1
    return order[:count], order[count:] if len(order) > 1 else order, float(uncertainty[order[count - 1]])


def percent(value: float) -> str:
    """Return a share as text.

    >>> percent(0.95), percent(0.0432), percent(0.9987), percent(1)
    ('95 %', '4.3 %', '99.9 %', '100 %')
    """
    digits = 1 if 0 < min(value, 1 - value) < 0.0995 else 0
    text = f"{100 * value:.{digits}f}"
    return f"{text.removesuffix('.0')} %"


def points(value: float) -> str:
    """Return a difference of shares as text.

    >>> points(0.0123)
    '1.2 percentage points'
    """
    return f"{100 * value:.2g} percentage points"


def signed(value: float) -> str:
    """Return a number with its sign.

    >>> signed(-0.123456), signed(2.0)
    ('−0.1235', '+2')
    """
    return f"{value:+.4g}".replace("-", "−")
