"""Conjugate gradients for several right-hand sides in one block."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lapwing.core.data import check_finite
from lapwing.errors import NumericalError
from lapwing.linalg.cholesky import cholesky
from lapwing.linalg.operators import Product, applied, identity, refuse_asymmetric_images
from lapwing.linalg.orthogonal import orthonormal_rows
from lapwing.linalg.solution import (
    ADVICE,
    CHECK_EVERY,
    DRIFT,
    EPS,
    SINGULAR,
    TINY,
    ResidualMonitor,
    Solution,
    not_positive_definite,
)

TRANSPOSE = 1e-3  # relative difference by rounding that is tolerated between a root and its transpose
LEAST = 1e-12  # relative residuals of samples below this are rounding


def block_conjugate_gradients(
    product: Product,
    rhs: Tensor,
    *,
    root: Product | None = None,
    adjoint: Product | None = None,
    tolerance: float = 1e-6,
    sizes: Tensor | None = None,
    max_iterations: int = 1000,
    truncated: bool = False,
    advice: str = ADVICE,
) -> Solution:
    """Solve A x = b for all rows of ``rhs`` (K, P) in the Krylov space that they span together.

    Each row uses the search directions of all rows, so K rows take far fewer iterations than one row alone. The
    residuals are kept as mix · q with orthonormal rows q: rows that become dependent, or have converged, leave the
    block. A preconditioner L Lᵀ, near A⁻¹, is given by its root L. Reference: Dubrulle 2001 (BCGrQ).

    Args:
        product: multiplies rows (K, P) by A, symmetric positive definite.
        rhs: the right-hand sides b (K, P).
        root: multiplies rows by L; the identity if None.
        adjoint: multiplies rows by Lᵀ; None if L is symmetric.
        tolerance: the relative residual that every row must reach.
        sizes: the lengths (K,) that residuals are relative to; None for those of the right-hand sides.
        max_iterations: the largest number of iterations.
        truncated: return any iterate instead of raising, as for the inner loop of a Newton method.
        advice: what the error says if the tolerance was not reached.

    Returns:
        The solution x (K, P) with the residual of each row.

    Raises:
        NumericalError: the tolerance was not reached, the operator is not symmetric positive definite, or ``adjoint``
            is not the transpose of ``root``.

    >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> block_conjugate_gradients(lambda v: v @ a, torch.eye(2, dtype=torch.float64)).iterations
    1
    """
    check_finite(rhs, "right-hand sides of block conjugate gradients")
    root = _checked(root)
    adjoint = root if adjoint is None else _checked(adjoint)
    size = (rhs.double().norm(dim=1) if sizes is None else _positive(sizes, rhs))[:, None].clamp_min(TINY)
    b = rhs.double() / size
    monitor = ResidualMonitor(product, b, b.new_ones(len(b)), tolerance)
    x, r, turned = torch.zeros_like(b), b.clone(), adjoint(b)
    mix, q = _residual_basis(turned)
    s, largest, iterations, active = q, 0.0, 0, monitor.active(r)
    while iterations < max_iterations and len(q) and bool(active.any()):
        s, gram_factor = _independent(s, q)
        directions = root(s)
        image = applied(product, directions)
        if iterations == 0:
            _refuse_no_adjoint(s, directions, b, turned)
            refuse_asymmetric_images(directions, image)
        curved = adjoint(image)
        inner, accuracy = _inner_products(curved, s)
        curvatures = _curvatures(inner, gram_factor)
        largest = max(largest, float(curvatures[-1]))
        if float(curvatures[0]) <= SINGULAR * largest:
            if truncated and iterations:
                break
            raise not_positive_definite(float(curvatures[0]), largest)
        factor = cholesky(inner, "a block of search directions")
        step = torch.cholesky_solve(s @ q.mT, factor).mT
        x += mix @ step @ directions
        r -= mix @ step @ image
        iterations += 1
        monitor.observe(image, directions)
        turn, q = _residual_basis(q - step @ curved, accuracy * float((step.abs() @ curved.norm(dim=1)).max()))
        mix = mix @ turn
        active = monitor.active(r)
        last = iterations == max_iterations or not bool(active.any())
        if iterations % CHECK_EVERY == 0 or len(q) == 0 or (last and not truncated):
            r, replaced = monitor.check(x, r, last)
            if monitor.stalled:
                break
            active, turned = monitor.active(r), adjoint(r)
            if bool(replaced.any()) or len(q) == 0 or _differ(mix @ q, turned, active):
                mix, q = _residual_basis(turned)
        s = q - torch.cholesky_solve(curved @ q.mT, factor).mT @ s
    solution = monitor.solution(size * x, r, iterations)
    return solution if truncated else solution.require_convergence("block conjugate gradients", advice)


def _checked(root: Product | None) -> Product:
    """Return the product of a preconditioner's root with its images checked; the identity if there is none."""
    return identity if root is None else lambda rows: applied(root, rows)


