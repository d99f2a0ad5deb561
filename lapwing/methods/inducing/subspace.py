"""A belief about the weights that allows a few directions and no others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.curvature.floors import floored_by_layer
from lapwing.linalg.cholesky import cholesky
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior


@dataclass(frozen=True, eq=False)
class SubspacePrecision:
    r"""theta = w̃ + Dᵀ c with c ~ N(0, G⁻¹) and G = D Λ Dᵀ: no variance outside the K directions D (K, P).

    Never above that of the exact posterior, since $D^\top (D \Lambda D^\top)^{-1} D \preceq \Lambda^{-1}$.
    """

    directions: Tensor
    inner: Tensor  # the Cholesky factor of G
    before: Tensor  # that of D A Dᵀ
    log_determinant: Tensor

    def logdet(self) -> Tensor:
        return self.log_determinant

    def _features(self, jacobian: LayerJacobians) -> Tensor:
        """L⁻¹ D Jᵀ, (K, B, C)."""
        moved = jacobian.jvp(self.directions).to(self.inner)
        return torch.linalg.solve_triangular(self.inner, moved.flatten(1), upper=False).reshape(moved.shape)

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        rows = self._features(jacobian).permute(1, 2, 0).unflatten(1, (jacobian.tokens, -1))
        return (rows @ rows.mT if full else rows.square().sum(-1)).to(jacobian.dtype)

    def cross(self, jacobian: LayerJacobians) -> Tensor:
        rows = self._features(jacobian).flatten(1).mT
        return (rows @ rows.mT).to(jacobian.dtype)

    def sample(self, eps: Tensor) -> Tensor:
        """From the first K columns of eps."""
        kept = eps[:, : len(self.inner)].to(self.inner)
        return torch.linalg.solve_triangular(self.inner.mT, kept.mT, upper=True).mT @ self.directions

    def adjoint(self, v: Tensor) -> Tensor:
        """K columns, then noughts."""
        found = v.to(self.inner).new_zeros(v.shape)
        inside = torch.linalg.solve_triangular(self.inner, self.directions @ v.to(self.inner).mT, upper=False)
        found[:, : len(self.inner)] = inside.mT
        return found

    def solve(self, v: Tensor) -> Tensor:
        return self.sample(self.adjoint(v)).to(v)

    def variances(self) -> Tensor:
        return torch.linalg.solve_triangular(self.inner, self.directions, upper=False).square().sum(0)

    def decided(self, precision: Tensor) -> Tensor:
        """γ of every weight, (P,), under prior precisions (P,): what the prior allows it less what the data leave."""
        allowed = torch.linalg.solve_triangular(self.before, self.directions, upper=False).square().sum(0)
        return precision.to(allowed) * (allowed - self.variances())


@dataclass(frozen=True, eq=False)
class SubspaceCurvature:
    """H within K directions D (K, P): ``gram`` is D H Dᵀ at unit dispersion, (K, K)."""

    directions: Tensor
    gram: Tensor
    selection: Selection

    def _prior(self, prior: BoundPrior) -> Tensor:
        """D A Dᵀ, (K, K)."""
        return (self.directions * prior.vector.to(self.gram)) @ self.directions.mT

    def precision(self, phi: Tensor, prior: BoundPrior) -> SubspacePrecision:
        before = self._prior(prior)
        inner = cholesky(self.gram / phi.to(self.gram) + before, "the subspace")
        root = cholesky(before, "the subspace")
        outside = prior.logdet().double() - 2 * root.diagonal().log().sum()
        return SubspacePrecision(self.directions, inner, root, outside + 2 * inner.diagonal().log().sum())

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Of H/φ + A with no curvature outside the directions; from eigenvalues where there is one precision."""
        if not prior.is_isotropic:
            return self.precision(phi, prior).logdet()
        alpha = prior.values.double()
        return self.selection.size * alpha.log() + torch.log1p(self._values / (phi.to(alpha) * alpha)).sum()

    @cached_property
    def _values(self) -> Tensor:
        """The eigenvalues of H within the span, in an orthonormal basis of it."""
        root = cholesky(self.directions @ self.directions.mT, "the directions")
        half = torch.linalg.solve_triangular(root, self.gram, upper=False)
        return torch.linalg.eigvalsh(torch.linalg.solve_triangular(root, half.mT, upper=False)).clamp_min(0)

    @cached_property
    def shown(self) -> Tensor:
        """The diagonal of H within the span, (P,)."""
        overlap = self.directions @ self.directions.mT
        dual = torch.linalg.solve(overlap, self.directions)
        return (dual * (self.gram @ dual)).sum(0)

    def diagonal(self) -> Tensor:
        return floored_by_layer(self.shown.clamp_min(0), self.selection)

    def tensors(self) -> dict[str, Tensor]:
        return {"directions": self.directions, "gram": self.gram}
