"""The verdict on a posterior: sentences that follow from scores and their uncertainty by fixed rules.

Answers have one of three marks: "good", "unclear" or "bad". A difference counts only if its interval leaves zero out
and it is not tiny beside the scores.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.data.inputs import is_real_tensor
from lapwing.decisions.collecting import LabelledBatch, batches_of, label_batch, source_of
from lapwing.decisions.evaluation import ClassFrequency, Evaluation, interval_parts
from lapwing.metrics import ScoreInterval, ece
from lapwing.plots import AnswerProbabilities, Residuals, normal_half_width, wilson
from lapwing.predictives.base import LabelPredictive, NumberPredictive, Predictive

if TYPE_CHECKING:
    from lapwing.fitted import Fitted

CLOSE = 0.02  # error of probabilities and coverages that is small whatever the number of data
STANDARD_ERRORS = 4.0  # of the mean probability of a class: that chance does so to one of 100 has a probability of .006
DOUBTFUL = 0.1  # share of the inputs that count as the most uncertain ones
CHANCE = 0.975  # of each of two differences
DRAWS = 1000  # of what chance does to a calibrated predictor
BINS = 15  # of the calibration error, as in ``lapwing.metrics.ece``
MANY = 5000  # answers from which sums over bins are normal
LEAST = 20  # inputs below which resampled data say nothing about others
FEW = 100  # inputs below which little can be told


@dataclass(frozen=True)
class Answer:
    """One question about the posterior with its answer in words and the numbers behind it."""

    question: str
    word: str  # "Yes", "Partly", ...; empty if the question asks for a place
    mark: str  # "good", "unclear" or "bad"
    short: str  # a clause for the verdict
    sentence: str  # with numbers
    rule: str  # how it follows from them


@dataclass(frozen=True)
class Verdict:
    """What a reader should know first."""

    sentences: str
    answers: tuple[Answer, ...]


def verdict_of(evaluation: Evaluation, has_spread: bool = True) -> Verdict:
    """Return the verdict that follows from an evaluation of a posterior beside the plain network.

    Args:
        evaluation: What ``posterior.evaluate(data)`` returns.
        has_spread: Whether the posterior has error bars at all; the plain network has none.
    """
    found = evaluation.by_network["posterior"]
    if isinstance(found, Residuals):
        stated, calibrated, trust = "error bars", _intervals(evaluation, found), _doubtful_numbers(found)
    else:
        stated, calibrated, trust = "probabilities", _probabilities(evaluation, found), _doubtful_labels(found)
    better, inputs = _better(evaluation, has_spread), evaluation.inputs
    scored = "1 input was" if inputs == 1 else f"{inputs} inputs were"
    few = f" Only {scored} scored, so that little can be told." if inputs < FEW else ""
    also = "but" if {calibrated.mark, better.mark} == {"good", "bad"} else "and"
    sentences = f"The {stated} {calibrated.short}, {also} the predictions {better.short}. {trust.short}{few}"
    return Verdict(sentences, (calibrated, better, trust))


def _probabilities(evaluation: Evaluation, found: AnswerProbabilities) -> Answer:
    """Return whether stated probabilities agree with how often they come true, and the mean of each class too."""
    inputs = evaluation.inputs
    error, likely = ece(found.probability, found.true, BINS), calibration_error_by_chance(found)
    confidence, right = float(found.probability.mean()), float(found.true.mean())
    spread = normal_half_width(CHANCE) * mean_error_by_chance(found)
    said, seen, what = ("confidence", "of the answers are right", "answers")
    if not found.of_classes:
        said, seen, what = ("probability of one", "of the labels are one", "labels")
    worst = _biased_class(evaluation)
    numbers = (
        f"Mean {said} is {percent(confidence)}, and {percent(right)} {seen}; for a calibrated "
        f"predictor the difference would be up to {points(spread)} by chance, with {len(found.true):,} {what}. In "
        f"bins, the two differ by {points(error)} on average; by chance it would be up to {points(likely)}."
    )
    rule = (
        f"Calibrated if both differences, of all {what} and in {BINS} bins (the expected calibration error), are "
        f"within what chance does, with probability {percent(CHANCE)} each, to {what} that come true with exactly the "
        f"stated probability; nearly so if the second is below {points(CLOSE)}. Not calibrated if the mean probability "
        f"of a class or label differs from its frequency by more than {points(CLOSE)} and {STANDARD_ERRORS:g} standard "
        "errors."
    )
    word, mark = "Yes", "good"
    if worst is not None:
        many, own, high = evaluation.class_count > 1, worst.probability, worst.gap.value > 0
        name = f"{'class' if found.of_classes else 'label'} {worst.number}" if many else "label one"
        word, mark = "No", "bad"
        short = (
            f"are not calibrated: that of {name} is too {'high' if high else 'low'}, {percent(own)} on average where "
            f"{percent(worst.frequency)} is right"
        )
    elif error <= likely and abs(confidence - right) <= spread:
        short = f"are calibrated, as far as {inputs:,} input{'s' * (inputs > 1)} can tell"
    elif error <= CLOSE:
        short = f"are nearly calibrated, off by {points(error)} on average"
    else:
        word, mark = "No", "bad"
        kind = "overconfident" if confidence > right else "underconfident"
        kind = kind if found.of_classes else "too high" if confidence > right else "too low"
        short = f"are {kind} (they say {percent(confidence)} on average, and {percent(right)} {seen})"
        if abs(confidence - right) <= spread:
            short = f"are not calibrated (too high in places and too low in others, by {points(error)} on average)"
    return Answer("Is it calibrated?", word, mark, short, numbers, rule)


def _biased_class(evaluation: Evaluation) -> ClassFrequency | None:
    """Return the class whose mean probability is farthest from its frequency, if it is clearly off; otherwise None."""
    least = lambda row: max(CLOSE, STANDARD_ERRORS * row.gap.std)
    off = [row for row in evaluation.classes if row.verdict and abs(row.gap.value) > least(row)]
    return max(off, key=lambda row: abs(row.gap.value), default=None)


def mean_error_by_chance(found: AnswerProbabilities) -> float:
    """Return the standard error of the share that is right, if answers are right with the stated probability."""
    return float((found.probability * (1 - found.probability)).clamp_min(0).mean() / len(found.true)) ** 0.5


def calibration_error_by_chance(found: AnswerProbabilities) -> float:
    """Return the quantile of the calibration error if answers are right with exactly the stated probability.

    Draws have a fixed seed (Bröcker and Smith 2007: consistency resampling). With many answers, the sums over bins are
    drawn from normal distributions.
    """
    probability = found.probability.double().cpu().clamp(0, 1)
    inner = torch.arange(1, BINS, dtype=torch.float64) / BINS
    bins = torch.nn.functional.one_hot(torch.bucketize(probability, inner), BINS).double()
    generator, count = torch.Generator().manual_seed(0), len(probability)
    if count > MANY:
        spread = (probability * (1 - probability) @ bins).sqrt()
        sums = spread * torch.randn(DRAWS, BINS, generator=generator, dtype=torch.float64)
    else:
        right = (torch.rand(DRAWS, count, generator=generator) < probability).double()
        sums = (right - probability) @ bins
    return float((sums.abs().sum(1) / count).quantile(CHANCE))


def _intervals(evaluation: Evaluation, found: Residuals) -> Answer:
    """Return whether intervals hold as many targets as they should, at the level and at 50 %."""
    count = evaluation.inputs  # outputs of one input may depend on each other
    shares = {evaluation.level: evaluation["coverage"].posterior.value}
    if any(row.name == "cqm" for row in evaluation.rows):  # counts have no intervals of exactly 50 %
        shares[0.5] = found.coverage([0.5]).item()
    level, *others = shares
    says = f"{percent(level)} intervals hold {percent(shares[level])} of the targets"
    says += "".join(f", {percent(other)} intervals {percent(shares[other])}" for other in others)
    ranges = {level: wilson(share, count, CHANCE) for level, share in shares.items()}
    told = ", ".join(f"{percent(low)} to {percent(high)}" for low, high in ranges.values())
    numbers = (
        f"The {says} (with {count:,} inputs these shares are uncertain: {told}). The plain network's "
        f"{percent(level)} intervals hold {percent(evaluation['coverage'].plain.value)}."
    )
    rule = (
        f"Calibrated if the {percent(CHANCE)} intervals (Wilson) of these shares contain "
        f"{' and '.join(map(percent, shares))}, or the shares are within {points(CLOSE)} of these."
    )
    question = "Are the intervals calibrated?"
    wrong = [
        level for level, (low, high) in ranges.items()
        if not low <= level <= high and abs(shares[level] - level) > CLOSE
    ]  # fmt: skip
    if not wrong:
        short = f"are calibrated, as far as {count:,} inputs can tell ({says})"
        return Answer(question, "Yes", "good", short, numbers, rule)
    width = "narrow" if shares[wrong[0]] < wrong[0] else "wide"
    if wrong == [0.5]:
        return Answer(question, "Partly", "unclear", f"are too {width} in the middle ({says})", numbers, rule)
    return Answer(question, "No", "bad", f"are too {width} ({says})", numbers, rule)


def _better(evaluation: Evaluation, has_spread: bool) -> Answer:
    """Return whether the posterior predicts better than the plain network, by its likelihood of the targets."""
    row, question = evaluation["nll"], "Is it better than the plain network?"
    confidence = percent(evaluation.confidence)
    own, plain = (cells(each, row.decimals)[0] for each in (row.posterior, row.plain))
    apart, low, high = cells(row.difference, size=row.size, signed=True)
    numbers = (
        f"The negative log-likelihood of an input is {own}; that of the plain network is {plain}. The difference is "
        f"{apart} [{low}, {high}]; lower is better."
    )
    rule = (
        f"Better or worse if the {confidence} bootstrap interval of the difference in log-likelihood, of the same "
        f"inputs, is on one side of zero, and the difference is above a thousandth of "
        f"{'a nat' if row.unit else 'both'}; otherwise, and with fewer than {LEAST} inputs, no difference can be told."
    )
    if not has_spread:
        return Answer(question, "Cannot be told", "unclear", "are those of the plain network itself", numbers, rule)
    words = {
        "better": ("Yes", "good", "are better than those of the plain network"),
        "worse": ("No", "bad", "are worse than those of the plain network"),
        "undecided": ("Cannot be told", "unclear", "cannot be told apart from those of the plain network"),
    }
    verdict = row.verdict if evaluation.inputs >= LEAST else "undecided"
    return Answer(question, *words[verdict], numbers, rule)


def _doubtful_labels(found: AnswerProbabilities) -> Answer:
    """Return where answers are often wrong: at the inputs with the lowest confidence."""
    worst, rest, limit = _split_by_uncertainty(found.uncertainty)
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
    wrong_at_all = float(wrong.mean())
    if not wrong_at_all:
        return replace(_doubt(numbers, "", False, "wrong answers"), short="No answer was wrong.")
    if wrong_at_all > 0.5:
        short = f"Most answers are wrong, {percent(wrong_at_all)}: do not rely on them."
    return _doubt(numbers, short, a > d or wrong_at_all > 0.5, "wrong answers")


def _doubtful_numbers(found: Residuals) -> Answer:
    """Return where errors are large: at the inputs with the widest intervals."""
    worst, rest, limit = _split_by_uncertainty(found.std)
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
        "rest; all of them if more than half of the answers are wrong. Inputs unlike the training data are not in this "
        "test; posterior.ood(calibration) finds them."
    )
    if apart:
        return Answer(question, "", "good", short, numbers, rule)
    short = f"On these data its uncertainty does not show where {what} are."
    return Answer(question, "Cannot be told", "unclear", short, numbers, rule)


def _split_by_uncertainty(uncertainty: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the rows of the most uncertain tenth, those of the others, and the least uncertainty of the former."""
    order = uncertainty.argsort(descending=True, stable=True)
    count = min(len(order) - 1, max(1, round(DOUBTFUL * len(order)))) if len(order) > 1 else 1
    return order[:count], order[count:] if len(order) > 1 else order, float(uncertainty[order[count - 1]])


