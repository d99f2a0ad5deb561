"""Krylov spaces and what they give: solutions of systems, leading eigenpairs, log-determinants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from lapwing.data.inputs import check_finite
from lapwing.errors import NumericalError
from lapwing.linalg.dense import cholesky, eigh, eigvalsh, svd
from lapwing.linalg.operators import (
    EPS,
    TINY,
    Product,
    Solution,
    apply_checked,
    identity,
    refuse_asymmetric,
    refuse_asymmetric_images,
)
from lapwing.runtime.threads import normal, normal_rows, uniform

OVERSAMPLE = 20  # vectors in the basis of eigenpairs beyond their number, at least


@dataclass(frozen=True, eq=False)
class OrthonormalRows:
    """Orthonormal rows (d, P) in one or more blocks: adding a block copies nothing.

    >>> rows = OrthonormalRows((torch.eye(3)[:1],)).extend(torch.eye(3)[2:])
    >>> len(rows), rows.coordinates(torch.tensor([[1.0, 2.0, 3.0]]))
    (2, tensor([[1., 3.]]))
    """

    blocks: tuple[Tensor, ...]

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def extend(self, block: Tensor) -> OrthonormalRows:
        """Return these rows followed by another block (k, P), orthonormal to them."""
        return OrthonormalRows((*self.blocks, block))

    def coordinates(self, v: Tensor) -> Tensor:
        """Return the inner products (n, d) of every row of v (n, P) with the rows."""
        return torch.cat([v @ block.mT for block in self.blocks], 1)

    def combine(self, y: Tensor) -> Tensor:
        """Return the combinations (n, P) of the rows with coefficients y (n, d)."""
        first, *rest = zip(y.split([len(block) for block in self.blocks], 1), self.blocks, strict=True)
        total = first[0] @ first[1]
        for part, block in rest:
            total.addmm_(part, block)
        return total

    def remove(self, v: Tensor) -> Tensor:
        """Return the part of v (n, P) that is orthogonal to the rows."""
        return v - self.combine(self.coordinates(v))


def thin_svd(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (left, singular, right) with rows (K, P) = left · diag(singular) · right; a QR first, since K is small."""
    tall, small = torch.linalg.qr(rows.mT)
    left, singular, turn = svd(small.mT)
    return left, singular, turn @ tall.mT


def orthonormal_rows(rows: Tensor, *, cut: float, against: OrthonormalRows | None = None) -> tuple[Tensor, Tensor]:
    """Return (mix, basis) with rows = mix[:, :k] · basis (k, P), without singular values up to ``cut``.

    ``mix`` (K, min(K, P)) has the columns of the directions that were left out too: mix[:, k:] is their part of the
    rows. Rows that are orthogonal to ``against`` are made so once more after normalisation, which amplifies rounding.

    >>> mix, basis = orthonormal_rows(torch.tensor([[2.0, 0.0], [4.0, 0.0]], dtype=torch.float64), cut=1e-12)
    >>> len(basis), (mix[:, :1] @ basis).round(decimals=6).abs()
    (1, tensor([[2., 0.],
            [4., 0.]], dtype=torch.float64))
    """
    left, singular, right = thin_svd(rows)
    basis = right[singular > cut]
    if against is not None and len(basis) and len(against):
        basis = against.remove(basis)
        tall, small = torch.linalg.qr(basis.mT)
        basis = tall.mT * small.diagonal().sign()[:, None]
    return left * singular, basis


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Leading eigenvalues ``values`` (r,), descending, with their eigenvectors as rows, ``vectors`` (r, P).

    ``residuals`` (r,) are |A u - s u| relative to the largest eigenvalue, and ``products`` is the number of products
    with a block of rows.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int


