"""Conjugate gradients for several right-hand sides, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.core.data import check_finite
from lapwing.linalg.operators import Product, applied, identity, refuse_asymmetric_images
from lapwing.linalg.solution import (
    ADVICE,
    CHECK_EVERY,
    SINGULAR,
    TINY,
    ResidualMonitor,
    Solution,
    not_positive_definite,
)


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
    """Solve A x = b for every row of ``rhs``, with A symmetric positive definite and known by its products.

    All rows share each product; rows that have converged stay as they are. The recurrences are float64 whatever the
    dtype of the products. An asymmetric operator is refused at the first product if there are several rows.

    Args:
        product: multiplies rows (K, P) by A.
        rhs: the right-hand sides b (K, P).
        precondition: multiplies rows by an approximate inverse of A, symmetric positive definite; the
            identity if None.
        start: initial values of x (K, P); zero if None.
        tolerance: the residual |b - A x| / |b| that every row must reach.
        max_iterations: the largest number of iterations.
        truncated: return any iterate instead of raising, as for the inner loop of a Newton method.

    Returns:
        The solution x (K, P) with the residual of each row.

    Raises:
        NumericalError: the tolerance was not reached, or the operator is not symmetric positive definite.

    >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> conjugate_gradients(lambda v: v @ a, torch.tensor([[3.0, 4.0]], dtype=torch.float64)).x
    tensor([[1.0000, 1.0000]], dtype=torch.float64)
    """
    b = rhs.double()
    check_finite((b, start), "right-hand sides and start of conjugate gradients")
    x = torch.zeros_like(b) if start is None else torch.where(b.any(1, keepdim=True), start.double(), 0.0)
    r = b - product(x).double() if start is not None else b.clone()
    monitor = ResidualMonitor(product, b, b.norm(dim=1).clamp_min(TINY), tolerance)
    precondition = identity if precondition is None else precondition
    z = precondition(r).double()
    p, rho = z.clone(), (r * z).sum(1)
    largest, iterations = torch.zeros_like(rho), 0  # the largest curvature along the directions of each row
    active = monitor.active(r)
    while iterations < max_iterations and bool(active.any()):
        q = applied(product, p)
        if iterations == 0:
            refuse_asymmetric_images(p, q)
        curved, squares = (p * q).sum(1), p.square().sum(1)
        largest = torch.where(active, largest.maximum(curved / squares), largest)
        if bool((curved <= SINGULAR * largest * squares)[active].any()):
            if truncated and iterations:
                break
            raise not_positive_definite(float((curved / squares)[active].min()), float(largest.max()))
        step = torch.where(active, rho / curved, 0.0)
        x += step[:, None] * p
        r -= step[:, None] * q
        iterations += 1
        monitor.observe(q[active], p[active])
        conjugate, active = active, monitor.active(r)
        last = iterations == max_iterations or not bool(active.any())
        if iterations % CHECK_EVERY == 0 or (last and not truncated):
            r, replaced = monitor.check(x, r, last)
            if monitor.stalled:
                break
            conjugate, active = conjugate & ~replaced, monitor.active(r)
        z = precondition(r).double()
        new = (r * z).sum(1)
        p = z + torch.where(conjugate, new / rho, 0.0)[:, None] * p
        rho = new
    solution = monitor.solution(x, r, iterations)
    return solution if truncated else solution.require_convergence("conjugate gradients", ADVICE)
