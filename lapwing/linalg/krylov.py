"""Block Krylov spaces, which serve every shift of an operator, and its leading eigenpairs by block Lanczos."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from lapwing.core.inputs import check_finite
from lapwing.core.random import normal
from lapwing.core.spectra import eigh, svd
from lapwing.errors import NumericalError
from lapwing.linalg.operators import EPS, TINY, Product, Solution, applied, refuse_asymmetric

OVERSAMPLE = 20  # vectors in the basis of eigenpairs beyond their number, at least


@dataclass(frozen=True, eq=False)
class OrthonormalRows:
    """Orthonormal rows (d, P) in one or more blocks: adding a block copies nothing.

    >>> rows = OrthonormalRows((torch.eye(3)[:1],)).extended(torch.eye(3)[2:])
    >>> len(rows), rows.coordinates(torch.tensor([[1.0, 2.0, 3.0]]))
    (2, tensor([[1., 3.]]))
    """

    blocks: tuple[Tensor, ...]

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def extended(self, block: Tensor) -> OrthonormalRows:
        """Return these rows followed by another block (k, P), orthonormal to them."""
        return OrthonormalRows((*self.blocks, block))

    def coordinates(self, v: Tensor) -> Tensor:
        """Return the inner products (n, d) of every row of v (n, P) with the rows."""
        return torch.cat([v @ block.mT for block in self.blocks], 1)

    def combined(self, y: Tensor) -> Tensor:
        """Return the combinations (n, P) of the rows with coefficients y (n, d)."""
        first, *rest = zip(y.split([len(block) for block in self.blocks], 1), self.blocks, strict=True)
        total = first[0] @ first[1]
        for part, block in rest:
            total.addmm_(part, block)
        return total

    def removed(self, v: Tensor) -> Tensor:
        """Return the part of v (n, P) that is orthogonal to the rows."""
        return v - self.combined(self.coordinates(v))


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
        basis = against.removed(basis)
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
        return Solution(self.rows.combined(y), residuals, self.products, tolerance)

    def inverse_root(self, shift: float) -> Product:
        """Return the product with a symmetric root of an approximation to shift · (A + shift I)⁻¹.

        It is exact on the Ritz vectors and the identity elsewhere: a preconditioner for block conjugate gradients.
        """
        ratios = (shift / (self.values.clamp_min(0) + shift)).sqrt() - 1
        inner = (self.turn * ratios) @ self.turn.mT
        return lambda v: v + self.rows.combined(self.rows.coordinates(v) @ inner)

    def image(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return A times the projection of rows (n, P) onto the basis, and the length (n,) of the rest of each row.

        Takes no new products. Exact for rows in the basis, up to what was dropped as dependent.
        """
        y = self.rows.coordinates(rows.to(self.start))
        inside = self.rows.combined(y @ self.projected)
        outside = y[:, y.shape[1] - len(self.edge) :] @ self.edge[:, : len(self.ahead)] @ self.ahead
        return inside + outside, (rows - self.rows.combined(y)).norm(dim=1)

    def pairs(self, rank: int | None = None) -> Eigenpairs:
        """Return the leading Ritz pairs."""
        vectors = self.rows.combined(self.turn.mT[:rank])
        return Eigenpairs(self.values[:rank], vectors, self.pair_residuals(rank), self.products)

    def pair_residuals(self, rank: int | None = None) -> Tensor:
        """Return the residuals of the leading Ritz pairs, relative to the largest value; forms no vectors."""
        y, scale = self.turn.mT[:rank], self.values[:1].abs().clamp_min(TINY)
        return self._remainder(y, torch.zeros_like(y), -self.values[:rank, None]) / scale

    def widened(self, rows: Tensor) -> BlockKrylov:
        """Return the space with rows (n, P) added to its next block; orthonormal to each other, basis and block.

        The images of the basis have no component along them, so their columns of ``edge`` are zero.
        """
        known, dropped = self.edge.split([len(self.ahead), self.edge.shape[1] - len(self.ahead)], 1)
        edge = torch.cat([known, known.new_zeros(len(known), len(rows)), dropped], 1)
        return replace(self, ahead=torch.cat([self.ahead, rows]), edge=edge)

    def extended(self, product: Product, steps: int, *, max_basis: int | None = None) -> BlockKrylov:
        """Return the space after more products, each of which adds a block.

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
            basis, products = basis.extended(block), products + 1
            image = applied(product, block)
            scale = max(scale, float(image.norm(dim=1).max()))
            for _ in range(2):
                inside = basis.coordinates(image)
                projected[new, : new.stop] += inside
                image = image - basis.combined(inside)
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
                "zero. Raise the prior precision, or take float64 where products are float32."
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
    return empty.extended(product, steps, max_basis=max_basis)


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
            space = space.widened(random)
        if len(space.ahead) > most - len(space.rows):
            break
        space = space.extended(product, 1)
    pairs = space.pairs(rank)
    return replace(pairs, values=pairs.values.clamp_min(0), products=space.products + probes)


def _outside(space: BlockKrylov, rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the part of the rows that is orthogonal to the space and its next block."""
    known = space.rows.extended(space.ahead)
    outside = known.removed(known.removed(rows / rows.norm(dim=1, keepdim=True)))
    return orthonormal_rows(outside, cut=1e2 * EPS, against=known)[1]


def _has_larger(product: Product, rows: Tensor, space: BlockKrylov, rank: int) -> bool:
    """Return whether u·Au is above the smallest of the leading eigenvalues for any of the rows u; one product."""
    largest = float((rows * applied(product, rows)).sum(1).max())
    smallest = float(space.values[rank - 1]) if len(space.values) >= rank else 0.0
    return largest > smallest + 1e3 * EPS * float(space.values[0].abs())
