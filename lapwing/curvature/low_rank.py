"""A few leading eigenpairs of the curvature, without the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lapwing.curvature.blockwise import BlockwisePrecision, prior_precision
from lapwing.curvature.structures import floored_by_layer
from lapwing.errors import UnsupportedError
from lapwing.linalg.cholesky import cholesky
from lapwing.networks.blocks import Block
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.selection import Selection
from lapwing.priors.gaussian import Prior

LOST = 1e-8  # the share of a prior variance below which what is left of it is not found by a difference


class Rows(Protocol):
    """r vectors of P weights, W (r, P): stored, or given by the network itself."""

    def gram(self, prior: Prior) -> Tensor:
        """W A⁻¹ Wᵀ, (r, r), differentiable in the precisions."""
        ...

    def pulled(self, jacobian: LayerJacobians, prior: Prior) -> Tensor:
        """W A⁻¹ Jᵀ, (r, B K)."""
        ...

    def times(self, v: Tensor) -> Tensor:
        """v Wᵀ for v (n, P): (n, r)."""
        ...

    def combined(self, c: Tensor) -> Tensor:
        """c W for c (n, r): (n, P)."""
        ...


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The vectors as they are, (r, P)."""

    w: Tensor

    def gram(self, prior: Prior) -> Tensor:
        return (self.w / prior.vector.to(self.w)) @ self.w.mT

    def pulled(self, jacobian: LayerJacobians, prior: Prior) -> Tensor:
        return jacobian.jvp(self.w / prior.vector.to(self.w)).to(self.w).flatten(1)

    def times(self, v: Tensor) -> Tensor:
        return v @ self.w.mT

    def combined(self, c: Tensor) -> Tensor:
        return c @ self.w


@dataclass(frozen=True, eq=False)
class LowRankPrecision:
    r"""Λ = Wᵀ W + A with W (r, P), by the Woodbury identity.

    $$ \Lambda^{-1} = A^{-1} - A^{-1} W^\top (I + W A^{-1} W^\top)^{-1} W A^{-1} $$
    """

    prior: Prior
    rows: Rows
    layout: tuple[Block, ...]
    selection: Selection

    @cached_property
    def _gram(self) -> Tensor:
        return self.rows.gram(self.prior)

    @cached_property
    def _inner(self) -> Tensor:
        """The Cholesky factor of I + W A⁻¹ Wᵀ, (r, r)."""
        inner = self._gram + torch.eye(len(self._gram), dtype=self._gram.dtype, device=self._gram.device)
        return cholesky(inner, "the low-rank part")

    def logdet(self) -> Tensor:
        return self.prior.logdet().double() + 2 * self._inner.diagonal().log().sum()

    @cached_property
    def _prior_only(self) -> BlockwisePrecision:
        return prior_precision(self.prior, self.layout, self.selection)

    def _pulled(self, jacobian: LayerJacobians) -> Tensor:
        """L⁻¹ W A⁻¹ Jᵀ, (r, B K)."""
        return torch.linalg.solve_triangular(self._inner, self.rows.pulled(jacobian, self.prior), upper=False)

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        # The difference cancels where the data leave little variance: both terms in float64.
        jacobian, dtype = jacobian.double(), jacobian.dtype
        before = self._prior_only.quadratic(jacobian, full)
        rows = self._pulled(jacobian).mT.reshape(*before.shape[:3], -1)
        gained = rows @ rows.mT if full else rows.square().sum(-1)
        if _cancel(before, gained, full):
            rows = self._left(jacobian).reshape(*before.shape[:3], -1)
            return (rows @ rows.mT if full else rows.square().sum(-1)).to(dtype)
        return (before - gained).to(dtype)

    def cross(self, jacobian: LayerJacobians) -> Tensor:
        jacobian, dtype = jacobian.double(), jacobian.dtype
        before = self._prior_only.cross(jacobian)
        rows = self._pulled(jacobian).mT
        gained = rows @ rows.mT
        if _cancel(before, gained, True):
            rows = self._left(jacobian)
            return (rows @ rows.mT).to(dtype)
        return (before - gained).to(dtype)

    def _left(self, jacobian: LayerJacobians) -> Tensor:
        r"""Rows (B K, P + r) whose products are J Λ⁻¹ Jᵀ: a sum of squares, for what the difference would lose.

        $$ J \Lambda^{-1} J^\top = \min_c |(J - c W) A^{-1/2}|^2 + |c|^2, \qquad
           c = J A^{-1} W^\top (I + W A^{-1} W^\top)^{-1} $$
        """
        c = torch.cholesky_solve(self.rows.pulled(jacobian, self.prior), self._inner).mT
        beside = jacobian.whole().flatten(0, 1) - self.rows.combined(c)
        return torch.cat([beside * self.prior.vector.to(beside).rsqrt(), c], 1)

    def sample(self, eps: Tensor) -> Tensor:
        root = self.prior.vector.double().rsqrt()
        return root * self._root(eps.to(root), root)

    def adjoint(self, v: Tensor) -> Tensor:
        root = self.prior.vector.double().rsqrt()
        return self._root(root * v.to(root), root)

    def _root(self, v: Tensor, root: Tensor) -> Tensor:
        """v - Yᵀ E (s (s + 1))⁻¹ Eᵀ Y v, with Y = W A^-½, Y Yᵀ = E (s² - 1) Eᵀ: the symmetric root of (I + Yᵀ Y)⁻¹."""
        return v - self.rows.combined(self.rows.times(v * root) @ self._taken) * root

    @cached_property
    def _taken(self) -> Tensor:
        """E (s (s + 1))⁻¹ Eᵀ, (r, r)."""
        values, turn = torch.linalg.eigh(self._gram)
        s = (1 + values.clamp_min(0)).sqrt()
        return (turn / (s * (s + 1))) @ turn.mT

    def solve(self, v: Tensor) -> Tensor:
        spread = self.prior.vector.double().reciprocal()
        scaled = v.to(spread) * spread
        inner = torch.cholesky_solve(self.rows.times(scaled).mT, self._inner).mT
        return (scaled - self.rows.combined(inner) * spread).to(v)

    def variances(self) -> Tensor:
        spread = self.prior.vector.double().reciprocal()
        eye = torch.eye(len(self._gram), dtype=self._gram.dtype, device=self._gram.device)
        rows = self.rows.combined(torch.linalg.solve_triangular(self._inner, eye, upper=False)) * spread
        return spread - rows.square().sum(0)


