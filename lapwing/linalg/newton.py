"""Where a minimum lies, and where it goes when it is pushed: Newton steps with one Hessian for all rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = Callable[[Tensor], Tensor]  # (K, P) -> (K, P)


@dataclass(frozen=True, eq=False)
class Pushed:
    """d (K, P) with ∇U(d_k) = λ_k ∇g_k(d_k), up to the relative residual of each."""

    d: Tensor
    residuals: Tensor  # |λ ∇g - ∇U| in the metric of H⁻¹, relative to the start, (K,)
    missing: Tensor  # share of the response that one more step would add, (K,)
    steps: int


def pushed(
    gradient: Rows, push: Rows, solve: Rows, strength: Tensor, start: Tensor, *, tolerance: float, max_steps: int = 50
) -> Pushed:
    """Minimise U - λ_k g_k for every row k, with steps H⁻¹ (λ ∇g - ∇U) and the Hessian H of the start.

    ``strength`` holds λ (K,), ``push`` gives ∇g_k at row k. For small pushes the error falls by a factor of about λ at
    every step, in the metric of the Hessian, and so does the residual in that of its inverse. Rows that stop improving
    are left as they are; their residual tells.

    >>> found = pushed(lambda d: 2 * d, torch.ones_like, lambda r: r / 2, torch.tensor([3.0]), torch.zeros(1, 1),
    ...                tolerance=1e-6)
    >>> found.d, found.steps
    (tensor([[1.5000]]), 1)
    """
    weight, tiny = strength.unsqueeze(1), torch.finfo(start.dtype).tiny
    d = kept = start
    ahead, whole = torch.zeros_like(start), torch.ones_like(strength)
    best = torch.full_like(strength, torch.inf)
    for step in range(max_steps + 1):
        gap = weight * push(d) - gradient(d)
        lost = ~torch.isfinite(gap).all(1)  # a step went so far that something overflows
        more = solve(gap.masked_fill(lost.unsqueeze(1), 0))
        sizes = (gap * more).sum(1).clamp_min(0).sqrt().masked_fill(lost, torch.inf)
        whole = whole if step else sizes.clamp_min(tiny)
        better = sizes / whole < best
        best = torch.where(better, sizes / whole, best)
        kept, ahead = (torch.where(better.unsqueeze(1), new, old) for new, old in ((d, kept), (more, ahead)))
        going = better & (best > tolerance)
        if not bool(going.any()) or step == max_steps:
            break
        d = torch.where(going.unsqueeze(1), d + more, kept)
    slopes = push(kept)
    rest, moved = (slopes * ahead).sum(1).abs(), (slopes * (kept - start)).sum(1).abs()
    return Pushed(kept, best, rest / (moved + rest).clamp_min(tiny), step)


def newton(
    gradient: Rows, solve: Callable[[Tensor, Tensor], Tensor], start: Tensor, *, tolerance: float, max_steps: int = 30,
    value: Callable[[Tensor], float] | None = None,
) -> tuple[Tensor, list[float]]:  # fmt: skip
    """The minimum of U from ``start`` (P,), by Newton's steps: the point and the decrements gᵀH⁻¹g on the way.

    ``solve(d, r)`` applies the inverse Hessian at d to r (1, P). Half the decrement is how far U still falls; the
    search ends below ``tolerance``, or where a step no longer helps; with an infinite one where U overflows. With the
    ``value`` U(d) a step that does not lower it enough is halved, so that far from the minimum none leaves its basin.
    """
    d, decrements = start, []
    for _ in range(max_steps):
        slope = gradient(d.unsqueeze(0))
        if not bool(torch.isfinite(slope).all()):
            decrements.append(math.inf)
            break
        step = solve(d, slope)
        decrements.append(float((slope * step).sum()))
        if decrements[-1] <= tolerance or (
            value is None and len(decrements) > 1 and decrements[-1] > 4 * decrements[-2]
        ):
            break
        length = 1.0 if value is None else _length(value, d, step[0], decrements[-1])
        if length == 0:
            break
        d = d - length * step[0]
    return d, decrements


def _length(value: Callable[[Tensor], float], d: Tensor, step: Tensor, decrement: float) -> float:
    """The share of a step to take: the largest power of a half that lowers U by a tenth of its promise, or none."""
    here, length = value(d), 1.0
    floor = 1e3 * torch.finfo(d.dtype).eps * abs(here)  # differences below are rounding, and any step will do
    while not value(d - length * step) <= here - 0.1 * length * decrement + floor:
        length /= 2
        if length < 1e-3:
            return 0.0
    return length
