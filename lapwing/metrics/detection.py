"""Scores of detection: whether inputs from outside the training distribution have higher scores than others.

The inputs from outside are the positive class. For the other convention, exchange the two and change the signs:
``fpr95(-outside, -inside)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.errors import DataError
from lapwing.metrics.arrays import Values, numbers


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
    scores, count = _pooled(inside, outside)
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
    scores, count = _pooled(inside, outside)
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
    scores, count = _pooled(inside, outside)
    needed = -(-19 * (len(scores) - count) // 20)  # 95 %, rounded up, in whole numbers
    threshold = scores[count:].sort(descending=True).values[needed - 1]
    return float((scores[:count] >= threshold).double().mean())


def _pooled(inside: Values, outside: Values) -> tuple[Tensor, int]:
    """Return all scores in float64, those from inside first, and their number; raise unless both are (B,)."""
    inside, outside = numbers("inside", inside), numbers("outside", outside)
    if inside.ndim != 1 or outside.ndim != 1 or not len(inside) or not len(outside):
        raise DataError(f"scores have the shapes {tuple(inside.shape)} and {tuple(outside.shape)}; expected (B,).")
    return torch.cat([inside.double(), outside.double().to(inside.device)]), len(inside)
