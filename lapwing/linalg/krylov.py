"""One Krylov space for a block of right-hand sides and for every shift of the operator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from lapwing.core.data import check_finite
from lapwing.errors import NumericalError
from lapwing.linalg.cg import Solution
from lapwing.linalg.operators import Product, applied
from lapwing.linalg.orthogonal import OrthonormalRows, orthonormal_rows

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Leading eigenpairs: ``values`` (r,), descending, ``vectors`` (r, P) as rows.

    ``residuals`` (r,) are |H u - s u| relative to the largest eigenvalue; ``products`` counts applications of
    the operator to a block, and ``tolerance`` is what was asked of the residuals.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int
    tolerance: float = 1e-3

    @property
    def converged(self) -> bool:
        return bool((self.residuals <= self.tolerance).all())


@dataclass(frozen=True, eq=False)
class BlockKrylov:
    """The operator seen from an orthonormal basis, ``rows``, of the Krylov space of a start block (K, P).

    ``projected`` (d, d) are the measured products, basis · A · basisᵀ, symmetric up to the rounding of the products;
    ``values`` (d,), descending, and ``turn`` (d, d) the eigenvalues and eigenvectors (columns) of its symmetric part.
    ``edge`` (k, k) is what leaves the basis from its last k rows, along ``ahead`` (k', P), the next block; ``lost``
    (d,) and ``missed`` (K,) are the lengths of what was dropped as dependent, from the basis and from the start.
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
    def basis(self) -> Tensor:
        """(d, P) in one piece, which is a copy."""
        return self.rows.whole()

    @property
    def coordinates(self) -> Tensor:
        """(K, d) with coordinates · basis = the start block."""
        return pad(self.start, (0, len(self.rows) - self.start.shape[1]))

    @property
    def exhausted(self) -> bool:
        """Whether the space is invariant under the operator: every solve in it is exact."""
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
        """Solve (A + shift I) x = weights (n, K) · start, with no new products; one shift, or one for each row (n,).

        The residuals are those of the measured products: with y the coordinates of x, what y · projected leaves
        inside the basis and what y_last · edge puts outside, and a bound for what was dropped; relative to the
        right-hand sides, or to ``sizes`` (n,). An answer above the tolerance raises, unless ``truncated`` says that
        the best in this space will do.
        """
        shifts = torch.as_tensor(shift, dtype=torch.float64, device=self.start.device).reshape(-1, 1)
        weights = weights.to(self.start)
        self._refuse_indefinite(shifts)
        target = weights @ self.coordinates
        y = (target @ self.turn / (self.values + shifts)) @ self.turn.mT
        left = self._remainder(y, target, shifts) + weights.abs() @ self.missed
        residuals = left / (target.norm(dim=1) if sizes is None else sizes).clamp_min(TINY)
        found = Solution(self.rows.combined(y), residuals, self.products, tolerance)
        advice = "Take more steps, add rows to the start block, or raise the prior precision."
        return found if truncated else found.settled("a solve in a Krylov space", advice)

    def image(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """A times what the basis holds of rows (n, P), with no new products, and the length of what it does not (n,).

        Exact for rows in the basis, up to what was dropped from it as dependent.
        """
        y = self.rows.coordinates(rows.to(self.start))
        inside = self.rows.combined(y @ self.projected)
        outside = y[:, y.shape[1] - len(self.edge) :] @ self.edge[:, : len(self.ahead)] @ self.ahead
        return inside + outside, (rows - self.rows.combined(y)).norm(dim=1)

    def pairs(self, rank: int | None = None) -> Eigenpairs:
        """The leading Ritz pairs, for deflation."""
        y = self.turn.mT[:rank]
        return Eigenpairs(self.values[:rank], self.rows.combined(y), self.pair_residuals(rank), self.products)

    def pair_residuals(self, rank: int | None = None) -> Tensor:
        """Of the leading Ritz pairs, relative to the largest value. Their vectors are not formed."""
        y, scale = self.turn.mT[:rank], self.values[:1].abs().clamp_min(TINY)
        return self._remainder(y, torch.zeros_like(y), -self.values[:rank, None]) / scale

    def widened(self, rows: Tensor) -> BlockKrylov:
        """The space with these rows (n, P) in its next block too: orthonormal, and to the basis and that block.

        Nothing of the operator's images was seen along them, so the last rows leave the basis without them.
        """
        known, dropped = self.edge.split([len(self.ahead), self.edge.shape[1] - len(self.ahead)], 1)
        edge = torch.cat([known, known.new_zeros(len(known), len(rows)), dropped], 1)
        return replace(self, ahead=torch.cat([self.ahead, rows]), edge=edge)

    def extended(self, product: Product, steps: int, *, max_basis: int | None = None) -> BlockKrylov:
        """The space after so many more products; each adds a block, unless nothing is left or ``max_basis`` is full."""
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
            # Rows in units of their own noise, of which asymmetry is a sign: a row with a small image has little, and
            # what it brings must not be measured by that of the others.
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
        more = room - len(self.rows)
        return pad(self.projected, (0, more, 0, more)), pad(self.lost, (0, more))

    def _remainder(self, y: Tensor, target: Tensor, shifts: Tensor) -> Tensor:
        """Length of target · basis - (A + shift) applied to y · basis, for every row."""
        inside = (target - y @ self.projected - shifts * y).norm(dim=1)
        outside = (y[:, y.shape[1] - len(self.edge) :] @ self.edge).norm(dim=1)
        return torch.hypot(inside, outside) + y.abs() @ self.lost

    def _refuse_indefinite(self, shifts: Tensor) -> None:
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
    """Block Lanczos from ``start`` (K, P) with full reorthogonalisation, twice; ``steps`` products of up to K rows.

    Directions of the start (relative to its rows) and of the images (relative to the largest) whose singular value is
    at most ``tolerance``, or the rounding of a row's product as its asymmetry shows it, add nothing and are dropped.
    The basis is float64: d P numbers.
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
    nothing = BlockKrylov(
        OrthonormalRows((block[:0],)), none, square, mix[:, : len(block)], square, square.new_zeros(0, len(block)),
        block, none, mix[:, len(block) :].norm(dim=1), 0, tolerance,
    )  # fmt: skip
    return nothing.extended(product, steps, max_basis=max_basis)
