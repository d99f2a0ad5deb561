"""How well a score tells inputs of another kind from those trained on: tensors in, numbers out."""

from __future__ import annotations

import torch
from torch import Tensor


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The probability that a score from outside the distribution is higher than one from inside.

    A tie counts half, by midranks. One at best, one half for a score that says nothing.

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
