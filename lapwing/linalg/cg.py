"""Conjugate gradients for several right-hand sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.errors import NumericalError

Product = Callable[[Tensor], Tensor]  # (K, P) -> (K, P), rows apart from each other


@dataclass(frozen=True, eq=False)
class Solution:
    """x (K, P) with the relative residual |b - A x| / |b| reached by each row, by recurrence, and the iterations."""

    x: Tensor
    residuals: Tensor
    iterations: int
    tolerance: float

    @property
    def converged(self) -> bool:
        return bool((self.residuals <= self.tolerance).all())


def conjugate_gradients(
    product: Product,
    rhs: Tensor,
    *,
    precondition: Product | None = None,
    start: Tensor | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    truncated: bool = False,
) -> Solution:
    """Solve A x = b for every row of ``rhs`` (K, P); A symmetric positive definite, given by its products.

    Recurrences are float64 whatever the products are. The tolerance is on the worst row; rows that are done are frozen.
    A solve that ends above it raises with its residual, unless ``truncated`` says that any iterate will do (the inner
    loop of a Newton method). A direction of negative curvature raises too: the operator is not positive definite.

    >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> conjugate_gradients(lambda v: v @ a, torch.tensor([[3.0, 4.0]], dtype=torch.float64)).x
    tensor([[1.0000, 1.0000]], dtype=torch.float64)
    """
    b = rhs.double()
    x = torch.zeros_like(b) if start is None else torch.where(b.any(1, keepdim=True), start.double(), 0.0)
    r = b - product(x).double() if start is not None else b.clone()
    size = b.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    z = r if precondition is None else precondition(r).double()
    p, rho = z.clone(), (r * z).sum(1)
    rounding, largest = torch.finfo(torch.float64).eps, torch.zeros_like(rho)  # the largest eigenvalue seen
    iterations = 0
    while iterations < max_iterations:
        active = r.norm(dim=1) > tolerance * size
        if not bool(active.any()):
            break
        q = product(p).double()
        curved, length = (p * q).sum(1), p.square().sum(1)
        largest = torch.where(active, largest.maximum(curved / length), largest)
        if bool((curved <= rounding * largest * length)[active].any()):
            if truncated and iterations:
                break
            raise NumericalError(
                f"conjugate gradients met a direction with curvature {float((curved / length)[active].min()):.3g}, "
                f"after one of {float(largest.max()):.3g}; expected a positive definite operator. Raise the prior "
                "precision, or compute in float64."
            )
        step = torch.where(active, rho / curved, 0.0)
        x += step[:, None] * p
        r -= step[:, None] * q
        z = r if precondition is None else precondition(r).double()
        new = (r * z).sum(1)
        p = z + torch.where(active, new / rho, 0.0)[:, None] * p
        rho = torch.where(active, new, rho)
        iterations += 1
    residuals = r.norm(dim=1) / size
    found = Solution(x, residuals, iterations, tolerance)
    if not truncated and not found.converged:
        raise NumericalError(
            f"conjugate gradients stopped after {iterations} iterations with a relative residual of "
            f"{float(residuals.max()):.3g}; expected {tolerance:g}. Raise max_iterations, use a preconditioner, or "
            "raise the prior precision."
        )
    return found
