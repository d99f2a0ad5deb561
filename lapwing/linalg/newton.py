"""Newton steps to the minimum of a function, and to the minima of the function plus perturbations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = Callable[[Tensor], Tensor]  # (K, P) -> (K, P)


@dataclass(frozen=True, eq=False)
class Pushed:
    """Perturbed minima d (K, P), with ∇U(d_k) = λ_k ∇g_k(d_k) up to the relative residual of each row."""

    d: Tensor
    residuals: Tensor  # |λ ∇g - ∇U| in the metric of H⁻¹, relative to the start, (K,)
    missing: Tensor  # share of the response g_k(d_k) - g_k(start) that one more step would add, (K,)
    steps: int


def pushed(
    gradient: Rows, push: Rows, solve: Rows, strength: Tensor, start: Tensor, *, tolerance: float, max_steps: int = 50
) -> Pushed:
    """Minimise U - λ_k g_k for every row k, with steps H⁻¹ (λ ∇g - ∇U) and the Hessian H at the start.

    ``gradient`` returns ∇U at each row, ``push`` returns ∇g_k at row k, ``solve`` applies H⁻¹ and ``strength`` is λ
    (K,). For small λ each step reduces the error, in the metric of H, and the residual, in the metric of H⁻¹, by a
    factor of about λ. Rows that stop improving keep their best iterate; their residual says how good it is.

    >>> minima = pushed(lambda d: 2 * d, torch.ones_like, lambda r: r / 2, torch.tensor([3.0]), torch.zeros(1, 1),
    ...                 tolerance=1e-6)
    >>> minima.d, minima.steps
    (tensor([[1.5000]]), 1)
    """
    weight, tiny = strength.unsqueeze(1), torch.finfo(start.dtype).tiny
    d = kept = start
    ahead, whole = torch.zeros_like(start), torch.ones_like(strength)
    best = torch.full_like(strength, torch.inf)
    for step in range(max_steps + 1):
        gap = weight * push(d) - gradient(d)
        overflow = ~torch.isfinite(gap).all(1)  # the last step was too long
        more = solve(gap.masked_fill(overflow.unsqueeze(1), 0))
        sizes = (gap * more).sum(1).clamp_min(0).sqrt().masked_fill(overflow, torch.inf)
        whole = whole if step else sizes.clamp_min(tiny)
        better = sizes / whole < best
        best = torch.where(better, sizes / whole, best)
        kept, ahead = (torch.where(better.unsqueeze(1), new, old) for new, old in ((d, kept), (more, ahead)))
        going = better & (best > tolerance)
        if not bool(going.any()) or step == max_steps:
            break
        d = torch.where(going.unsqueeze(1), d + more, kept)
    slopes = push(kept)
    rest, response = (slopes * ahead).sum(1).abs(), (slopes * (kept - start)).sum(1).abs()
    return Pushed(kept, best, rest / (response + rest).clamp_min(tiny), step)


def newton(
    gradient: Rows, solve: Callable[[Tensor, Tensor], Tensor], start: Tensor, *, tolerance: float, max_steps: int = 30,
    value: Callable[[Tensor], float] | None = None,
) -> tuple[Tensor, list[float]]:  # fmt: skip
    """Minimise U from ``start`` (P,) by Newton's method; return the minimum and the decrement gᵀH⁻¹g of every step.

    ``solve(d, r)`` applies the inverse Hessian at d to r (1, P). Half the decrement estimates how far U is above its
    minimum. The search ends if the decrement is at most ``tolerance``, or if a step no longer helps; the last decrement
    is infinite if the gradient overflows. If ``value``, the function U(d), is given, a step that does not lower U
    enough is halved, so that a search from far away stays in the basin of its minimum.
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
    """Return the largest power of a half by which the step lowers U by a tenth of the predicted decrease; or zero."""
    here, length = value(d), 1.0
    floor = 1e3 * torch.finfo(d.dtype).eps * abs(here)  # smaller differences are rounding
    while not value(d - length * step) <= here - 0.1 * length * decrement + floor:
        length /= 2
        if length < 1e-3:
            return 0.0
    return length
