"""Scores for the detection of inputs from outside the training distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the probability that a score from outside the distribution is higher than one from inside.

    Ties count half. It is 1 at best, and ½ for a score that says nothing.

    Args:
        inside: Scores of inputs from the training distribution, (B,).
        outside: Scores of other inputs, (B',).

    Raises:
        ValueError: The scores are empty, not (B,), or NaN.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9]))
    0.875
    """
    if inside.ndim != 1 or outside.ndim != 1 or not len(inside) or not len(outside):
        raise ValueError(f"scores have the shapes {tuple(inside.shape)} and {tuple(outside.shape)}; expected (B,).")
    scores = torch.cat([inside.detach().double(), outside.detach().double()])
    if bool(scores.isnan().any()):
        raise ValueError("a score is NaN; expected numbers that can be ordered.")
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    midranks = counts.cumsum(0).double() - 0.5 * (counts.double() - 1)
    above = midranks[place[len(inside) :]].sum() - 0.5 * len(outside) * (len(outside) + 1)
    return float(above / (len(inside) * len(outside)))
