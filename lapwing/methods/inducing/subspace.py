"""A posterior over the weights with variance in a few directions and none in the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.state import State, saved
from lapwing.curvature.protocols import floored_by_layer
from lapwing.linalg.cholesky import cholesky
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior


@dataclass(frozen=True, eq=False)
class SubspacePrecision:
    r"""The posterior θ = w̃ + Dᵀ c with c ~ N(0, G⁻¹) and G = D Λ Dᵀ, for K directions D (K, P).

    It has no variance outside the directions, and nowhere more than the exact posterior:
    $D^\top (D \Lambda D^\top)^{-1} D \preceq \Lambda^{-1}$.
    """

    directions: Tensor
    posterior_root: Tensor  # the Cholesky factor of G
    prior_root: Tensor  # the Cholesky factor of D A Dᵀ
    log_determinant: Tensor

    def logdet(self) -> Tensor:
        return self.log_determinant

    def _features(self, jacobian: LayerJacobians) -> Tensor:
        """Return L⁻¹ D Jᵀ with G = L Lᵀ, (K, B, C)."""
        products = jacobian.jvp(self.directions).to(self.posterior_root)
        features = torch.linalg.solve_triangular(self.posterior_root, products.flatten(1), upper=False)
        return features.reshape(products.shape)

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        rows = self._features(jacobian).permute(1, 2, 0).unflatten(1, (jacobian.tokens, -1))
        return (rows @ rows.mT if full else rows.square().sum(-1)).to(jacobian.dtype)

    def cross(self, jacobian: LayerJacobians) -> Tensor:
        rows = self._features(jacobian).flatten(1).mT
        return (rows @ rows.mT).to(jacobian.dtype)

    def sample(self, eps: Tensor) -> Tensor:
        """Return samples made of the first K columns of ``eps``."""
        used = eps[:, : len(self.posterior_root)].to(self.posterior_root)
        return torch.linalg.solve_triangular(self.posterior_root.mT, used.mT, upper=True).mT @ self.directions

    def adjoint(self, v: Tensor) -> Tensor:
        """Return K columns followed by zeros, in the shape of ``v``."""
        v = v.to(self.posterior_root)
        product = v.new_zeros(v.shape)
        inside = torch.linalg.solve_triangular(self.posterior_root, self.directions @ v.mT, upper=False)
        product[:, : len(self.posterior_root)] = inside.mT
        return product

    def solve(self, v: Tensor) -> Tensor:
        return self.sample(self.adjoint(v)).to(v)

    def variances(self) -> Tensor:
        return torch.linalg.solve_triangular(self.posterior_root, self.directions, upper=False).square().sum(0)

    def decided(self, precision: Tensor) -> Tensor:
        """Return γ of every weight (P,) under prior precisions (P,): the relative fall of its variance by the data."""
        prior_variances = torch.linalg.solve_triangular(self.prior_root, self.directions, upper=False).square().sum(0)
        return precision.to(prior_variances) * (prior_variances - self.variances())


@saved
@dataclass(frozen=True, eq=False)
class SubspaceCurvature:
    """Curvature restricted to K directions D (K, P); ``gram`` is D H Dᵀ at unit dispersion, (K, K)."""

    directions: Tensor
    gram: Tensor
    selection: Selection

    def _prior(self, prior: BoundPrior) -> Tensor:
        """Return D A Dᵀ, (K, K)."""
        return (self.directions * prior.vector.to(self.gram)) @ self.directions.mT

    def precision(self, phi: Tensor, prior: BoundPrior) -> SubspacePrecision:
        inside = self._prior(prior)
        posterior_root = cholesky(self.gram / phi.to(self.gram) + inside, "the subspace")
        prior_root = cholesky(inside, "the subspace")
        outside = prior.logdet().double() - 2 * prior_root.diagonal().log().sum()
        logdet = outside + 2 * posterior_root.diagonal().log().sum()
        return SubspacePrecision(self.directions, posterior_root, prior_root, logdet)

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return log det(H/φ + A) with no curvature outside the directions; for one precision from eigenvalues."""
        if not prior.is_isotropic:
            return self.precision(phi, prior).logdet()
        alpha = prior.values.double()
        return self.selection.size * alpha.log() + torch.log1p(self._values / (phi.to(alpha) * alpha)).sum()

    @cached_property
    def _values(self) -> Tensor:
        """The eigenvalues of H within the span of the directions, in an orthonormal basis."""
        root = cholesky(self.directions @ self.directions.mT, "the directions")
        half = torch.linalg.solve_triangular(root, self.gram, upper=False)
        return torch.linalg.eigvalsh(torch.linalg.solve_triangular(root, half.mT, upper=False)).clamp_min(0)

    @cached_property
    def inner_diagonal(self) -> Tensor:
        """The diagonal of H within the span of the directions, (P,)."""
        overlap = self.directions @ self.directions.mT
        dual = torch.linalg.solve(overlap, self.directions)
        return (dual * (self.gram @ dual)).sum(0)

    def diagonal(self) -> Tensor:
        return floored_by_layer(self.inner_diagonal.clamp_min(0), self.selection)

    def state(self) -> State:
        return State("SubspaceCurvature", tensors={"directions": self.directions, "gram": self.gram})

    @classmethod
    def from_state(cls, state: State, network: Network) -> SubspaceCurvature:
        directions, gram = (state.tensors[name].to(network.device) for name in ("directions", "gram"))
        return cls(directions, gram, network.selection)
