"""Block Krylov spaces, each of which serves a block of right-hand sides and every shift of the operator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from lapwing.core.data import check_finite
from lapwing.errors import NumericalError
from lapwing.linalg.operators import Product, applied
from lapwing.linalg.orthogonal import OrthonormalRows, orthonormal_rows
from lapwing.linalg.solution import Solution

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Leading eigenvalues ``values`` (r,), descending, with their eigenvectors as rows, ``vectors`` (r, P).

    ``residuals`` (r,) are |A u - s u| relative to the largest eigenvalue, ``products`` is the number of products with
    a block of rows, and ``tolerance`` is the residual that was asked for.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int
    tolerance: float = 1e-3

    @property
    def converged(self) -> bool:
        """Whether every residual is at most the tolerance."""
        return bool((self.residuals <= self.tolerance).all())


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
        self,
        weights: Tensor,
        shift: float | Tensor,
        *,
        tolerance: float = 1e-6,
        sizes: Tensor | None = None,
        truncated: bool = False,
    ) -> Solution:
        """Solve (A + shift I) x = weights (n, K) · start without new products; one shift, or one for each row (n,).

        The residual combines its part inside the basis, its part along the next block and a bound for what was dropped
        as dependent. It is relative to the right-hand sides, or to ``sizes`` (n,). Raises if it is above the tolerance,
        unless ``truncated`` asks for the best solution in this space.
        """
        shifts = torch.as_tensor(shift, dtype=torch.float64, device=self.start.device).reshape(-1, 1)
        weights = weights.to(self.start)
        self._refuse_indefinite(shifts)
        target = weights @ self.coordinates
        y = (target @ self.turn / (self.values + shifts)) @ self.turn.mT
        left = self._remainder(y, target, shifts) + weights.abs() @ self.missed
        residuals = left / (target.norm(dim=1) if sizes is None else sizes).clamp_min(TINY)
        solution = Solution(self.rows.combined(y), residuals, self.products, tolerance)
        advice = "Take more steps, add rows to the start block, or raise the prior precision."
        return solution if truncated else solution.require_convergence("a solve in a Krylov space", advice)

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
        y = self.turn.mT[:rank]
        return Eigenpairs(self.values[:rank], self.rows.combined(y), self.pair_residuals(rank), self.products)

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
        projected, lost = self._padded(room)
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
        values, turn = torch.linalg.eigh(0.5 * (projected + projected.mT))
        return replace(
            self, rows=basis, values=values.flip(0), turn=turn.flip(1), projected=projected,
            edge=edge, ahead=block, lost=lost, products=products,
        )  # fmt: skip

    def _padded(self, room: int) -> tuple[Tensor, Tensor]:
        """Return ``projected`` and ``lost`` with zeros for a basis of ``room`` rows."""
        more = room - len(self.rows)
        return pad(self.projected, (0, more, 0, more)), pad(self.lost, (0, more))

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
    if steps < 1:
        raise ValueError(f"a Krylov space needs at least one step, not {steps}.")
    check_finite(start, "the start block of a Krylov space")
    rows = start.double()
    lengths = rows.norm(dim=1, keepdim=True)
    mix, block = orthonormal_rows(rows / lengths.clamp_min(TINY), cut=tolerance)
    if max_basis is not None and max_basis < len(block):
        raise ValueError(f"the start block has rank {len(block)}, more than a basis of {max_basis}; raise max_basis.")
    mix, none, square = mix * lengths, rows.new_zeros(0), rows.new_zeros(0, 0)
    empty = BlockKrylov(
        OrthonormalRows((block[:0],)), none, square, mix[:, : len(block)], square, square.new_zeros(0, len(block)),
        block, none, mix[:, len(block) :].norm(dim=1), 0, tolerance,
    )  # fmt: skip
    return empty.extended(product, steps, max_basis=max_basis)