def percent(value: float) -> str:
    """Return a share as text that stays in one line.

    >>> [percent(share).replace("\N{NO-BREAK SPACE}", " ") for share in (0.95, 0.0432, 0.9987, 1)]
    ['95 %', '4.3 %', '99.9 %', '100 %']
    """
    digits = 1 if 0 < min(value, 1 - value) < 0.0995 else 0
    text = f"{100 * value:.{digits}f}"
    return f"{text.removesuffix('.0')}\N{NO-BREAK SPACE}%"


def points(value: float) -> str:
    """Return a difference of shares as text.

    >>> points(0.0123)
    '1.2 percentage points'
    """
    return f"{100 * value:.2g} percentage points"


def cells(score: ScoreInterval, decimals: int | None = None, size: float = 0.0, signed: bool = False) -> list[str]:
    """Return a score and both ends of its interval with a real minus sign, and a plus where ``signed`` asks for it.

    >>> cells(ScoreInterval(-0.12345, -0.15, 0.1, 0.01), signed=True)
    ['−0.12', '−0.15', '+0.10']
    """
    plus = lambda text: f"+{text}" if signed and text.strip("-0.") and text[0] != "-" else text
    return [plus(text).replace("-", "−") for text in interval_parts(score, decimals, size)]


SHOWN = 8  # inputs in the table
LOOKED = 2000  # inputs that are looked at
VALUES = 4  # numbers of an input, and of a prediction, that are shown
PIXELS = 64  # height and width of an image at most


