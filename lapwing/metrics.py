"""Scores of predictions, as functions of plain tensors and NumPy arrays: ``lw.metrics``.

Class probabilities: ``categorical_nll``, ``accuracy``, ``brier``, ``ece``, ``adaptive_ece``, ``classwise_ece``,
``calibration``. Numbers: ``normal_nll``, ``rmse``, ``mae``, ``crps``, ``crps_samples``. Intervals and quantiles:
``coverage``, ``interval_width``, ``pit``, ``pit_samples``, ``cqm``. Detection of inputs from outside the training
distribution: ``auroc``, ``aupr``, ``fpr95``. Abstaining: ``risk_coverage``, ``aurc``. Labels of several inputs
together: ``joint_log_likelihood``. The uncertainty of any score: ``bootstrap``. Nothing here knows a model or a
posterior.

>>> import torch
>>> rmse(torch.zeros(2), torch.tensor([3.0, 3.0]))
3.0

Scores of class probabilities: (B, C) with labels (B,), or images (B, C, H, W) with (B, H, W).

Calibration errors also take binary labels: probabilities of one, with zeros and ones in the same shape.

Scores of detection: whether inputs from outside the training distribution have higher scores than others.

The inputs from outside are the positive class. For the other convention, exchange the two and change the signs:
``fpr95(-outside, -inside)``.

Scores of the labels of several inputs together, from class probabilities under draws of the function.

One draw gives independent labels; that all labels share the draw makes them depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import DataError
from lapwing.runtime.settings import FLAG, FUNCTION, GENERATOR, PROBABILITY, Rule, integer, refuse_other_calls
from lapwing.runtime.threads import independent_generator, uniform
from lapwing.values import arrays
from lapwing.values.arrays import Values

__all__ = [
    "categorical_nll", "accuracy", "brier", "ece", "adaptive_ece", "classwise_ece", "calibration", "normal_nll",
    "rmse", "mae", "crps", "crps_samples", "coverage", "interval_width", "pit", "pit_samples", "cqm", "auroc", "aupr",
    "fpr95", "risk_coverage", "aurc", "joint_log_likelihood", "bootstrap",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Calibration:
    """Confidence and accuracy in bins of confidence; NaN where a bin is empty."""

    confidence: Tensor  # (bins,) mean confidence
    accuracy: Tensor  # (bins,) share of correct answers
    weight: Tensor  # (bins,) share of the predictions, summing to one


def categorical_nll(probs: Values, y: Values, *, ignore_index: int = -100) -> float:
    """Return the mean negative log-probability of the labels.

    Args:
        probs: Class probabilities, (B, C), or (B, C, H, W) of images.
        y: Labels, (B,), or (B, H, W).
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.

    Raises:
        DataError: Shapes do not fit, rows are not probabilities, or a label is not one of the classes.

    >>> round(categorical_nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])), 4)
    0.4904
    """
    probs, y = arrays.labels(probs, y, ignore_index)
    return float(-probs.gather(1, y.unsqueeze(1)).log().mean())


def accuracy(probs: Values, y: Values, *, ignore_index: int = -100) -> float:
    """Return the share of inputs whose most probable class is the label.

    Args:
        probs: Class probabilities, (B, C), or (B, C, H, W) of images.
        y: Labels, (B,), or (B, H, W).
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.

    Raises:
        DataError: Shapes do not fit, rows are not probabilities, or a label is not one of the classes.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    0.5
    """
    probs, y = arrays.labels(probs, y, ignore_index)
    return float((probs.argmax(1) == y).double().mean())


def brier(probs: Values, y: Values, *, ignore_index: int = -100) -> float:
    """Return the mean squared distance to the one-hot label, summed over classes: 0 at best, 2 at worst.

    Args:
        probs: Class probabilities, (B, C), or (B, C, H, W) of images.
        y: Labels, (B,), or (B, H, W).
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.

    Raises:
        DataError: Shapes do not fit, rows are not probabilities, or a label is not one of the classes.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    0.5
    """
    probs, y = arrays.labels(probs, y, ignore_index)
    right = probs.gather(1, y.unsqueeze(1)).squeeze(1)
    return float((probs.square().sum(1) - 2 * right + 1).mean())


def ece(probs: Values, y: Values, bins: int = 15, *, ignore_index: int = -100) -> float:
    """Return the expected calibration error of the most probable class (Guo et al. 2017), or of binary labels.

    That of binary labels compares the probability of one with the frequency of ones, so that it sees a bias: a rare
    label whose probability is too high, and still below one half, is guessed right. See ``classwise_ece`` for classes.

    Args:
        probs: Class probabilities, (B, C), or (B, C, H, W) of images; or the probabilities of one of binary labels,
            (B,) or (B, L).
        y: Labels, (B,), or (B, H, W); of binary labels zeros and ones in the shape of ``probs``.
        bins: Number of bins of equal width between 0 and 1.
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.

    Raises:
        DataError: Shapes do not fit, rows are not probabilities, or a label is not one of the classes.

    >>> round(ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1])), 4)
    0.4
    >>> round(ece(torch.tensor([0.25, 0.25, 0.25, 0.25]), torch.tensor([0, 0, 0, 0])), 4)
    0.25
    """
    return _binned_error(*_stated_and_true(probs, y, ignore_index), bins)


def classwise_ece(probs: Values, y: Values, bins: int = 15, *, ignore_index: int = -100) -> float:
    """Return the calibration error of the probability of each class by itself, averaged over classes.

    The probability of a class is compared with how often it is the label, in bins of that probability (Kull et al.
    2019). The error of the most probable class alone does not see that a class is predicted too often.

    Args:
        probs: Class probabilities, (B, C), or (B, C, H, W) of images; or the probabilities of one of binary labels,
            (B,) or (B, L).
        y: Labels, (B,), or (B, H, W); of binary labels zeros and ones in the shape of ``probs``.
        bins: Number of bins of equal width between 0 and 1.
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.

    Raises:
        DataError: Shapes do not fit, rows are not probabilities, or a label is not one of the classes.

    >>> round(classwise_ece(torch.tensor([[0.6, 0.4], [0.6, 0.4]]), torch.tensor([0, 0])), 4)
    0.4
    """
    binary = arrays.binary_labels(probs, y, ignore_index)
    if binary is None:
        probs, y = arrays.labels(probs, y, ignore_index)
        errors = [_binned_error(each, y == number, bins) for number, each in enumerate(probs.unbind(1))]
    else:
        columns = zip(*(part.unbind(1) for part in binary), strict=True)
        errors = [_binned_error(each[known], one[known], bins) for each, one, known in columns if bool(known.any())]
    return sum(errors) / len(errors)


def _stated_and_true(probs: Values, y: Values, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return stated probabilities (M,) and what came true: of the most probable class, or of binary labels."""
    binary = arrays.binary_labels(probs, y, ignore_index)
    if binary is not None:
        stated, true, known = binary
        return stated[known], true[known]
    probs, y = arrays.labels(probs, y, ignore_index)
    confidence, guess = probs.max(1)
    return confidence, (guess == y).double()


