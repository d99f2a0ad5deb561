"""A few leading eigenpairs of the curvature, without the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.errors import UnsupportedError
from lapwing.curvature.blockwise import BlockwisePrecision
from lapwing.curvature.kernel import prior_precision
from lapwing.curvature.structures import floored_by_layer
from lapwing.linalg.cholesky import cholesky
from lapwing.networks.blocks import Block
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.selection import Selection
from lapwing.priors.gaussian import Prior


@dataclass(frozen=True, eq=False)
class LowRankPrecision:
    r"""Λ = W Wᵀ + A with W = U √(S/φ), by the Woodbury identity.

    $$ \Lambda^{-1} = A^{-1} - A^{-1} W (I + W^\top A^{-1} W)^{-1} W^\top A^{-1} $$
    """

    prior: Prior
    tall: Tensor  # Wᵀ, (r, P)
    layout: tuple[Block, ...]
    selection: Selection

    @cached_property
    def _inner(self) -> Tensor:
        """The Cholesky factor of I + Wᵀ A⁻¹ W, (r, r)."""
        scaled = self.tall / self.prior.vector.to(self.tall)
        inner = torch.eye(len(self.tall), dtype=self.tall.dtype, device=self.tall.device) + scaled @ self.tall.mT
        return cholesky(inner, "the low-rank part")

    def logdet(self) -> Tensor:
        return self.prior.logdet().double() + 2 * self._inner.diagonal().log().sum()

    @cached_property
    def _prior_only(self) -> BlockwisePrecision:
        return prior_precision(self.prior, self.layout, self.selection)

    def _pulled(self, jacobian: LayerJacobians) -> Tensor:
        """L⁻¹ Wᵀ A⁻¹ Jᵀ, (r, B, K)."""
        moved = jacobian.jvp(self.tall / self.prior.vector.to(self.tall)).to(self.tall)
        flat = moved.flatten(1)
        return torch.linalg.solve_triangular(self._inner, flat, upper=False).reshape(moved.shape)

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        # The difference cancels where the data leave little variance: both terms in float64.
        jacobian, dtype = jacobian.double(), jacobian.dtype
        before = self._prior_only.quadratic(jacobian, full)
        rows = self._pulled(jacobian).permute(1, 2, 0).reshape(*before.shape[:3], -1)
        gained = rows @ rows.mT if full else rows.square().sum(-1)
        return (before - gained).to(dtype)

    def cross(self, jacobian: LayerJacobians) -> Tensor:
        jacobian, dtype = jacobian.double(), jacobian.dtype
        before = self._prior_only.cross(jacobian)
        rows = self._pulled(jacobian).flatten(1).mT
        return (before - rows @ rows.mT).to(dtype)

    def sample(self, eps: Tensor) -> Tensor:
        """A^-½ (I - V (I - (I + s²)^-½) Vᵀ) eps with V s the singular factors of A^-½ W."""
        root = self.prior.vector.to(self.tall).rsqrt()
        _, singular, right = torch.linalg.svd(self.tall * root, full_matrices=False)
        shrink = 1 - (1 + singular.square()).rsqrt()
        eps = eps.to(self.tall)
        return root * (eps - ((eps @ right.mT) * shrink) @ right)

    def solve(self, v: Tensor) -> Tensor:
        scaled = v.to(self.tall) / self.prior.vector.to(self.tall)
        inner = torch.cholesky_solve((scaled @ self.tall.mT).mT, self._inner).mT
        return (scaled - (inner @ self.tall) / self.prior.vector.to(self.tall)).to(v)

    def variances(self) -> Tensor:
        spread = 1 / self.prior.vector.to(self.tall)
        rows = torch.linalg.solve_triangular(self._inner, self.tall * spread, upper=False)
        return spread - rows.square().sum(0)


@dataclass(frozen=True, eq=False)
class LowRankCurvature:
    """H ≈ Uᵀ S U at unit dispersion: ``values`` (r,), ``vectors`` (r, P) as rows."""

    values: Tensor
    vectors: Tensor
    layout: tuple[Block, ...]
    selection: Selection
    residual: float = 0.0

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
        return LowRankPrecision(prior, tall, self.layout, self.selection)

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