@dataclass(frozen=True)
class UncertainInput:
    """One input: what it is, what was predicted, what came true."""

    number: int  # in the order of the data
    shown: str  # its first numbers; empty if it is an image, or no tensor
    image: str  # a PNG as a data URI; empty if it is not an image
    prediction: str
    uncertainty: float
    target: str


@dataclass(frozen=True, eq=False)
class UncertainInputs:
    """The most uncertain of the first inputs."""

    rows: tuple[UncertainInput, ...]
    count: int  # inputs that were looked at
    measure: str  # what uncertainty is, in words
    column: str  # the same in one word
    line: tuple[Tensor, Tensor] | None  # inputs and targets, if inputs are one number each


def find_uncertain_inputs(
    parts: Sequence[tuple[Fitted, Iterable[object]]], target_key: str | None, progress: bool | None
) -> UncertainInputs:
    """Return the most uncertain of the first 2,000 inputs of posteriors, each on its own data. Cost: predictions."""
    rows: list[UncertainInput] = []
    line: list[tuple[Tensor, Tensor]] = []
    count, measure, column = 0, "", ""
    with torch.no_grad():
        sources = ((each, source_of(each.network, data, "data", target_key, progress)) for each, data in parts)
        batches = ((each, batch) for each, source in sources for batch in batches_of(each.network, source))
        for posterior, batch in batches:
            each = label_batch(posterior, batch, "data")
            predictive: Any = posterior.posterior.predict(each.inputs)
            measure, column, uncertainty = _uncertainty(predictive)
            if _is_number(each.inputs):
                line.append((each.inputs.cpu(), each.targets.cpu()))
            first = uncertainty.argsort(descending=True, stable=True)[:SHOWN].tolist()
            rows += [_row(each, predictive, i, count + i, float(uncertainty[i])) for i in first]
            rows = sorted(rows, key=lambda row: -row.uncertainty)[:SHOWN]
            count += len(uncertainty)
            if count >= LOOKED:
                break
    joined = (torch.cat([x for x, _ in line]), torch.cat([y for _, y in line])) if line else None
    return UncertainInputs(tuple(rows), count, measure, column, joined)