def _binned_error(stated: Tensor, true: Tensor, bins: int) -> float:
    """Return the mean distance of stated probabilities from what came true, in bins of equal width."""
    binned = calibration(stated.clamp(0, 1), true, bins)
    return float((binned.weight * (binned.accuracy - binned.confidence).abs()).nansum())


def adaptive_ece(probs: Values, y: Values, bins: int = 15, *, ignore_index: int = -100) -> float:
    """Return the calibration error of the most probable class, or of binary labels, in bins of equal counts.

    The predictions in the order of their confidence are cut into bins whose sizes differ by one at most, so that no
    bin is nearly empty (Nguyen and O'Connor 2015). Predictions of equal confidence count as their mean.

    Args:
        probs: Class probabilities, (B, C), or (B, C, H, W) of images; or those of one of binary labels, as for ``ece``.
        y: Labels, (B,), or (B, H, W); of binary labels zeros and ones in the shape of ``probs``.
        bins: Number of bins; with fewer predictions than that, each has its own.
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.

    Raises:
        DataError: Shapes do not fit, rows are not probabilities, or a label is not one of the classes.

    >>> round(adaptive_ece(torch.tensor([[0.9, 0.1], [0.7, 0.3]]), torch.tensor([0, 1]), bins=2), 4)
    0.4
    """
    integer().check("bins", bins)
    stated, true = _stated_and_true(probs, y, ignore_index)
    gap = arrays.mean_of_ties(stated, true) - stated
    parts = gap[stated.argsort()].tensor_split(min(bins, len(gap)))
    return float(torch.stack([part.sum().abs() for part in parts]).sum() / len(gap))