def _positive(sizes: Tensor, rhs: Tensor) -> Tensor:
    """Return the sizes in float64; raise if one is not positive and its right-hand side is not zero."""
    bad = ~(sizes > 0) & rhs.any(1)
    if bool(bad.any()):
        raise NumericalError(
            f"a size that residuals are relative to is {float(sizes[bad][0]):.3g}; expected all above zero."
        )
    return sizes.double()


def _independent(s: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return search directions and the Cholesky factor of s · sᵀ; the residuals q where s has become dependent."""
    factor, dependent = torch.linalg.cholesky_ex(s @ s.mT)
    return (q, torch.eye(len(q)).to(q)) if int(dependent) else (s, factor)


def _inner_products(curved: Tensor, s: Tensor) -> tuple[Tensor, float]:
    """Return the symmetric part of curved · sᵀ, and the relative accuracy of products that its asymmetry shows."""
    inner = curved @ s.mT
    asymmetry = float((inner - inner.mT).norm() / inner.norm())
    return 0.5 * (inner + inner.mT), max(1e2 * EPS, asymmetry * (s.shape[1] / len(s)) ** 0.5)


def _curvatures(inner: Tensor, gram_factor: Tensor) -> Tensor:
    """Return the operator's eigenvalues, ascending, within the span of directions s with s · sᵀ = factor · factorᵀ."""
    left = torch.linalg.solve_triangular(gram_factor, inner, upper=False)
    return torch.linalg.eigvalsh(torch.linalg.solve_triangular(gram_factor, left.mT, upper=False))


def _residual_basis(rows: Tensor, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return (mix, basis) with rows = mix · basis, up to the rounding of the longest row or the given noise."""
    if len(rows) == 0:
        return rows.new_zeros(0, 0), rows
    mix, basis = orthonormal_rows(rows, cut=max(noise, 1e2 * EPS * float(rows.norm(dim=1).max())))
    return mix[:, : len(basis)], basis


def _differ(rows: Tensor, expected: Tensor, active: Tensor) -> bool:
    """Return whether any active row differs from the expected one by more than a tenth."""
    return bool(((rows - expected).norm(dim=1) > DRIFT * expected.norm(dim=1))[active].any())


def _refuse_no_adjoint(s: Tensor, root_s: Tensor, b: Tensor, adjoint_b: Tensor) -> None:
    """Raise unless (L s) · b equals s · (Lᵀ b), relative to the lengths of these vectors.

    If L is nearly zero along s, it is the difference of larger numbers, so their rounding is tolerated.
    """
    sizes = root_s.norm(dim=1)[:, None] * b.norm(dim=1) + s.norm(dim=1)[:, None] * adjoint_b.norm(dim=1)
    rounding = 1e3 * EPS * s.norm(dim=1)[:, None] * b.norm(dim=1)
    gap = (root_s @ b.mT - s @ adjoint_b.mT).abs() / (sizes + rounding / TRANSPOSE).clamp_min(TINY)
    if not float(gap.max()) <= TRANSPOSE:
        raise NumericalError(
            f"the root of a preconditioner and its adjoint differ by {float(gap.max()):.3g}, but they must be "
            "transposes; give both root and adjoint, such as precision.sample and precision.adjoint, or a symmetric "
            "root alone."
        )


def solve_samples(
    apply: Product,
    rhs: Tensor,
    noise: Tensor,
    tolerance: float,
    hint: str,
    start: Tensor | None,
    root: Product | None = None,
) -> Solution:
    """Solve for samples (K, P) by block conjugate gradients; raise if one does not reach the tolerance.

    ``apply`` multiplies by the precision, ``noise`` (K, P) is the prior's part of the right-hand sides, ``start`` are
    initial values where samples nearby are known, ``root`` is that of a preconditioner and ``hint`` ends the advice of
    the error.
    """
    advice = f"Raise the prior precision or the tolerance of the samples{hint}."
    left = rhs if start is None else rhs - apply(start)
    sizes = residual_sizes(noise, rhs, tolerance)
    rest = block_conjugate_gradients(apply, left, root=root, tolerance=tolerance, sizes=sizes, advice=advice)
    return rest if start is None else replace(rest, x=start + rest.x)


def residual_sizes(noise: Tensor, rhs: Tensor, tolerance: float) -> Tensor:
    """Return the lengths (K,) that residuals of samples are relative to: those of the prior's part ``noise`` (K, P).

    They are raised where the tolerance would ask for a residual below the rounding of float64.
    """
    return torch.maximum(noise.norm(dim=1), LEAST / tolerance * rhs.norm(dim=1))