def _is_number(inputs: Any) -> bool:
    return is_real_tensor(inputs) and inputs.shape[1:].numel() == 1


def _uncertainty(predictive: LabelPredictive | NumberPredictive) -> tuple[str, str, Tensor]:
    """Return what uncertainty is, in words and in one word, and that of each input (B,): a mean over its outputs."""
    if isinstance(predictive, LabelPredictive):
        each = predictive.entropy.double().cpu().reshape(len(predictive.probs), -1).mean(1)
        return "entropy in nats", "entropy", each
    return "standard deviation", "std", predictive.std.double().cpu().flatten(1).mean(1)


def _row(batch: LabelledBatch, predictive: Predictive, row: int, number: int, uncertainty: float) -> UncertainInput:
    x = batch.inputs[row].detach().cpu() if isinstance(batch.inputs, Tensor) else None
    image = _image(x) if x is not None and x.ndim == 3 else ""
    shown = "" if x is None or image else _describe_values(x.flatten())
    target = batch.targets[row].detach().cpu().flatten()
    return UncertainInput(
        number, shown, image, _describe_prediction(predictive, row), uncertainty, _describe_values(target)
    )


def _describe_values(values: Tensor) -> str:
    """Return the first numbers as text, and how many there are if there are more."""
    more = f", … ({len(values):,})" if len(values) > VALUES else ""
    return ", ".join(f"{value:.3g}" for value in values[:VALUES].tolist()).replace("-", "−") + more


def _describe_prediction(predictive: Predictive, row: int) -> str:
    """Return a prediction in a few words; nothing for tokens and pixels."""
    mean = predictive.mean[row].detach().cpu()
    if mean.ndim != 1:
        return ""
    if isinstance(predictive, NumberPredictive):
        pairs = zip(mean[:VALUES].tolist(), predictive.std[row][:VALUES].tolist())
        text = ", ".join(f"{value:.3g} ± {std:.2g}".replace("-", "−") for value, std in pairs)
        return text + (", …" if len(mean) > VALUES else "")
    if predictive.scoring.task == "classes":
        top = mean.topk(min(2, len(mean)))
        each = zip(top.indices.tolist(), top.values.tolist())
        return ", ".join(f"{label}\N{NO-BREAK SPACE}({percent(share)})" for label, share in each)
    return ", ".join(percent(share) for share in mean[:VALUES].tolist()) + (", …" if len(mean) > VALUES else "")


def _image(x: Tensor) -> str:
    """Return an image (C, H, W) of one or three colours as a data URI, small and with its full range of values.

    Of anything else, return an empty text.
    """
    if x.shape[0] not in (1, 3) or min(x.shape[1:]) < 4 or not x.is_floating_point():
        return ""
    from matplotlib.image import imsave

    scale = min(1.0, PIXELS / max(x.shape[1:]))
    size = [max(1, round(scale * side)) for side in x.shape[1:]]
    small = torch.nn.functional.interpolate(x[None].double(), size=size, mode="area")[0]
    low, high = small.aminmax()
    levels = ((small - low) / (high - low).clamp_min(1e-12)).expand(3, -1, -1).movedim(0, -1)
    colours, written = (255 * levels).round().to(torch.uint8).contiguous().numpy(), io.BytesIO()
    imsave(written, colours, format="png")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