def calibration(confidence: Values, correct: Values, bins: int = 15) -> Calibration:
    """Return the numbers of a reliability diagram.

    Args:
        confidence: Probabilities of the predicted answers, (B,).
        correct: Whether each answer is right, (B,).
        bins: Number of bins; bin i has the confidences in (i/bins, (i + 1)/bins].

    Returns:
        Mean confidence, accuracy and share of the predictions of each bin.

    Raises:
        DataError: The shapes do not fit.

    >>> calibration(torch.tensor([0.2, 0.9, 0.8]), torch.tensor([False, True, False]), bins=2).accuracy
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    integer().check("bins", bins)
    confidence, correct = arrays.same_shape(confidence=confidence, correct=correct)
    if confidence.ndim != 1 or not arrays.within_one(confidence) or not bool(((correct == 0) | (correct == 1)).all()):
        raise DataError(
            f"confidence has the shape {tuple(confidence.shape)} and runs from {confidence.min():.3g} to "
            f"{confidence.max():.3g}; expected probabilities (B,), and correct True or False for each."
        )
    inner = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    which = torch.bucketize(confidence.contiguous(), inner)
    counts = torch.bincount(which, minlength=bins).double()
    return Calibration(
        torch.bincount(which, confidence, minlength=bins) / counts,
        torch.bincount(which, correct, minlength=bins) / counts,
        counts / len(confidence),
    )


def auroc(inside: Values, outside: Values) -> float:
    """Return the probability that a score from outside the distribution is higher than one from inside.

    Ties count half. It is 1 at best, and ½ for a score that says nothing.

    Args:
        inside: Scores of inputs from the training distribution, (B,).
        outside: Scores of other inputs, (B',).

    Raises:
        DataError: The scores are empty, not (B,), or NaN.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9]))
    0.875
    """
    scores, count = _rank_scores(inside, outside)
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    midranks = counts.cumsum(0).double() - 0.5 * (counts.double() - 1)
    n_outside = len(scores) - count
    above = midranks[place[count:]].sum() - 0.5 * n_outside * (n_outside + 1)
    return float(above / (count * n_outside))


def aupr(inside: Values, outside: Values) -> float:
    """Return the area under the precision-recall curve, as the average precision over the inputs from outside.

    The precision at a threshold is the share of inputs from outside among those that reach it. It is 1 at best, and
    the share of inputs from outside for a score that says nothing.

    Args:
        inside: Scores of inputs from the training distribution, (B,).
        outside: Scores of other inputs, (B',).

    Raises:
        DataError: The scores are empty, not (B,), or NaN.

    >>> round(aupr(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9])), 4)
    0.8333
    """
    scores, count = _rank_scores(inside, outside)
    _, place = scores.unique(return_inverse=True)
    size = int(place.max()) + 1
    hits = torch.bincount(place[count:], minlength=size).flip(0)  # at each threshold, the highest first
    reached = torch.bincount(place, minlength=size).flip(0).cumsum(0)
    precision = hits.cumsum(0).double() / reached.double()
    return float((precision * hits).sum() / (len(scores) - count))


def fpr95(inside: Values, outside: Values) -> float:
    """Return the share of inputs from inside that reach the threshold at which 95 % of those from outside are found.

    It is 0 at best. The threshold is the highest one that at least 95 % of the scores from outside reach.

    Args:
        inside: Scores of inputs from the training distribution, (B,).
        outside: Scores of other inputs, (B',).

    Raises:
        DataError: The scores are empty, not (B,), or NaN.

    >>> fpr95(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.3, 0.9]))
    0.5
    """
    scores, count = _rank_scores(inside, outside)
    needed = -(-19 * (len(scores) - count) // 20)  # 95 %, rounded up, in whole numbers
    threshold = scores[count:].sort(descending=True).values[needed - 1]
    return float((scores[:count] >= threshold).double().mean())


def _rank_scores(inside: Values, outside: Values) -> tuple[Tensor, int]:
    """Return all scores in float64, those from inside first, and their number; raise unless both are (B,)."""
    inside, outside = arrays.numbers("inside", inside), arrays.numbers("outside", outside)
    if inside.ndim != 1 or outside.ndim != 1 or not len(inside) or not len(outside):
        raise DataError(f"scores have the shapes {tuple(inside.shape)} and {tuple(outside.shape)}; expected (B,).")
    return torch.cat([inside.double(), outside.double().to(inside.device)]), len(inside)


SCORE = Rule("a finite number", lambda v: math.isfinite(v) and not isinstance(v, bool), DataError)
LEVELS = Rule("a list of probabilities between 0 and 1", lambda v: len(v) and all(0 < a < 1 for a in v), DataError)


def coverage(low: Values, high: Values, y: Values) -> float:
    """Return the share of targets inside [low, high].

    Args:
        low: Lower ends, of any shape.
        high: Upper ends, in the same shape.
        y: Targets, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> coverage(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 2.0]))
    0.5
    """
    low, high, y = _ends(low=low, high=high, y=y)
    return float(((low <= y) & (y <= high)).double().mean())


def interval_width(low: Values, high: Values) -> float:
    """Return the mean width of the intervals.

    Args:
        low: Lower ends, of any shape.
        high: Upper ends, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> interval_width(torch.zeros(2), torch.tensor([1.0, 3.0]))
    2.0
    """
    low, high = _ends(low=low, high=high)
    return float((high - low).mean())


def pit(mean: Values, std: Values, y: Values) -> Tensor:
    """Return the probability that N(mean, std²) gives to values below y (PIT): uniform in [0, 1], if calibrated.

    ``predictive.cdf(y)`` returns the same for every predictive of numbers.

    Args:
        mean: Predicted means, of any shape.
        std: Predicted standard deviations, in the shape of the mean.
        y: Targets, in the same shape.

    Returns:
        Probabilities in the shape of y, in float64.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> pit(torch.zeros(2), torch.ones(2), torch.tensor([0.0, 9.0]))
    tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    mean, std, y = arrays.normal(mean, std, y)
    return torch.special.ndtr((y - mean) / std)


