"""Scores of predictions, as functions of plain tensors: ``lw.metrics``.

Class probabilities: ``categorical_nll``, ``accuracy``, ``brier``, ``ece``, ``calibration``. Normal predictions and
intervals: ``normal_nll``, ``rmse``, ``crps``, ``coverage``, ``interval_width``. Detection of inputs from outside the
training distribution: ``auroc``. Nothing here knows a model or a posterior.

>>> rmse(torch.zeros(2), torch.tensor([3.0, 3.0]))
3.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.images import pixels
from lapwing.core.settings import INTEGER, TENSOR, require_integer, seen
from lapwing.errors import DataError

__all__ = [
    "categorical_nll", "accuracy", "brier", "ece", "calibration", "normal_nll", "rmse", "crps", "coverage",
    "interval_width", "auroc",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Calibration:
    """Confidence and accuracy in bins of confidence; NaN where a bin is empty."""

    confidence: Tensor  # (bins,) mean confidence
    accuracy: Tensor  # (bins,) share of correct answers
    weight: Tensor  # (bins,) share of the predictions, summing to one


def categorical_nll(probs: Tensor, y: Tensor, *, ignore_index: int = -100) -> float:
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
    probs, y = _checked_labels(probs, y, ignore_index)
    return float(-probs.gather(1, y.unsqueeze(1)).log().mean())


def accuracy(probs: Tensor, y: Tensor, *, ignore_index: int = -100) -> float:
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
    probs, y = _checked_labels(probs, y, ignore_index)
    return float((probs.argmax(1) == y).double().mean())


def brier(probs: Tensor, y: Tensor, *, ignore_index: int = -100) -> float:
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
    probs, y = _checked_labels(probs, y, ignore_index)
    right = probs.gather(1, y.unsqueeze(1)).squeeze(1)
    return float((probs.square().sum(1) - 2 * right + 1).mean())


def ece(probs: Tensor, y: Tensor, bins: int = 15, *, ignore_index: int = -100) -> float:
    """Return the expected calibration error of the most probable class (Guo et al. 2017).

    Args:
        probs: Class probabilities, (B, C), or (B, C, H, W) of images.
        y: Labels, (B,), or (B, H, W).
        bins: Number of bins of equal width between 0 and 1.
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.

    Raises:
        DataError: Shapes do not fit, rows are no probabilities, or a label is not one of the classes.

    >>> round(ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1])), 4)
    0.4
    """
    probs, y = _checked_labels(probs, y, ignore_index)
    confidence, guess = probs.max(1)
    binned = calibration(confidence, guess == y, bins)
    return float((binned.weight * (binned.accuracy - binned.confidence).abs()).nansum())


def calibration(confidence: Tensor, correct: Tensor, bins: int = 15) -> Calibration:
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
    confidence, correct = _checked(confidence=confidence, correct=correct)
    if confidence.ndim != 1 or not _within(confidence) or not bool(((correct == 0) | (correct == 1)).all()):
        raise DataError(
            f"confidence has the shape {tuple(confidence.shape)} and runs from {confidence.min():.3g} to "
            f"{confidence.max():.3g}; expected probabilities (B,), and correct True or False for each."
        )
    inner = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    which = torch.bucketize(confidence, inner)
    counts = torch.bincount(which, minlength=bins).double()
    return Calibration(
        torch.bincount(which, confidence, minlength=bins) / counts,
        torch.bincount(which, correct, minlength=bins) / counts,
        counts / len(confidence),
    )


def _within(probs: Tensor) -> bool:
    """Return whether all numbers are between 0 and 1, up to rounding."""
    return bool((probs >= -1e-6).all()) and bool((probs <= 1 + 1e-6).all())


def _checked_labels(probs: Tensor, y: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return probabilities (B, C) in float64 and labels (B,), without the ignored ones; raise if they do not fit.

    Those of images, (B, C, H, W) and (B, H, W), become those of their pixels.
    """
    INTEGER.check("ignore_index", ignore_index)
    TENSOR.check("probs", probs)
    TENSOR.check("y", y)
    if probs.ndim > 3 and y.shape == (*probs.shape[:1], *probs.shape[2:]):
        probs, y = pixels(probs).flatten(0, 1), y.flatten()
    if probs.ndim != 2 or y.shape != probs.shape[:1] or not len(y) or y.is_floating_point():
        raise DataError(
            f"probs is {seen(probs)}, y is {seen(y)}; expected probabilities (B, C) and whole class numbers (B,), or "
            "(B, C, H, W) and (B, H, W) of images."
        )
    probs, y = probs.detach().double(), y.detach().long().to(probs.device)
    if not _within(probs) or not bool(((probs.sum(1) - 1).abs() < 1e-3).all()):
        raise DataError("rows of probs do not sum to one; expected class probabilities. Take logits.softmax(-1).")
    probs, y = probs[y != ignore_index], y[y != ignore_index]
    if not len(y) or not 0 <= int(y.min()) <= int(y.max()) < probs.shape[1]:
        labels = f"labels run from {int(y.min())} to {int(y.max())}" if len(y) else "every label is ignored"
        raise DataError(f"{labels}; expected 0..{probs.shape[1] - 1}, or ignore_index={ignore_index} for some.")
    return probs, y


