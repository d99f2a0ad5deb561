"""Conjugate gradients for several right-hand sides: row by row, or in one block."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lapwing.core.inputs import check_finite
from lapwing.core.spectra import eigvalsh
from lapwing.errors import NumericalError
from lapwing.linalg.cholesky import cholesky
from lapwing.linalg.krylov import orthonormal_rows
from lapwing.linalg.operators import EPS, TINY, Product, Solution, applied, identity, refuse_asymmetric_images

CHECK_EVERY = 20  # iterations between two computations of b - A x
DRIFT = 0.1  # relative difference between the updated and the computed residual that is tolerated
SINGULAR = 1e2 * EPS  # of the largest curvature: rounding of float64 products leaves curvature of this size
ADVICE = (
    "Raise max_iterations, use a preconditioner, raise the prior precision, or take float64 where products are float32."
)
TRANSPOSE = 1e-3  # relative difference by rounding that is tolerated between a root and its transpose
LEAST = 1e-12  # relative residuals of samples below this are rounding


def conjugate_gradients(
    product: Product,
    rhs: Tensor,
    *,
    precondition: Product | None = None,
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
    check_finite(b, "right-hand sides of conjugate gradients")
    x, r = torch.zeros_like(b), b.clone()
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


def block_conjugate_gradients(
    product: Product,
    rhs: Tensor,
    *,
    root: Product | None = None,
    adjoint: Product | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    truncated: bool = False,
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
        max_iterations: the largest number of iterations.
        truncated: return any iterate instead of raising, as for the inner loop of a Newton method.

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
    sizes = rhs.double().norm(dim=1, keepdim=True).clamp_min(TINY)
    solution = _block_iterate(product, rhs.double() / sizes, root, adjoint, tolerance, max_iterations, truncated)
    solution = replace(solution, x=sizes * solution.x)
    return solution if truncated else solution.require_convergence("block conjugate gradients", ADVICE)


def _block_iterate(
    product: Product, b: Tensor, root: Product | None, adjoint: Product | None, tolerance: float, max_iterations: int,
    truncated: bool,
) -> Solution:  # fmt: skip
    """Iterate on A x = b until every residual has at most the length ``tolerance``; return the last iterate."""
    root = _checked(root)
    adjoint = root if adjoint is None else _checked(adjoint)
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
    return monitor.solution(x, r, iterations)


def _checked(root: Product | None) -> Product:
    """Return the product of a preconditioner's root with its images checked; the identity if there is none."""
    return identity if root is None else lambda rows: applied(root, rows)


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
    return eigvalsh(torch.linalg.solve_triangular(gram_factor, left.mT, upper=False))


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
    residual = rhs if start is None else rhs - apply(start)
    check_finite(residual, "right-hand sides of block conjugate gradients")
    sizes = residual_sizes(noise, rhs, tolerance).double()[:, None].clamp_min(TINY)
    rest = _block_iterate(apply, residual.double() / sizes, root, None, tolerance, 1000, truncated=False)
    rest.require_convergence("block conjugate gradients", advice)
    return replace(rest, x=sizes * rest.x if start is None else start + sizes * rest.x)


def residual_sizes(noise: Tensor, rhs: Tensor, tolerance: float) -> Tensor:
    """Return the lengths (K,) that residuals of samples are relative to: those of the prior's part ``noise`` (K, P).

    They are raised where the tolerance would ask for a residual below the rounding of float64.
    """
    return torch.maximum(noise.norm(dim=1), LEAST / tolerance * rhs.norm(dim=1))


class ResidualMonitor:
    """The comparison of the residual that a solver updates with b - A x; mutable, made for one solve.

    Args:
        product: multiplies rows by A.
        rhs: the right-hand sides b (K, P).
        sizes: the lengths (K,) that residuals are relative to.
        tolerance: the relative residual to reach.
    """

    def __init__(self, product: Product, rhs: Tensor, sizes: Tensor, tolerance: float) -> None:
        self.stalled = False  # whether the products are not accurate enough to go on
        self._product, self._rhs, self._sizes, self._tolerance = product, rhs, sizes, tolerance
        self._target = tolerance  # of the updated residual
        self._computed = torch.zeros_like(sizes)  # |b - A x|, zero where the last iteration did not compute it
        self._norm = 0.0  # of A, as far as the products show it
        self._previous = torch.inf  # the worst ratio of residual to tolerance at the previous check

    def active(self, residual: Tensor) -> Tensor:
        """Return which rows (K,) have not reached their tolerance yet."""
        return residual.norm(dim=1) > self._target * self._sizes

    def observe(self, images: Tensor, rows: Tensor) -> None:
        """Note the product of one iteration: it bounds the norm of A from below."""
        self._norm = max(self._norm, float((images.norm(dim=1) / rows.norm(dim=1)).max()))
        self._computed = torch.zeros_like(self._sizes)

    def check(self, x: Tensor, residual: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """Compute b - A x with one product; return the residual to go on with and the rows (K,) that it replaces.

        A row is replaced where its updated residual has drifted away and is not small enough yet. ``stalled`` becomes
        true if only such rows are left and their worst residual has hardly fallen since the previous check. If the
        solver would stop (``last``) with a computed residual above the tolerance, its target is lowered.
        """
        computed = self._rhs - self._product(x).double()
        self._computed = computed.norm(dim=1)
        enough = self._tolerance * self._sizes
        allowed = torch.maximum(DRIFT * residual.norm(dim=1), 10 * EPS * self._norm * x.norm(dim=1))
        above = self._computed > enough
        drifted = above & ((computed - residual).norm(dim=1) > allowed)
        all_drifted = bool(above.any()) and torch.equal(above, drifted)
        worst = float((self._computed / enough)[above].max()) if all_drifted else 0.0
        self.stalled = worst > 0.5 * self._previous
        self._previous = worst or torch.inf
        if last and bool(above.any()):
            self._target = self._tolerance / (1 + DRIFT)
        return torch.where(drifted[:, None], computed, residual), drifted

    def solution(self, x: Tensor, residual: Tensor, iterations: int) -> Solution:
        """Return the solution with the larger of the updated and the computed residual."""
        updated = residual.norm(dim=1)
        larger = updated.maximum(self._computed)
        return Solution(x, larger / self._sizes, iterations, self._tolerance, updated / self._sizes)


def not_positive_definite(curvature: float, largest: float) -> NumericalError:
    """Return the error for a search direction without positive curvature."""
    return NumericalError(
        f"conjugate gradients met a direction with curvature {curvature:.3g}, after one of {largest:.3g}; expected a "
        "symmetric positive definite operator. Raise the prior precision, or take float64 where products are float32."
    )