def pit_samples(samples: Values, y: Values) -> Tensor:
    """Return the PIT values of draws: (r + ½) / (S + 1), if r of the S draws are below y. Ties count half.

    If calibrated, y has every rank among the draws with equal probability.

    Args:
        samples: Draws of the targets, noise included, (S, ...).
        y: Targets, (...).

    Returns:
        Probabilities in the shape of y, in float64.

    Raises:
        DataError: Shapes do not fit, or numbers are not finite.

    >>> pit_samples(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([2.0]))
    tensor([0.6250], dtype=torch.float64)
    """
    samples, y = arrays.draws(samples, y)
    rank = (samples < y).sum(0).double() + 0.5 * (samples == y).sum(0)
    return (rank + 0.5) / (len(samples) + 1)


def cqm(pit_values: Values, levels: Sequence[float] | None = None) -> float:
    """Return the centred quantile metric: the mean over levels of |coverage of central intervals - level|.

    A target is inside the central interval of level a if its PIT value u has |2u - 1| ≤ a. It is 0 if all coverages
    are right, and ½ at worst. The side is not counted: it can be 0 if all targets are above the mean.

    Reference: Ortega et al. 2024 (VaLLA).

    Args:
        pit_values: From ``pit``, ``pit_samples`` or ``predictive.cdf(y)``, of any shape.
        levels: Probabilities of the intervals. By default the mean over all levels from 0 to 1, the exact integral.

    Raises:
        DataError: Values or levels are not probabilities.

    >>> round(cqm(torch.tensor([0.5, 0.5]), levels=[0.5, 0.9]), 4)
    0.3
    >>> round(cqm(torch.tensor([0.5, 0.5])), 4)
    0.5
    """
    (probs,) = arrays.same_shape(pit_values=pit_values)
    if not arrays.within_one(probs):
        raise DataError(f"pit_values run from {probs.min():.3g} to {probs.max():.3g}; expected probabilities.")
    reached = (2 * probs.flatten() - 1).abs().clamp(0, 1).sort().values  # the smallest level that includes each
    if levels is not None:
        LEVELS.check("levels", levels)
        given = torch.tensor([float(level) for level in levels], dtype=reached.dtype, device=reached.device)
        return float((torch.bucketize(given, reached, right=True).double() / len(reached) - given).abs().mean())
    # Between two neighbours a < b the coverage is constant, c, and ∫ |t - c| dt = ½ (t - c) |t - c| from a to b.
    ends = torch.cat([reached.new_zeros(1), reached, reached.new_ones(1)])
    share = torch.arange(len(ends) - 1, dtype=ends.dtype, device=ends.device) / len(reached)
    integral = lambda t: 0.5 * (t - share) * (t - share).abs()
    return float((integral(ends[1:]) - integral(ends[:-1])).sum())


