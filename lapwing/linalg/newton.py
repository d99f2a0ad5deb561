"""Where a minimum lies, and where it goes when it is pushed: Newton steps with one Hessian for all rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = Callable[[Tensor], Tensor]  # (K, P) -> (K, P)


@dataclass(frozen=True, eq=False)
class Pushed:
    """d (K, P) with ∇U(d_k) = λ_k ∇g_k(d_k), up to the relative residual of each."""

    d: Tensor
    residuals: Tensor  # |∇U - λ ∇g| / |λ ∇g|, (K,)
    missing: Tensor  # what one more step would add to the response, relative to it, (K,)
    steps: int


def pushed(
    gradient: Rows, push: Rows, solve: Rows, strength: Tensor, start: Tensor, *, tolerance: float, max_steps: int = 50
) -> Pushed:
    """Minimise U - λ_k g_k for every row k, with steps H⁻¹ (λ ∇g - ∇U) and the Hessian H of the start.

    ``strength`` holds λ (K,), ``push`` gives ∇g_k at row k. For small pushes the error falls by a factor of about λ at
    every step. Rows that stop improving are left as they are; their residual tells.

    >>> found = pushed(lambda d: 2 * d, torch.ones_like, lambda r: r / 2, torch.tensor([3.0]), torch.zeros(1, 1),
    ...                tolerance=1e-6)
    >>> found.d, found.steps
    (tensor([[1.5000]]), 1)
    """
    weight, tiny = strength.unsqueeze(1), torch.finfo(start.dtype).tiny
    d = kept = start
    best = torch.full_like(strength, torch.inf)
    for step in range(max_steps + 1):
        slopes = push(d)
        gap = weight * slopes - gradient(d)
        residuals = gap.norm(dim=1) / (weight * slopes).norm(dim=1).clamp_min(tiny)
        better = residuals < best
        kept, best = torch.where(better.unsqueeze(1), d, kept), torch.where(better, residuals, best)
        going = better & (best > tolerance)
        if not bool(going.any()) or step == max_steps:
            break
        d = torch.where(going.unsqueeze(1), d + solve(gap), kept)
    slopes = push(kept)
    more = solve(weight * slopes - gradient(kept))
    missing = (slopes * more).sum(1).abs() / (slopes * (kept - start)).sum(1).abs().clamp_min(tiny)
    return Pushed(kept, best, missing, step)


def newton(
    gradient: Rows, solve: Callable[[Tensor, Tensor], Tensor], start: Tensor, *, tolerance: float, max_steps: int = 30
) -> tuple[Tensor, list[float]]:
    """The minimum of U from ``start`` (P,), by full Newton steps: the point and the decrements gᵀH⁻¹g on the way.

    ``solve(d, r)`` applies the inverse Hessian at d to r (1, P). Half the decrement is how far U still falls; the
    search ends below ``tolerance``, or where a step no longer helps.
    """
    d, decrements = start, []
    for _ in range(max_steps):
        slope = gradient(d.unsqueeze(0))
        step = solve(d, slope)
        decrements.append(float((slope * step).sum()))
        if decrements[-1] <= tolerance or (len(decrements) > 1 and decrements[-1] > 4 * decrements[-2]):
            break
        d = d - step[0]
    return d, decrements
