"""Weighted sums of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def weighted_sum(tensors: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return Σ_c weights_c tensors_c, differentiable in the weights. Memory: one tensor more."""
    weights = weights.to(tensors[0])
    total = weights[0] * tensors[0]
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        total.addcmul_(weight, tensor)
    return total