def _cancel(before: Tensor, gained: Tensor, full: bool) -> bool:
    """Whether a variance is so small a part of the prior's that their difference is rounding."""
    if full:
        before, gained = (t.diagonal(dim1=-2, dim2=-1) for t in (before, gained))
    return bool((before - gained < LOST * before).any())


@dataclass(frozen=True, eq=False)
class LowRankCurvature:
    """H ≈ Uᵀ S U at unit dispersion: ``values`` (r,), ``vectors`` (r, P) as rows."""

    values: Tensor
    vectors: Tensor
    layout: tuple[Block, ...]
    selection: Selection
    residual: float = 0.0
    preconditions: ClassVar[bool] = True

    def __add__(self, other: LowRankCurvature) -> LowRankCurvature:
        """Exact for what the two hold; the ranks add up."""
        if self.selection.names != other.selection.names:
            raise UnsupportedError("these curvatures belong to different networks or weights and do not add.")
        tall = torch.cat([c.values.sqrt()[:, None] * c.vectors for c in (self, other)])
        _, singular, right = torch.linalg.svd(tall, full_matrices=False)
        real = singular > 1e2 * torch.finfo(tall.dtype).eps * singular[0]
        return LowRankCurvature(
            singular.square()[real], right[real], self.layout, self.selection, max(self.residual, other.residual)
        )

    def precision(self, phi: Tensor, prior: Prior) -> LowRankPrecision:
        tall = self.values.sqrt()[:, None] * self.vectors / phi.to(self.values).sqrt()
        return LowRankPrecision(prior, StoredRows(tall), self.layout, self.selection)

    def logdet(self, phi: Tensor, prior: Prior) -> Tensor:
        """For one precision from the eigenvalues alone, since the vectors are orthonormal."""
        if prior.kind != "isotropic":
            return self.precision(phi, prior).logdet()
        alpha, values = prior.values.double(), self.values.double()
        return self.selection.size * alpha.log() + torch.log1p(values / (phi.to(values) * alpha)).sum()

    def diagonal(self) -> Tensor:
        own = self.values @ self.vectors.square()
        real = own > torch.finfo(own.dtype).eps * own.max()  # a dead layer has rounding in place of noughts
        return floored_by_layer(torch.where(real, own, 0), self.selection)

    def tensors(self) -> dict[str, Tensor]:
        residual = torch.tensor(self.residual, dtype=torch.float64)
        return {"values": self.values, "vectors": self.vectors, "residual": residual}


@dataclass(frozen=True, eq=False)
class BoundedCurvature(LowRankCurvature):
    r"""The part of H in some directions, with a bound on the rest: ``own`` (P,) is the diagonal of the whole H.

    $$ \log\det(A + H/\varphi) \le \log\det(A + \tilde H/\varphi) + \operatorname{tr} A^{-1} (H - \tilde H)/\varphi $$

    (Titsias 2009), under the prior for which the directions were chosen and its multiples. Without that term a prior
    that lets the directions left out run free would look the best.
    """

    own: Tensor | None = None

    @cached_property
    def _shown(self) -> Tensor:
        return self.values @ self.vectors.square()

    def unseen(self, phi: Tensor, prior: Prior) -> Tensor:
        """What the log-determinant has added for each weight, (P,): the diagonal of A⁻¹ (H - H̃)/φ."""
        assert self.own is not None
        return (self.own.double() - self._shown) / (prior.vector * phi.to(self.values))

    def logdet(self, phi: Tensor, prior: Prior) -> Tensor:
        return super().logdet(phi, prior) + self.unseen(phi, prior).sum().clamp_min(0)

    def diagonal(self) -> Tensor:
        assert self.own is not None
        return floored_by_layer(self.own.double(), self.selection)

    def tensors(self) -> dict[str, Tensor]:
        assert self.own is not None
        return {**super().tensors(), "own": self.own}

    def __add__(self, other: LowRankCurvature) -> LowRankCurvature:
        raise UnsupportedError("curvatures in directions of their own data do not add; fit all data at once.")