def normal_nll(mean: Tensor, std: Tensor, y: Tensor) -> float:
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
    mean, std, y = _checked_normal(mean, std, y)
    return float((0.5 * ((y - mean) / std).square() + std.log()).mean()) + 0.5 * math.log(2 * math.pi)


def rmse(mean: Tensor, y: Tensor) -> float:
    """Return the root mean squared error.

    Args:
        mean: Predicted means, of any shape.
        y: Targets, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> rmse(torch.zeros(2), torch.tensor([3.0, 3.0]))
    3.0
    """
    mean, y = _checked(mean=mean, y=y)
    return float((y - mean).square().mean().sqrt())


def crps(mean: Tensor, std: Tensor, y: Tensor) -> float:
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
    mean, std, y = _checked_normal(mean, std, y)
    z = (y - mean) / std
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return float((std * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))).mean())


def coverage(low: Tensor, high: Tensor, y: Tensor) -> float:
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
    low, high, y = _checked_ends(low=low, high=high, y=y)
    return float(((low <= y) & (y <= high)).double().mean())


def interval_width(low: Tensor, high: Tensor) -> float:
    """Return the mean width of the intervals.

    Args:
        low: Lower ends, of any shape.
        high: Upper ends, in the same shape.

    Raises:
        DataError: The shapes differ, or are empty.

    >>> interval_width(torch.zeros(2), torch.tensor([1.0, 3.0]))
    2.0
    """
    low, high = _checked_ends(low=low, high=high)
    return float((high - low).mean())


def _checked(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in float64; raise unless their shapes agree, since (B, 1) and (B,) broadcast to (B, B)."""
    for name, tensor in tensors.items():
        TENSOR.check(name, tensor)
    shapes = [tuple(t.shape) for t in tensors.values()]
    if len(set(shapes)) != 1 or not math.prod(shapes[0]):
        raise DataError(
            f"{', '.join(tensors)} have the shapes {', '.join(map(str, shapes))}; expected the same, with at least one "
            "entry. Reshape one of them."
        )
    return tuple(t.detach().double() for t in tensors.values())


def _checked_normal(mean: Tensor, std: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return mean, standard deviation and targets; raise if a standard deviation is not positive."""
    mean, std, y = _checked(mean=mean, std=std, y=y)
    if not bool((std > 0).all()):
        raise DataError(f"std is as low as {std.min():.3g}; expected positive numbers. Is it a variance, or the mean?")
    return mean, std, y


def _checked_ends(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the ends of intervals, and targets; raise if a lower end is above its upper end."""
    low, high, *y = _checked(**tensors)
    if not bool((low <= high).all()):
        raise DataError(f"low is above high in {int((low > high).sum())} intervals; expected (low, high), in order.")
    return low, high, *y


def auroc(inside: Tensor, outside: Tensor) -> float:
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
    TENSOR.check("inside", inside)
    TENSOR.check("outside", outside)
    if inside.ndim != 1 or outside.ndim != 1 or not len(inside) or not len(outside):
        raise DataError(f"scores have the shapes {tuple(inside.shape)} and {tuple(outside.shape)}; expected (B,).")
    scores = torch.cat([inside.detach().double(), outside.detach().double()])
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    midranks = counts.cumsum(0).double() - 0.5 * (counts.double() - 1)
    above = midranks[place[len(inside) :]].sum() - 0.5 * len(outside) * (len(outside) + 1)
    return float(above / (len(inside) * len(outside)))
