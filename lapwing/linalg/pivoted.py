"""Greedy choice of the rows of a kernel matrix that explain the others best."""

from __future__ import annotations

import torch
from torch import Tensor


def greedy_pivots(kernel: Tensor, count: int, cut: float = 1e-12) -> Tensor:
    """Return at most ``count`` row numbers, each with the largest variance given those before it.

    This is a pivoted Cholesky factorisation, N count² operations. It ends early if all remaining variances are below
    ``cut`` times the largest entry of the diagonal.

    >>> greedy_pivots(torch.tensor([[1.0, 0.9, 0.0], [0.9, 2.0, 0.0], [0.0, 0.0, 1.5]]), 2).tolist()
    [1, 2]
    """
    remaining = kernel.diagonal().double().clone()
    rows = remaining.new_zeros(min(count, len(remaining)), len(remaining))
    floor, chosen = cut * float(remaining.max()), []
    for i in range(len(rows)):
        pivot = int(remaining.argmax())
        if float(remaining[pivot]) <= floor:
            break
        row = (kernel[pivot].double() - rows[:i, pivot] @ rows[:i]) / remaining[pivot].sqrt()
        rows[i] = row
        remaining = (remaining - row.square()).clamp_min(0)
        remaining[pivot] = 0
        chosen.append(pivot)
    return torch.tensor(chosen, dtype=torch.long, device=kernel.device)


def trace_pivots(kernel: Tensor, count: int, cut: float = 1e-12) -> Tensor:
    """Return at most ``count`` row numbers, each of which reduces the sum of all remaining variances most.

    Each step updates the whole matrix: N² count operations.

    >>> trace_pivots(torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.5]]), 1).tolist()
    [0]
    """
    remaining = kernel.double().clone()
    floor, chosen = cut * float(remaining.diagonal().max()), []
    for _ in range(min(count, len(remaining))):
        variance = remaining.diagonal()
        squares = torch.linalg.vector_norm(remaining, dim=0).square()
        gain = torch.where(variance > floor, squares / variance.clamp_min(floor), -1.0)
        pivot = int(gain.argmax())
        if float(gain[pivot]) <= 0:
            break
        row = remaining[pivot].clone()
        remaining.addr_(row, row, alpha=-1 / float(row[pivot]))
        chosen.append(pivot)
    return torch.tensor(chosen, dtype=torch.long, device=kernel.device)