def _ends(**values: Values) -> tuple[Tensor, ...]:
    """Return the ends of intervals, and targets; raise if a lower end is above its upper end."""
    low, high, *y = arrays.same_shape(**values)
    if not bool((low <= high).all()):
        raise DataError(f"low is above high in {int((low > high).sum())} intervals; expected (low, high), in order.")
    return low, high, *y


def joint_log_likelihood(probs: Values, y: Values, *, ignore_index: int = -100) -> float:
    """Return the log-probability of all labels together: log of the mean over draws of the product over inputs.

    Args:
        probs: Class probabilities under each draw, (S, B, C), or (S, B, C, H, W) of images; for a posterior
            ``posterior.function_samples(x, S).softmax(-1)``.
        y: Labels, (B,), or (B, H, W).
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.

    Raises:
        DataError: Shapes do not fit, rows are not probabilities, or a label is not one of the classes.

    >>> draws = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    >>> round(joint_log_likelihood(draws, torch.tensor([1, 1])), 4)  # not 2 log ½: the labels are the same
    -0.6931
    """
    probs, y = arrays.numbers("probs", probs), arrays.numbers("y", y)
    if probs.ndim != y.ndim + 2 or probs.shape[1:2] != y.shape[:1] or not len(probs):
        raise DataError(
            f"probs has the shape {tuple(probs.shape)}, y has {tuple(y.shape)}; expected (S, B, C) under S draws, and "
            "(B,). Probabilities without draws are probs.unsqueeze(0)."
        )
    flat, repeated = arrays.labels(probs.flatten(0, 1), y.repeat(len(probs), *[1] * (y.ndim - 1)), ignore_index)
    right = flat.gather(1, repeated.unsqueeze(1)).reshape(len(probs), -1)
    return float(right.log().sum(1).logsumexp(0)) - math.log(len(right))


def normal_nll(mean: Values, std: Values, y: Values) -> float:
    """Return the mean negative log-density of y under N(mean, std²).

    Args:
        mean: Predicted means, of any shape.
        std: Predicted standard deviations, in the shape of the mean.
        y: Targets, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> round(normal_nll(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
    0.9189
    """
    mean, std, y = arrays.normal(mean, std, y)
    return float((0.5 * ((y - mean) / std).square() + std.log()).mean()) + 0.5 * math.log(2 * math.pi)