@dataclass(frozen=True, eq=False)
class BlockKrylov:
    """An orthonormal basis, ``rows``, of the Krylov space of a start block (K, P), and the operator A in that basis.

    ``projected`` (d, d) is basis · A · basisᵀ as the products gave it, symmetric up to their rounding. ``values`` (d,),
    descending, and ``turn`` (d, d) are the eigenvalues and eigenvectors (columns) of its symmetric part: Ritz values
    and vectors. ``ahead`` (k', P) is the next block; A maps the last k rows of the basis to the basis and, with
    coefficients ``edge`` (k, k), to the next block. ``lost`` (d,) and ``missed`` (K,) are the lengths of what was
    dropped as linearly dependent, from images of the basis and from the start block.
    """

    rows: OrthonormalRows
    values: Tensor
    turn: Tensor
    start: Tensor
    projected: Tensor
    edge: Tensor
    ahead: Tensor
    lost: Tensor
    missed: Tensor
    products: int
    tolerance: float

    @property
    def coordinates(self) -> Tensor:
        """Coordinates (K, d) of the start block in the basis."""
        return pad(self.start, (0, len(self.rows) - self.start.shape[1]))

    @property
    def exhausted(self) -> bool:
        """Whether the space is invariant under the operator, so that every solve in it is exact."""
        return len(self.ahead) == 0

    def solve(
        self, weights: Tensor, shift: float | Tensor, *, tolerance: float = 1e-6, sizes: Tensor | None = None
    ) -> Solution:
        """Return the best solution of (A + shift I) x = weights (n, K) · start in this space, without new products.

        There is one shift, or one for each row (n,). The residual combines its part inside the basis, its part along
        the next block and a bound for what was dropped as dependent. It is relative to the right-hand sides, or to
        ``sizes`` (n,); the solution has converged if it is at most the tolerance.
        """
        shifts = torch.as_tensor(shift, dtype=torch.float64, device=self.start.device).reshape(-1, 1)
        weights = weights.to(self.start)
        self._refuse_indefinite(shifts)
        target = weights @ self.coordinates
        y = (target @ self.turn / (self.values + shifts)) @ self.turn.mT
        lengths = self._remainder(y, target, shifts) + weights.abs() @ self.missed
        residuals = lengths / (target.norm(dim=1) if sizes is None else sizes).clamp_min(TINY)
        return Solution(self.rows.combine(y), residuals, self.products, tolerance)

    def inverse_root(self, shift: float) -> Product:
        """Return the product with a symmetric root of an approximation to shift · (A + shift I)⁻¹.

        It is exact on the Ritz vectors and the identity elsewhere: a preconditioner for block conjugate gradients.
        """
        ratios = (shift / (self.values.clamp_min(0) + shift)).sqrt() - 1
        inner = (self.turn * ratios) @ self.turn.mT
        return lambda v: v + self.rows.combine(self.rows.coordinates(v) @ inner)

    def image(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return A times the projection of rows (n, P) onto the basis, and the length (n,) of the rest of each row.

        Takes no new products. Exact for rows in the basis, up to what was dropped as dependent.
        """
        y = self.rows.coordinates(rows.to(self.start))
        inside = self.rows.combine(y @ self.projected)
        outside = y[:, y.shape[1] - len(self.edge) :] @ self.edge[:, : len(self.ahead)] @ self.ahead
        return inside + outside, (rows - self.rows.combine(y)).norm(dim=1)

    def pairs(self, rank: int | None = None) -> Eigenpairs:
        """Return the leading Ritz pairs."""
        vectors = self.rows.combine(self.turn.mT[:rank])
        return Eigenpairs(self.values[:rank], vectors, self.pair_residuals(rank), self.products)

    def pair_residuals(self, rank: int | None = None) -> Tensor:
        """Return the residuals of the leading Ritz pairs, relative to the largest value; forms no vectors."""
        y, scale = self.turn.mT[:rank], self.values[:1].abs().clamp_min(TINY)
        return self._remainder(y, torch.zeros_like(y), -self.values[:rank, None]) / scale

    def widen(self, rows: Tensor) -> BlockKrylov:
        """Return the space with rows (n, P) added to its next block; orthonormal to each other, basis and block.

        The images of the basis have no component along them, so their columns of ``edge`` are zero.
        """
        known, dropped = self.edge.split([len(self.ahead), self.edge.shape[1] - len(self.ahead)], 1)
        edge = torch.cat([known, known.new_zeros(len(known), len(rows)), dropped], 1)
        return replace(self, ahead=torch.cat([self.ahead, rows]), edge=edge)

    def extend(self, product: Product, steps: int, *, max_basis: int | None = None) -> BlockKrylov:
        """Return the space after more products. Each product adds a block.

        Stops early if the space is invariant or the next block would exceed ``max_basis`` rows.
        """
        basis, (_, size) = self.rows, self.ahead.shape
        room = min(size, len(basis) + steps * len(self.ahead), max_basis or size)
        more = room - len(basis)
        projected, lost = pad(self.projected, (0, more, 0, more)), pad(self.lost, (0, more))
        block, edge, products = self.ahead, self.edge, self.products
        scale = float(projected.norm(dim=1).max()) if room else 0.0
        while products < self.products + steps and 0 < len(block) <= room - len(basis):
            new, last = slice(len(basis), len(basis) + len(block)), slice(len(basis) - len(edge), len(basis))
            projected[last, new] = edge[:, : len(block)]
            lost[last] = edge[:, len(block) :].norm(dim=1)
            basis, products = basis.extend(block), products + 1
            image = apply_checked(product, block)
            scale = max(scale, float(image.norm(dim=1).max()))
            for _ in range(2):
                inside = basis.coordinates(image)
                projected[new, : new.stop] += inside
                image = image - basis.combine(inside)
            # Each row is divided by its rounding, which the asymmetry shows, before small directions are dropped: a
            # row with a small image has small rounding, and a common threshold would drop what it contributes.
            skew = (projected[new, : new.stop] - projected[: new.stop, new].mT).norm(dim=1, keepdim=True)
            noise = skew.clamp_min(max(self.tolerance * scale, TINY))
            edge, block = orthonormal_rows(image / noise, cut=1.0, against=basis)
            edge = edge * noise
        rank = len(basis)
        projected, lost = projected[:rank, :rank], lost[:rank]
        values, turn = eigh(0.5 * (projected + projected.mT))
        return replace(
            self, rows=basis, values=values.flip(0), turn=turn.flip(1), projected=projected,
            edge=edge, ahead=block, lost=lost, products=products,
        )  # fmt: skip

    def _remainder(self, y: Tensor, target: Tensor, shifts: Tensor) -> Tensor:
        """Return the length of target · basis - (A + shift) · (y · basis), for every row."""
        inside = (target - y @ self.projected - shifts * y).norm(dim=1)
        outside = (y[:, y.shape[1] - len(self.edge) :] @ self.edge).norm(dim=1)
        return torch.hypot(inside, outside) + y.abs() @ self.lost

    def _refuse_indefinite(self, shifts: Tensor) -> None:
        """Raise if the smallest Ritz value plus a shift is not above zero."""
        if len(self.values) == 0:
            return
        smallest = float(self.values[-1] + shifts.min())
        if smallest <= torch.finfo(torch.float64).eps * float(self.values[0].abs()):
            raise NumericalError(
                f"a shifted operator is not positive definite: it has a Ritz value of {smallest:.3g}; expected above "
                "zero. Raise the prior precision, or the noise, which is nearly zero for a network that interpolates "
                "its data; or take float64 where products are float32."
            )


def block_krylov(
    product: Product, start: Tensor, steps: int, *, tolerance: float = 1e-12, max_basis: int | None = None
) -> BlockKrylov:
    """Build a Krylov space by block Lanczos from ``start`` (K, P), with full reorthogonalisation, twice.

    Takes ``steps`` products of up to K rows. Directions with a singular value of at most ``tolerance`` are dropped as
    dependent, relative to the rows for the start and to the largest for images; so are directions below the rounding
    of a row's product, which its asymmetry shows. The basis is float64: d P numbers.
    Exact when: the space is exhausted. Reference: Golub & Underwood 1977.

    >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    >>> space = block_krylov(lambda v: v @ a, torch.ones(1, 3, dtype=torch.float64), steps=3)
    >>> space.solve(torch.ones(1, 1), shift=1.0).x
    tensor([[0.5000, 0.3333, 0.2000]], dtype=torch.float64)
    >>> space.solve(torch.ones(1, 1), shift=4.0).x
    tensor([[0.2000, 0.1667, 0.1250]], dtype=torch.float64)
    """
    check_finite(start, "the start block of a Krylov space")
    rows = start.double()
    lengths = rows.norm(dim=1, keepdim=True)
    mix, block = orthonormal_rows(rows / lengths.clamp_min(TINY), cut=tolerance)
    mix, none, square = mix * lengths, rows.new_zeros(0), rows.new_zeros(0, 0)
    empty = BlockKrylov(
        OrthonormalRows((block[:0],)), none, square, mix[:, : len(block)], square, square.new_zeros(0, len(block)),
        block, none, mix[:, len(block) :].norm(dim=1), 0, tolerance,
    )  # fmt: skip
    return empty.extend(product, steps, max_basis=max_basis)


def leading_eigenpairs(
    product: Product,
    size: int,
    rank: int,
    *,
    block: int = 16,
    tolerance: float = 1e-3,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Eigenpairs:
    """Return the leading eigenpairs of a positive semi-definite operator on vectors of length ``size``.

    Block Lanczos with full reorthogonalisation and Rayleigh-Ritz. The basis grows by one block with each product until
    the residuals of the leading ``rank`` pairs are at most ``tolerance``, or it has max(2 rank, rank + 20) vectors (the
    last block is completed). An operator of lower rank ends early and exactly. Before the end, a block of random
    vectors looks for copies of an eigenvalue, since the first block shows at most as many copies as it has rows. Two
    products of two rows check first that the operator is symmetric and does not change.

    >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    >>> [round(float(value), 4) for value in leading_eigenpairs(lambda v: v @ a, size=3, rank=2).values]
    [4.0, 2.0]
    """
    refuse_asymmetric(product, size, generator=torch.Generator().manual_seed(0), device=device)
    rank = min(rank, size)
    limit = min(size, max(2 * rank, rank + OVERSAMPLE))
    block = min(block, limit)
    most = min(size, limit + block - 1)
    like = torch.empty(0, dtype=torch.float64, device=device)
    space = block_krylov(product, normal((block, size), generator, like), 1, tolerance=1e2 * EPS, max_basis=most)
    probes = 0
    while True:
        enough = len(space.rows) >= rank and bool((space.pair_residuals(rank) <= tolerance).all())
        if space.exhausted or enough:
            room = most - len(space.rows) - len(space.ahead)
            random = _outside(space, normal((block, size), generator, like))[: max(room, 0)]
            if len(random) == 0:
                break
            probes += 1
            if not _has_larger(product, random, space, rank):
                break
            space = space.widen(random)
        if len(space.ahead) > most - len(space.rows):
            break
        space = space.extend(product, 1)
    pairs = space.pairs(rank)
    return replace(pairs, values=pairs.values.clamp_min(0), products=space.products + probes)


def _outside(space: BlockKrylov, rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the part of the rows that is orthogonal to the space and its next block."""
    known = space.rows.extend(space.ahead)
    outside = known.remove(known.remove(rows / rows.norm(dim=1, keepdim=True)))
    return orthonormal_rows(outside, cut=1e2 * EPS, against=known)[1]


def _has_larger(product: Product, rows: Tensor, space: BlockKrylov, rank: int) -> bool:
    """Return whether u·Au is above the smallest of the leading eigenvalues for any of the rows u; one product."""
    largest = float((rows * apply_checked(product, rows)).sum(1).max())
    smallest = float(space.values[rank - 1]) if len(space.values) >= rank else 0.0
    return largest > smallest + 1e3 * EPS * float(space.values[0].abs())


RANDOM_OVERSAMPLE = 10  # random vectors beyond the rank


@dataclass(frozen=True, eq=False)
class RandomisedEigenpairs:
    """Eigenvalues (r,), positive, and orthonormal eigenvectors as rows (r, n); A ≈ Σ value · vectorᵀ vector.

    The functions below belong to P = Σ value · vectorᵀ vector + shift I, an approximation of A + shift I.
    """

    values: Tensor
    vectors: Tensor

    def power(self, rows: Tensor, shift: float, exponent: float) -> Tensor:
        """Return P to a power times the rows (K, n), in float64."""
        wide, rest = rows.double(), shift**exponent
        inside = (self.values + shift) ** exponent - rest
        return rest * wide + (wide @ self.vectors.mT * inside) @ self.vectors

    def logdet(self, shift: float) -> float:
        """Return the log-determinant of P."""
        values = torch.cat([self.values + shift, self.values.new_tensor([shift])]).log()
        return float(values[:-1].sum() + (self.vectors.shape[1] - len(self.values)) * values[-1])


def randomised_eigenpairs(
    product: Product,
    size: int,
    rank: int,
    generator: torch.Generator | None,
    device: torch.device | None = None,
    iterations: int = 1,
) -> RandomisedEigenpairs:
    """Return the leading eigenpairs of a symmetric positive semi-definite operator, approximately.

    Cost: ``iterations`` + 1 products of ``rank`` + 10 rows. Reference: Halko, Martinsson & Tropp 2011, algorithms 4.4
    and 5.3.

    Args:
        product: multiplies rows (K, size) by the operator.
        size: the number of columns of the operator.
        rank: the number of eigenpairs; fewer are returned if the others are zero in rounding.
        generator: draws the random vectors.
        device: where the rows are; the CPU if None.
        iterations: the number of products that turn random vectors towards the leading ones.

    >>> a = torch.diag(torch.tensor([5.0, 2.0, 1e-9], dtype=torch.float64))
    >>> randomised_eigenpairs(lambda v: v @ a, 3, 2, torch.Generator().manual_seed(0)).values.round(decimals=6)
    tensor([5., 2.], dtype=torch.float64)
    """
    like = torch.empty(0, dtype=torch.float64, device=device)
    basis = normal_rows(min(size, rank + RANDOM_OVERSAMPLE), size, generator, like)
    for _ in range(iterations):
        basis = torch.linalg.qr(apply_checked(product, basis).mT)[0].mT
    inner = apply_checked(product, basis) @ basis.mT
    values, turn = eigh(0.5 * (inner + inner.mT))
    values, turn = values.flip(0)[:rank], turn.flip(1)[:, :rank]
    kept = values > 1e-14 * values[0].clamp_min(0)
    return RandomisedEigenpairs(values[kept], turn[:, kept].mT @ basis)


CHECK_EVERY = 20  # iterations between two computations of b - A x
MAX_DRIFT = 0.1  # relative difference between the updated and the computed residual that is tolerated
SINGULAR = 1e2 * EPS  # of the largest curvature: rounding of float64 products leaves curvature of this size
ADVICE = (
    "Raise max_iterations, use a preconditioner, raise the prior precision, or take float64 where products are float32."
)
TRANSPOSE_TOLERANCE = 1e-3  # relative difference by rounding that is tolerated between a root and its transpose
ROUNDING_RESIDUAL = 1e-12  # relative residuals of samples below this are rounding


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
        q = apply_checked(product, p)
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
    root = _check_root(root)
    adjoint = root if adjoint is None else _check_root(adjoint)
    monitor = ResidualMonitor(product, b, b.new_ones(len(b)), tolerance)
    x, r, turned = torch.zeros_like(b), b.clone(), adjoint(b)
    mix, q = _residual_basis(turned)
    s, largest, iterations, active = q, 0.0, 0, monitor.active(r)
    while iterations < max_iterations and len(q) and bool(active.any()):
        s, gram_factor = _independent(s, q)
        directions = root(s)
        image = apply_checked(product, directions)
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


def _check_root(root: Product | None) -> Product:
    """Return the product of a preconditioner's root with its images checked; the identity without a root."""
    return identity if root is None else lambda rows: apply_checked(root, rows)


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
    return bool(((rows - expected).norm(dim=1) > MAX_DRIFT * expected.norm(dim=1))[active].any())


def _refuse_no_adjoint(s: Tensor, root_s: Tensor, b: Tensor, adjoint_b: Tensor) -> None:
    """Raise unless (L s) · b equals s · (Lᵀ b), relative to the lengths of these vectors.

    If L is nearly zero along s, it is the difference of larger numbers, so their rounding is tolerated.
    """
    sizes = root_s.norm(dim=1)[:, None] * b.norm(dim=1) + s.norm(dim=1)[:, None] * adjoint_b.norm(dim=1)
    rounding = 1e3 * EPS * s.norm(dim=1)[:, None] * b.norm(dim=1)
    gap = (root_s @ b.mT - s @ adjoint_b.mT).abs() / (sizes + rounding / TRANSPOSE_TOLERANCE).clamp_min(TINY)
    if not float(gap.max()) <= TRANSPOSE_TOLERANCE:
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
    return torch.maximum(noise.norm(dim=1), ROUNDING_RESIDUAL / tolerance * rhs.norm(dim=1))


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
        allowed = torch.maximum(MAX_DRIFT * residual.norm(dim=1), 10 * EPS * self._norm * x.norm(dim=1))
        above = self._computed > enough
        drifted = above & ((computed - residual).norm(dim=1) > allowed)
        all_drifted = bool(above.any()) and torch.equal(above, drifted)
        worst = float((self._computed / enough)[above].max()) if all_drifted else 0.0
        self.stalled = worst > 0.5 * self._previous
        self._previous = worst or torch.inf
        if last and bool(above.any()):
            self._target = self._tolerance / (1 + MAX_DRIFT)
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


CONVERGED_RESIDUAL = 1e-2  # residual of a Ritz pair, relative to its own value, up to which its value counts as exact
CUT = 1e-12  # a new direction shorter than this, relative to the largest image, counts as zero


@dataclass(frozen=True, eq=False)
class Logdet:
    """An estimate of log det(I + A/shift): ``value`` is differentiable in the shift, ``error`` one standard error."""

    value: Tensor
    error: float


@dataclass(frozen=True, eq=False)
class DeflatedSpectrum:
    """The spectrum of A as eigenvalues (r,) that are known and a quadrature of A on the orthogonal complement.

    ``rank`` is the number of rows of the basis that the eigenvalues come from.
    """

    eigenvalues: Tensor
    rest: Quadrature
    rank: int

    @classmethod
    def of(cls, product: Product, basis: BlockKrylov, probes: Tensor, steps: int) -> DeflatedSpectrum:
        """Estimate the spectrum from the converged Ritz pairs of a basis and random ``probes`` (K, P).

        Cost: ``steps`` products of K rows.
        """
        # Part of a pair that has not converged would be counted twice. Its residual is compared with its value:
        # the coupling to the rest adds the squared residual over value and shift, which may be far below the largest.
        converged = basis.pair_residuals() * basis.values[:1] <= CONVERGED_RESIDUAL * basis.values
        inner = basis.turn[:, converged] @ basis.turn[:, converged].mT
        project = lambda v: v - basis.rows.combine(basis.rows.coordinates(v) @ inner)  # removes the converged pairs
        for _ in range(2):
            probes = project(probes)
        # Project before and after the product: otherwise rounding would bring the deflated pairs back.
        rest = lanczos_quadrature(lambda v: project(product(project(v))), probes, steps)
        return cls(basis.values[converged], rest, len(basis.rows))

    def logdet(self, shift: Tensor) -> Logdet:
        """Estimate log det(I + A/shift); the error is the standard error over probes plus half the quadrature gap."""
        values, probes = self.eigenvalues.to(shift).clamp_min(0), len(self.rest.nodes)
        low, high = self.rest.ends(lambda nodes: torch.log1p(nodes.clamp_min(0) / shift))
        middle = 0.5 * (low + high)
        spread = float(middle.detach().std()) / probes**0.5 if probes > 1 else float("inf")
        bias = 0.5 * float((high - low).detach().mean().abs())
        return Logdet(torch.log1p(values / shift).sum() + middle.mean(), spread + bias)


@dataclass(frozen=True, eq=False)
class Quadrature:
    """Nodes and weights for each of K rows v (P,), with Σ weight · f(node) ≈ v f(A) vᵀ.

    ``nodes`` and ``weights`` (K, m) are those of Gauss; ``low_nodes`` and ``low_weights`` (K, m + 1) those of
    Gauss-Radau with a node at zero, the lower end of a positive semi-definite spectrum.
    """

    nodes: Tensor
    weights: Tensor
    low_nodes: Tensor
    low_weights: Tensor

    def ends(self, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return a lower and an upper bound (K,) of v f(A) vᵀ.

        They are bounds if the derivatives of f alternate in sign and the first one is positive, as for log(1 + x/a)
        and x/(x + a).
        """
        return (function(self.low_nodes) * self.low_weights).sum(1), (function(self.nodes) * self.weights).sum(1)


def random_signs(count: int, size: int, generator: torch.Generator | None, device: torch.device | None) -> Tensor:
    """Draw Rademacher rows (count, size) in float64, the probes of a stochastic estimate of a trace."""
    like = torch.empty(0, dtype=torch.float64, device=device)
    return torch.where(uniform((count, size), generator, like) < 0.5, -1.0, 1.0).to(like)


def lanczos_quadrature(product: Product, rows: Tensor, steps: int) -> Quadrature:
    """Return the quadrature after Lanczos steps on each row (K, P), with full reorthogonalisation, twice.

    The rows do not mix, but share one product at each step. A row whose Krylov space is exhausted continues as zeros.
    Memory: steps · K · P numbers in float64.
    Reference: Golub & Meurant 1994.

    >>> a = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    >>> quadrature = lanczos_quadrature(lambda v: v @ a, torch.ones(1, 2, dtype=torch.float64), steps=2)
    >>> [round(float(end), 6) for end in quadrature.ends(torch.log1p)]  # log 2 + log 4
    [2.079442, 2.079442]
    """
    rows = rows.double()
    count, size = rows.shape
    steps = min(steps, size)
    lengths = rows.norm(dim=1)
    q = torch.where(lengths[:, None] > 0, rows / lengths[:, None], 0.0)
    basis = rows.new_zeros(count, steps, size)
    small = rows.new_zeros(count, steps + 1, steps + 1)
    scale, step = rows.new_zeros(()), 0
    for step in range(steps):
        basis[:, step] = q
        image = apply_checked(product, q)
        scale = torch.maximum(scale, image.norm(dim=1).max())
        small[:, step, step] = (image * q).sum(1)
        previous = basis[:, : step + 1]
        for _ in range(2):
            image = image - ((previous @ image[:, :, None]).mT @ previous)[:, 0]
        beta = image.norm(dim=1)
        live = beta > CUT * scale
        small[:, step, step + 1] = small[:, step + 1, step] = torch.where(live, beta, 0.0)
        q = torch.where(live[:, None], image / beta[:, None], 0.0)
        if not bool(live.any()):
            break
    return _rules(small[:, : step + 2, : step + 2], lengths.square())


def _rules(small: Tensor, mass: Tensor) -> Quadrature:
    """Return both rules from the tridiagonal matrices (K, m + 1, m + 1), whose last entry is not set yet."""
    nodes, turn = eigh(small[:, :-1, :-1])
    end = nodes.min().clamp_max(0)
    # The last entry that makes ``end`` an eigenvalue of the longer matrix.
    inverse = (turn[:, -1].square() / (nodes - end).clamp_min(TINY)).sum(1)
    coupling = small[:, -1, -2].square()
    longer = small.clone()
    longer[:, -1, -1] = end + torch.where(coupling > 0, coupling * inverse, 0.0)
    low_nodes, low_turn = eigh(longer)
    weights, low_weights = turn[:, 0].square() * mass[:, None], low_turn[:, 0].square() * mass[:, None]
    return Quadrature(nodes, weights, low_nodes, low_weights)
