"""Scores of class probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Calibration:
    """Confidence and accuracy in bins of confidence; NaN where a bin is empty."""

    confidence: Tensor  # (bins,) mean confidence
    accuracy: Tensor  # (bins,) share of correct answers
    weight: Tensor  # (bins,) share of the predictions, summing to one


def nll(probs: Tensor, y: Tensor) -> float:
    """Return the mean negative log-probability of the labels.

    Args:
        probs: Class probabilities, (B, C).
        y: Labels, (B,).

    Raises:
        ValueError: The shapes do not fit.

    >>> round(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])), 4)
    0.4904
    """
    probs, y = _checked(probs, y)
    return float(-probs.gather(1, y.unsqueeze(1)).log().mean())


def accuracy(probs: Tensor, y: Tensor) -> float:
    """Return the share of inputs whose most probable class is the label.

    Args:
        probs: Class probabilities, (B, C).
        y: Labels, (B,).

    Raises:
        ValueError: The shapes do not fit.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    0.5
    """
    probs, y = _checked(probs, y)
    return float((probs.argmax(1) == y).double().mean())


def brier(probs: Tensor, y: Tensor) -> float:
    """Return the mean squared distance to the one-hot label, summed over classes: 0 at best, 2 at worst.

    Args:
        probs: Class probabilities, (B, C).
        y: Labels, (B,).

    Raises:
        ValueError: The shapes do not fit.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    0.5
    """
    probs, y = _checked(probs, y)
    right = probs.gather(1, y.unsqueeze(1)).squeeze(1)
    return float((probs.square().sum(1) - 2 * right + 1).mean())


def ece(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error of the most probable class (Guo et al. 2017).

    Args:
        probs: Class probabilities, (B, C).
        y: Labels, (B,).
        bins: Number of bins of equal width between 0 and 1.

    Raises:
        ValueError: The shapes do not fit.

    >>> round(ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1])), 4)
    0.4
    """
    probs, y = _checked(probs, y)
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
        ValueError: The shapes do not fit.

    >>> calibration(torch.tensor([0.2, 0.9, 0.8]), torch.tensor([False, True, False]), bins=2).accuracy
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    if confidence.shape != correct.shape or confidence.ndim != 1 or not len(confidence):
        raise ValueError(
            f"confidence has the shape {tuple(confidence.shape)}, correct {tuple(correct.shape)}; expected (B,) twice."
        )
    confidence, correct = confidence.detach().double(), correct.detach().double()
    inner = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    which = torch.bucketize(confidence, inner)
    counts = torch.bincount(which, minlength=bins).double()
    return Calibration(
        torch.bincount(which, confidence, minlength=bins) / counts,
        torch.bincount(which, correct, minlength=bins) / counts,
        counts / len(confidence),
    )


def _checked(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities in float64 and labels; raise unless they are (B, C) and (B,)."""
    if probs.ndim != 2 or y.shape != probs.shape[:1] or not len(y):
        raise ValueError(
            f"probabilities have the shape {tuple(probs.shape)}, labels {tuple(y.shape)}; expected (B, C) and (B,)."
        )
    return probs.detach().double(), y.detach().long()
