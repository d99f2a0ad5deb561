"""Conjugate gradients for several right-hand sides: row by row, or together in one block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.data import check_finite
from lapwing.errors import NumericalError
from lapwing.linalg.cholesky import cholesky
from lapwing.linalg.operators import Product, applied, refuse_asymmetric_images
from lapwing.linalg.orthogonal import orthonormal_rows

CHECKED = 20  # iterations between two looks at the residual as it is, instead of as it was updated
EPS = torch.finfo(torch.float64).eps
SINGULAR = 1e2 * EPS  # of the largest curvature: products of float64 leave rounding of this size where there is none
TINY = torch.finfo(torch.float64).tiny
APART = 0.1  # of the updated residual, by which the true one may differ; where it is too large, aim that much lower
TRANSPOSED = 1e-3  # how far a root and its transpose may differ by rounding
ADVICE = (
    "Raise max_iterations, use a preconditioner, raise the prior precision, or take float64 where products are float32."
)


@dataclass(frozen=True, eq=False)
class Solution:
    """x (K, P) with the relative residual |b - A x| / |b| reached by each row, and the iterations, a product each.

    Conjugate gradients update the residual. Every twenty iterations and before they end, with one product more, they
    compute it, and go on from that where it differs by more than a tenth and more than the float64 rounding of A x.
    ``residuals`` are the larger of the two where the last iteration had both. ``updated`` are the updated ones, and
    where there are such they decide on convergence: a tolerance below that rounding is met as far as float64 can tell.
    """

    x: Tensor
    residuals: Tensor
    iterations: int
    tolerance: float
    updated: Tensor | None = None

    @property
    def converged(self) -> bool:
        return bool(((self.residuals if self.updated is None else self.updated) <= self.tolerance).all())

    def settled(self, solver: str, advice: str) -> Solution:
        """Itself; an error with the residual where that is above the tolerance."""
        if self.converged:
            return self
        raise NumericalError(
            f"{solver} stopped after {self.iterations} iterations with a relative residual of "
            f"{float(self.residuals.max()):.3g}; expected {self.tolerance:g}. {advice}"
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
    """Solve A x = b for every row of ``rhs`` (K, P); A symmetric positive definite, given by its products.

    Recurrences are float64 whatever the products are. The tolerance is on the worst row; rows that are done are frozen.
    A solve that ends above it raises with its residual, unless ``truncated`` says that any iterate will do (the inner
    loop of a Newton method). A direction of negative curvature raises too: the operator is not positive definite. So
    does an asymmetric operator, which several rows show at their first product, and one row may not.

    >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> conjugate_gradients(lambda v: v @ a, torch.tensor([[3.0, 4.0]], dtype=torch.float64)).x
    tensor([[1.0000, 1.0000]], dtype=torch.float64)
    """
    b = rhs.double()
    check_finite((b, start), "right-hand sides and start of conjugate gradients")
    x = torch.zeros_like(b) if start is None else torch.where(b.any(1, keepdim=True), start.double(), 0.0)
    r = b - product(x).double() if start is not None else b.clone()
    size = b.norm(dim=1).clamp_min(TINY)
    z = r if precondition is None else precondition(r).double()
    p, rho = z.clone(), (r * z).sum(1)
    largest, norm = torch.zeros_like(rho), 0.0  # the largest curvature seen by each row, and the norm of A
    iterations, before, true, aim = 0, torch.inf, torch.zeros_like(rho), tolerance
    while iterations < max_iterations:
        active = r.norm(dim=1) > aim * size
        if not bool(active.any()):
            break
        q = applied(product, p)
        if iterations == 0:
            refuse_asymmetric_images(p, q)
        curved, length = (p * q).sum(1), p.square().sum(1)
        largest = torch.where(active, largest.maximum(curved / length), largest)
        if bool((curved <= SINGULAR * largest * length)[active].any()):
            if truncated and iterations:
                break
            raise _indefinite(float((curved / length)[active].min()), float(largest.max()))
        step = torch.where(active, rho / curved, 0.0)
        x += step[:, None] * p
        r -= step[:, None] * q
        iterations += 1
        norm = max(norm, _norm(q[active], p[active]))
        going, true = active, torch.zeros_like(rho)
        last = iterations == max_iterations or not bool((r.norm(dim=1) > aim * size).any())
        if iterations % CHECKED == 0 or (last and not truncated):
            r, true, drifted, worst = _checked(product, b, x, r, norm, tolerance * size)
            if worst > 0.5 * before:
                break
            going, before = active & ~drifted, worst or torch.inf
            aim = tolerance / (1 + APART) if last and bool((true > tolerance * size).any()) else aim
        z = r if precondition is None else precondition(r).double()
        new = (r * z).sum(1)
        p = z + torch.where(going, new / rho, 0.0)[:, None] * p
        rho = new
    updated = r.norm(dim=1)
    found = Solution(x, updated.maximum(true) / size, iterations, tolerance, updated / size)
    return found if truncated else found.settled("conjugate gradients", ADVICE)


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

    Each row uses the directions of all, so K rows take far fewer iterations than one does alone. A preconditioner L Lᵀ
    near A⁻¹ is given by its ``root`` L and, where that is not symmetric, its transpose ``adjoint``. The residuals are
    kept as mix · q with orthonormal rows q: rows that become dependent, or are done, leave the block and do no harm.
    Tolerance, ``truncated`` and negative curvature as in ``conjugate_gradients``; residuals are relative to ``sizes``
    (K,) where they are given. Reference: Dubrulle 2001 (BCGrQ).

    >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> block_conjugate_gradients(lambda v: v @ a, torch.eye(2, dtype=torch.float64)).iterations
    1
    """
    check_finite(rhs, "right-hand sides of block conjugate gradients")
    half = _checked_root(root)
    back = half if adjoint is None else _checked_root(adjoint)
    size = (rhs.double().norm(dim=1) if sizes is None else _positive(sizes, rhs))[:, None].clamp_min(TINY)
    b = rhs.double() / size
    x, r, true = torch.zeros_like(b), b.clone(), b.new_zeros(len(b))
    turned = back(b)
    mix, q = _residual_basis(turned)
    s, largest = q, 0.0
    iterations, norm, before, aim = 0, 0.0, torch.inf, tolerance
    while iterations < max_iterations and len(q) and float(r.norm(dim=1).max()) > aim:
        own, dependent = torch.linalg.cholesky_ex(s @ s.mT)
        if int(dependent):  # up to rounding: search along the residuals again
            s, own = q, torch.eye(len(q)).to(q)
        moved = half(s)
        image = applied(product, moved)
        if iterations == 0:
            _refuse_no_adjoint(s, moved, b, turned)
            refuse_asymmetric_images(moved, image)
        curved = back(image)
        inner = curved @ s.mT
        accuracy = max(1e2 * EPS, float((inner - inner.mT).norm() / inner.norm()) * (s.shape[1] / len(s)) ** 0.5)
        inner = 0.5 * (inner + inner.mT)
        curvatures = _curvatures(inner, own)
        largest = max(largest, float(curvatures[-1]))
        if float(curvatures[0]) <= SINGULAR * largest:
            if truncated and iterations:
                break
            raise _indefinite(float(curvatures[0]), largest)
        factor = cholesky(inner, "a block of search directions")
        step = torch.cholesky_solve(s @ q.mT, factor).mT
        x += mix @ step @ moved
        r -= mix @ step @ image
        iterations += 1
        norm = max(norm, _norm(image, moved))
        turn, q = _residual_basis(q - step @ curved, accuracy * float((step.abs() @ curved.norm(dim=1)).max()))
        mix = mix @ turn
        true = torch.zeros_like(true)
        last = iterations == max_iterations or float(r.norm(dim=1).max()) <= aim
        if iterations % CHECKED == 0 or len(q) == 0 or (last and not truncated):
            r, true, drifted, worst = _checked(product, b, x, r, norm, torch.full_like(true, tolerance))
            if worst > 0.5 * before:
                break
            before = worst or torch.inf
            aim = tolerance / (1 + APART) if last and float(true.max()) > tolerance else aim
            left = back(r)
            if bool(drifted.any()) or len(q) == 0 or _apart(mix @ q, left, r.norm(dim=1) > aim):
                mix, q = _residual_basis(left)
        s = q - torch.cholesky_solve(curved @ q.mT, factor).mT @ s
    updated = r.norm(dim=1)
    found = Solution(size * x, updated.maximum(true), iterations, tolerance, updated)
    return found if truncated else found.settled("block conjugate gradients", advice)