def rmse(mean: Values, y: Values) -> float:
    """Return the root mean squared error.

    Args:
        mean: Predicted means, of any shape.
        y: Targets, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> rmse(torch.zeros(2), torch.tensor([3.0, 3.0]))
    3.0
    """
    mean, y = arrays.same_shape(mean=mean, y=y)
    return float((y - mean).square().mean().sqrt())


def mae(mean: Values, y: Values) -> float:
    """Return the mean absolute error.

    Args:
        mean: Predicted means or medians, of any shape.
        y: Targets, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> mae(torch.zeros(2), torch.tensor([3.0, -1.0]))
    2.0
    """
    mean, y = arrays.same_shape(mean=mean, y=y)
    return float((y - mean).abs().mean())


def crps(mean: Values, std: Values, y: Values) -> float:
    """Return the mean continuous ranked probability score of N(mean, std²), in the units of y.

    Reference: Gneiting et al. 2005, eq. 5.

    Args:
        mean: Predicted means, of any shape.
        std: Predicted standard deviations, in the shape of the mean.
        y: Targets, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> round(crps(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
    0.2337
    """
    mean, std, y = arrays.normal(mean, std, y)
    z = (y - mean) / std
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return float((std * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))).mean())


def crps_samples(samples: Values, y: Values, *, fair: bool = False) -> float:
    """Return the mean continuous ranked probability score of draws, in the units of y: E|x - y| - ½ E|x - x'|.

    By default it is the score of the draws themselves, as a distribution with S steps. A few draws of a good
    distribution score worse than the distribution; ``fair=True`` removes this bias by leaving out the pairs of a draw
    with itself (Ferro 2014).

    Args:
        samples: Draws of the targets, noise included, (S, ...).
        y: Targets, (...).
        fair: Whether to estimate the score of the distribution that the draws come from. Needs two draws.

    Raises:
        DataError: Shapes do not fit, or numbers are not finite.

    >>> round(crps_samples(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([2.0])), 4)
    0.8889
    """
    FLAG.check("fair", fair)
    samples, y = arrays.draws(samples, y)
    count = len(samples)
    if fair and count < 2:
        raise DataError("samples holds one draw; expected at least two with fair=True.")
    errors = (samples - y).sort(0).values  # without y, so that a common offset of all does not round away
    weights = 2 * torch.arange(count, dtype=errors.dtype, device=errors.device) - (count - 1)
    spread = torch.tensordot(weights, errors, 1) / (count * (count - 1 if fair else count))  # ½ E|x - x'|
    return float((errors.abs().mean(0) - spread).mean())


@dataclass(frozen=True)
class ScoreInterval:
    """A score of all data, and what resampled data say about its uncertainty."""

    value: float  # of all data
    low: float  # ends of the percentile interval
    high: float
    std: float  # standard error


def bootstrap(
    metric: Callable[..., float],
    *data: Values,
    level: float = 0.95,
    resamples: int = 1000,
    paired: bool = True,
    generator: torch.Generator | None = None,
) -> ScoreInterval:
    """Return a score with a percentile interval from data that are drawn again with replacement.

    Args:
        metric: Called with ``data``, then with tensors of as many rows that are drawn from them; returns a number.
        data: Tensors or arrays whose first dimension counts the data.
        level: The probability of the interval.
        resamples: How often data are drawn.
        paired: Whether row i of every tensor belongs to the same datum, so that rows are drawn together. False draws
            from each tensor by itself, as for scores from inside and outside.
        generator: For the rows; a fixed seed by default.

    Returns:
        The score of all data, the ends of the interval, and the standard error.

    Raises:
        DataError: Data are empty or of unequal lengths, or a score is not a finite number.

    >>> y = torch.arange(100.0)
    >>> score = bootstrap(lambda y: float(y.mean()), y)
    >>> score.value, 40 < score.low < score.value < score.high < 60
    (49.5, True)
    """
    FUNCTION.check("metric", metric)
    PROBABILITY.check("level", level)
    integer(2).check("resamples", resamples)
    FLAG.check("paired", paired)
    GENERATOR.check("generator", generator)
    tensors = _rows(data, paired)
    value, stream = _score(metric, tensors), independent_generator(generator)
    scores = torch.empty(resamples, dtype=torch.float64)
    for i in range(resamples):
        drawn = _resample_rows(tensors[:1], stream) * len(tensors) if paired else _resample_rows(tensors, stream)
        scores[i] = _score(metric, [t[rows.to(t.device)] for t, rows in zip(tensors, drawn, strict=True)])
    tail = 0.5 - 0.5 * level
    low, high = scores.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return ScoreInterval(value, low, high, float(scores.std()))


