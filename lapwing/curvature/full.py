"""The full curvature matrix, (P, P), and its precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.state import Latest, State, saved
from lapwing.curvature.protocols import floored_by_layer, weighted_sum
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.linalg.cholesky import cholesky, not_definite
from lapwing.networks.blocks import Block
from lapwing.networks.budget import temporary
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior


@dataclass(frozen=True, eq=False)
class FullPrecision:
    """Λ = H/φ + A by its Cholesky factor, float64."""

    factor: Tensor
    selection: Selection
    log_determinant: Tensor

    def logdet(self) -> Tensor:
        return self.log_determinant

    @cached_property
    def covariance(self) -> Tensor:
        return torch.cholesky_inverse(self.factor)

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        linear_map = single_map(jacobian)
        if linear_map is not None:
            return self._by_inputs(linear_map, jacobian, full)
        j = jacobian.whole()
        batch, _, size = j.shape
        rows = self._whitened(j.reshape(-1, size)).reshape(batch, jacobian.tokens, -1, size)
        return (rows @ rows.mT if full else rows.square().sum(-1)).to(j.dtype)

    def _by_inputs(self, part: LinearJacobian, jacobian: LayerJacobians, full: bool) -> Tensor:
        """Return J Λ⁻¹ Jᵀ for one linear map at one position: S_cd = Σ_ij g_ci g_dj (aᵀ Σ_ij a).

        The inner forms are computed once for all outputs and only for i <= j: half of P² multiplications for
        each input instead of C P². In float64, as the sums are: under a weak prior the terms cancel.
        """
        a, g = part.a[0, :, 0].double(), part.g[0, :, :, 0].double()
        batch, d_in = a.shape
        d_out = g.shape[-1]
        (block,) = jacobian.layout
        blocks = self._covariances.at(block, lambda: self._arranged(block))  # (pairs, d_in, d_in)
        first, second = torch.triu_indices(d_out, d_out, device=a.device)
        forms = a.new_empty(batch, d_out, d_out)
        step = max(1, temporary(a.device) // (a.element_size() * max(1, batch) * d_in))
        for start in range(0, len(first), step):
            products = torch.matmul(a, blocks[start : start + step])  # (pairs, B, d_in)
            value = torch.einsum("pbi,bi->bp", products, a)
            i, k = first[start : start + step], second[start : start + step]
            forms[:, i, k] = value
            forms[:, k, i] = value
        rows = g.transpose(0, 1)  # (B, K, d_out)
        left = torch.bmm(rows, forms)
        if not full:
            return (left * rows).sum(-1).reshape(batch, jacobian.tokens, -1).to(part.g.dtype)
        left, rows = (t.reshape(batch, jacobian.tokens, -1, d_out) for t in (left, rows))
        return (left @ rows.mT).to(part.g.dtype)

    @cached_property
    def _covariances(self) -> Latest[Block, Tensor]:
        return Latest()

    def _arranged(self, block: Block) -> Tensor:
        """Return the blocks Σ_ij for i <= j of one linear map, (pairs, d_in, d_in), symmetrised in the inputs."""
        order = block.arrange(self.selection.split(torch.arange(self.selection.size, dtype=torch.float64)))
        order = order[0].long().to(self.factor.device)  # (d_out, d_in): the position of each entry in theta
        first, second = torch.triu_indices(block.d_out, block.d_out, device=order.device)
        tall = self.covariance[order[first].unsqueeze(-1), order[second].unsqueeze(-2)]
        return 0.5 * (tall + tall.mT)

    def cross(self, jacobian: LayerJacobians) -> Tensor:
        j = jacobian.whole()
        rows = self._whitened(j.reshape(-1, j.shape[-1]))
        return (rows @ rows.mT).to(j.dtype)

    def sample(self, eps: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, eps.to(self.factor).mT, upper=True).mT.to(eps)

    def adjoint(self, v: Tensor) -> Tensor:
        return self._whitened(v).to(v)

    def _whitened(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, rows.to(self.factor).mT, upper=False).mT

    def solve(self, v: Tensor) -> Tensor:
        return torch.cholesky_solve(v.to(self.factor).mT, self.factor).mT.to(v)

    def variances(self) -> Tensor:
        return self.covariance.diagonal()


@saved
@dataclass(frozen=True, eq=False)
class FullCurvature:
    """H at unit dispersion, (P, P)."""

    matrix: Tensor
    selection: Selection
    definite: bool = True  # a GGN; a Hessian may have negative eigenvalues
    preconditions: ClassVar[bool] = True

    def __add__(self, other: FullCurvature) -> FullCurvature:
        if self.selection.names != other.selection.names or self.matrix.shape != other.matrix.shape:
            raise UnsupportedError("these curvatures belong to different networks or weights and do not add.")
        return FullCurvature(self.matrix + other.matrix, self.selection, self.definite and other.definite)

    def mixed(self, others: Sequence[FullCurvature], weights: Tensor) -> FullCurvature:
        """Return the weighted sum of this curvature and the others, differentiable in the weights (1 + others,)."""
        return replace(self, matrix=weighted_sum([self.matrix, *(other.matrix for other in others)], weights))

    @cached_property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of H, computed once for all isotropic priors and dispersions."""
        return self._spectrum(self.matrix.double())

    def _spectrum(self, matrix: Tensor) -> Tensor:
        values = torch.linalg.eigvalsh(matrix)
        return values.clamp_min(0) if self.definite else values

    def _scaled_eigenvalues(self, scale: Tensor) -> Tensor:
        """Return the eigenvalues of D^-½ H D^-½, computed once for all precisions g D."""
        return self._scaled.at(scale, lambda: self._spectrum(self._in_units_of(scale.double().rsqrt())))

    def _in_units_of(self, root: Tensor) -> Tensor:
        return root[:, None] * self.matrix.double() * root

    @cached_property
    def _scaled(self) -> Latest[Tensor, Tensor]:
        return Latest(torch.equal)

    def precision(self, phi: Tensor, prior: BoundPrior) -> FullPrecision:
        matrix = self.matrix.double() / phi.double()
        matrix.diagonal().add_(prior.vector.double())
        factor = cholesky(matrix, self._name)
        return FullPrecision(factor, self.selection, 2 * factor.diagonal().log().sum())

    @property
    def _name(self) -> str:
        names = self.selection.names
        return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} ({self.selection.size} weights)"

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the log-determinant of H/φ + A: from the eigenvalues for a prior with one number, else by Cholesky."""
        if not prior.is_single:
            return self.precision(phi, prior).logdet()
        eigenvalues = self.eigenvalues if prior.scale is None else self._scaled_eigenvalues(prior.scale)
        values = eigenvalues / phi.double() + prior.values.double()
        smallest = float(values.detach().min())
        if smallest <= 0:
            raise NumericalError(not_definite(self._name, smallest))
        total = values.log().sum()
        return total if prior.scale is None else total + prior.scale.double().log().sum()

    def diagonal(self) -> Tensor:
        return floored_by_layer(self.matrix.diagonal().double(), self.selection)

    def state(self) -> State:
        return State("FullCurvature", {"definite": self.definite}, {"matrix": self.matrix})

    @classmethod
    def from_state(cls, state: State, network: Network) -> FullCurvature:
        matrix = state.tensors["matrix"].to(network.device)
        return cls(matrix, network.selection, state.settings["definite"])


def single_map(jacobian: LayerJacobians) -> LinearJacobian | None:
    """Return the only block of the Jacobian if it is one linear map at one position with all its weights, else None."""
    if len(jacobian.layout) != 1 or jacobian.selection.index is not None:
        return None
    return jacobian.parts[0]().single_map()