def diagonal_preconditioner(diagonal: Tensor) -> Product:
    """Rows over the diagonal (P,) of the operator: Jacobi's preconditioner, for ``conjugate_gradients``.

    >>> diagonal_preconditioner(torch.tensor([4.0, 1.0]))(torch.ones(1, 2))
    tensor([[0.2500, 1.0000]])
    """
    _refuse_nonpositive(diagonal)
    return lambda rows: rows / diagonal


def diagonal_root(diagonal: Tensor) -> Product:
    """Rows over the root of the diagonal: the split form of Jacobi's, for ``block_conjugate_gradients``."""
    _refuse_nonpositive(diagonal)
    return lambda rows: rows * diagonal.rsqrt()


def _identity(rows: Tensor) -> Tensor:
    return rows


def _checked_root(root: Product | None) -> Product:
    return _identity if root is None else lambda rows: applied(root, rows)


def _positive(sizes: Tensor, rhs: Tensor) -> Tensor:
    bad = ~(sizes > 0) & rhs.any(1)
    if bool(bad.any()):
        raise NumericalError(
            f"a size that residuals are relative to is {float(sizes[bad][0]):.3g}; expected all above zero."
        )
    return sizes.double()


def _norm(images: Tensor, rows: Tensor) -> float:
    """The norm of the operator as far as these rows show it."""
    return float((images.norm(dim=1) / rows.norm(dim=1)).max())


