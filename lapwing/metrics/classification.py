"""Scores of class probabilities: (B, C) with labels (B,), or images (B, C, H, W) with (B, H, W).

Calibration errors also take binary labels: probabilities of one, with zeros and ones in the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.settings import require_integer
from lapwing.errors import DataError
from lapwing.metrics.arrays import Values, binary_labels, labels, mean_of_ties, same_shape, within_one


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
        DataError: Shapes do not fit, rows are no probabilities, or a label is not one of the classes.

    >>> round(categorical_nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])), 4)
    0.4904
    """
    probs, y = labels(probs, y, ignore_index)
    return float(-probs.gather(1, y.unsqueeze(1)).log().mean())


def accuracy(probs: Values, y: Values, *, ignore_index: int = -100) -> float:
    """Return the share of inputs whose most probable class is the label.

    Args:
        probs: Class probabilities, (B, C), or (B, C, H, W) of images.
        y: Labels, (B,), or (B, H, W).
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.

    Raises:
        DataError: Shapes do not fit, rows are no probabilities, or a label is not one of the classes.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    0.5
    """
    probs, y = labels(probs, y, ignore_index)
    return float((probs.argmax(1) == y).double().mean())


def brier(probs: Values, y: Values, *, ignore_index: int = -100) -> float:
    """Return the mean squared distance to the one-hot label, summed over classes: 0 at best, 2 at worst.

    Args:
        probs: Class probabilities, (B, C), or (B, C, H, W) of images.
        y: Labels, (B,), or (B, H, W).
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.

    Raises:
        DataError: Shapes do not fit, rows are no probabilities, or a label is not one of the classes.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    0.5
    """
    probs, y = labels(probs, y, ignore_index)
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
        DataError: Shapes do not fit, rows are no probabilities, or a label is not one of the classes.

    >>> round(ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1])), 4)
    0.4
    >>> round(ece(torch.tensor([0.25, 0.25, 0.25, 0.25]), torch.tensor([0, 0, 0, 0])), 4)
    0.25
    """
    return _binned_error(*_stated(probs, y, ignore_index), bins)


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
        DataError: Shapes do not fit, rows are no probabilities, or a label is not one of the classes.

    >>> round(classwise_ece(torch.tensor([[0.6, 0.4], [0.6, 0.4]]), torch.tensor([0, 0])), 4)
    0.4
    """
    binary = binary_labels(probs, y, ignore_index)
    if binary is None:
        probs, y = labels(probs, y, ignore_index)
        errors = [_binned_error(each, y == number, bins) for number, each in enumerate(probs.unbind(1))]
    else:
        columns = zip(*(part.unbind(1) for part in binary), strict=True)
        errors = [_binned_error(each[known], one[known], bins) for each, one, known in columns if bool(known.any())]
    return sum(errors) / len(errors)


def _stated(probs: Values, y: Values, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return stated probabilities (M,) and what came true: of the most probable class, or of binary labels."""
    binary = binary_labels(probs, y, ignore_index)
    if binary is not None:
        stated, true, known = binary
        return stated[known], true[known]
    probs, y = labels(probs, y, ignore_index)
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
        DataError: Shapes do not fit, rows are no probabilities, or a label is not one of the classes.

    >>> round(adaptive_ece(torch.tensor([[0.9, 0.1], [0.7, 0.3]]), torch.tensor([0, 1]), bins=2), 4)
    0.4
    """
    require_integer("bins", bins)
    stated, true = _stated(probs, y, ignore_index)
    gap = mean_of_ties(stated, true) - stated
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
    require_integer("bins", bins)
    confidence, correct = same_shape(confidence=confidence, correct=correct)
    if confidence.ndim != 1 or not within_one(confidence) or not bool(((correct == 0) | (correct == 1)).all()):
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