def _rows(data: tuple[Values, ...], paired: bool) -> list[Tensor]:
    """Return the data as tensors; raise unless they have rows, and equally many if they are paired."""
    tensors = [arrays.numbers(f"data {i}", value) for i, value in enumerate(data)]
    if not tensors or any(not t.ndim or not len(t) for t in tensors):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors) or "none"
        raise DataError(f"data have the shapes {shapes}; expected one or more tensors (B, ...) that are not empty.")
    lengths = [len(t) for t in tensors]
    if paired and len(set(lengths)) > 1:
        raise DataError(
            f"data have {', '.join(map(str, lengths))} rows; expected equally many. Use paired=False if they are not "
            "about the same inputs, or draw rows by a metric of torch.arange(B)."
        )
    return tensors


def _resample_rows(tensors: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return row numbers for each tensor, drawn with replacement on the device of the generator."""
    like = torch.empty(0, dtype=torch.float64, device=generator.device)
    return [(uniform((len(t),), generator, like) * len(t)).long() for t in tensors]


def _score(metric: Callable[..., float], tensors: list[Tensor]) -> float:
    """Return the score of these data; raise unless it is a finite number."""
    score = metric(*tensors)
    SCORE.check("the metric of all or of resampled data", score)
    return float(score)


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The curve of risk against coverage, from the most certain input alone to all inputs."""

    coverage: Tensor  # (B,) share of inputs that are kept, 1/B to 1
    risk: Tensor  # (B,) mean loss of those


def risk_coverage(uncertainty: Values, loss: Values) -> RiskCoverage:
    """Return the mean loss of the k most certain inputs, for every k.

    Inputs of equal uncertainty count as their mean, so that their order has no effect.

    Args:
        uncertainty: A number for each input, higher if less certain, (B,): 1 - probs.amax(1), an entropy, a variance.
        loss: The loss of each input, (B,): whether the answer is wrong, or a squared error.

    Returns:
        Coverages and risks, each (B,).

    Raises:
        DataError: The shapes are not (B,), or differ.

    >>> risk_coverage(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0, 1, 0])).risk
    tensor([0.0000, 0.0000, 0.3333], dtype=torch.float64)
    """
    uncertainty, loss = arrays.vectors(uncertainty=uncertainty, loss=loss)
    kept = torch.arange(1, len(loss) + 1, dtype=loss.dtype, device=loss.device)
    ordered = arrays.mean_of_ties(uncertainty, loss)[uncertainty.argsort()]
    return RiskCoverage(kept / len(loss), ordered.cumsum(0) / kept)


def aurc(uncertainty: Values, loss: Values) -> float:
    """Return the area under the risk-coverage curve (AURC): the mean of its risks (Geifman et al. 2019).

    An uncertainty that says nothing has the mean loss; lower is better.

    Args:
        uncertainty: A number for each input, higher if less certain, (B,).
        loss: The loss of each input, (B,).

    Raises:
        DataError: The shapes are not (B,), or differ.

    >>> round(aurc(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0, 1, 0])), 4)
    0.1111
    """
    return float(risk_coverage(uncertainty, loss).risk.mean())


refuse_other_calls(globals())