def _checked(
    product: Product, b: Tensor, x: Tensor, r: Tensor, norm: float, enough: Tensor
) -> tuple[Tensor, Tensor, Tensor, float]:
    """The residual, as it is where the updated one has drifted away and is not small enough.

    Then the lengths of all as they are, which rows drifted, and the worst of these where no other row is left: if it
    hardly falls from one check to the next, the products are not accurate enough to go on.
    """
    truth = b - product(x).double()
    size = truth.norm(dim=1)
    allowed = torch.maximum(APART * r.norm(dim=1), 10 * EPS * norm * x.norm(dim=1))
    left = size > enough
    drifted = left & ((truth - r).norm(dim=1) > allowed)
    worst = float((size / enough)[left].max()) if bool(left.any()) and torch.equal(left, drifted) else 0.0
    return torch.where(drifted[:, None], truth, r), size, drifted, worst


def _apart(rows: Tensor, truth: Tensor, counted: Tensor) -> bool:
    """Whether any row that counts differs from what it should be by more than a tenth."""
    return bool(((rows - truth).norm(dim=1) > APART * truth.norm(dim=1))[counted].any())


def _residual_basis(rows: Tensor, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """rows = mix · basis, but for what is rounding of the longest row, or of the ``noise`` that is known."""
    if len(rows) == 0:
        return rows.new_zeros(0, 0), rows
    mix, basis = orthonormal_rows(rows, cut=max(noise, 1e2 * EPS * float(rows.norm(dim=1).max())))
    return mix[:, : len(basis)], basis


def _curvatures(inner: Tensor, factor: Tensor) -> Tensor:
    """The operator's eigenvalues, ascending, within a span of directions s: inner relative to s · sᵀ and its factor."""
    left = torch.linalg.solve_triangular(factor, inner, upper=False)
    return torch.linalg.eigvalsh(torch.linalg.solve_triangular(factor, left.mT, upper=False))


def _indefinite(curvature: float, largest: float) -> NumericalError:
    return NumericalError(
        f"conjugate gradients met a direction with curvature {curvature:.3g}, after one of {largest:.3g}; expected a "
        "positive definite operator, which is symmetric too. Raise the prior precision, or take float64 where products "
        "are float32."
    )


def _refuse_no_adjoint(s: Tensor, moved: Tensor, b: Tensor, turned: Tensor) -> None:
    """L s times b against s times Lᵀ b, relative to the lengths of what is multiplied.

    A root near nought along s is the difference of larger numbers, so the rounding of these is allowed.
    """
    sizes = moved.norm(dim=1)[:, None] * b.norm(dim=1) + s.norm(dim=1)[:, None] * turned.norm(dim=1)
    rounding = 1e3 * EPS * s.norm(dim=1)[:, None] * b.norm(dim=1)
    apart = float(((moved @ b.mT - s @ turned.mT).abs() / (sizes + rounding / TRANSPOSED).clamp_min(TINY)).max())
    if not apart <= TRANSPOSED:
        raise NumericalError(
            f"the root of a preconditioner and its adjoint differ by {apart:.3g} where they must be transposes; give "
            "both root and adjoint, such as precision.sample and precision.adjoint, or a symmetric root alone."
        )


def _refuse_nonpositive(diagonal: Tensor) -> None:
    if not bool((diagonal > 0).all()):
        raise NumericalError(
            f"a diagonal preconditioner got an entry of {float(diagonal.min()):.3g}; expected all above zero."
        )
