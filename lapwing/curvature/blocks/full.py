"""A block with all of its matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.state import State, saved
from lapwing.curvature.protocols import floored, weighted_sum
from lapwing.linalg.cholesky import cholesky
from lapwing.networks.jacobians import Block, BlockJacobian
from lapwing.networks.network import Network
from lapwing.priors.bound import BlockPrior


@dataclass(frozen=True, eq=False)
class CholeskyPrecision:
    """Λ by its Cholesky factor L (p, p), float64."""

    factor: Tensor

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()

    @cached_property
    def _inverse_factor(self) -> Tensor:
        """L⁻¹. It is applied many times, and on a GPU a product is faster than a triangular solve."""
        eye = torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)
        return torch.linalg.solve_triangular(self.factor, eye, upper=False)

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        j = jacobian.whole().flatten(2)
        rows = (j @ self._inverse_factor.to(j.dtype).mT).reshape(j.shape[0], tokens, -1, j.shape[-1])
        return rows @ rows.mT if full else rows.square().sum(-1)

    def cross(self, jacobian: BlockJacobian) -> Tensor:
        j = jacobian.whole().flatten(2)
        rows = j.reshape(-1, j.shape[-1]) @ self._inverse_factor.to(j.dtype).mT
        return rows @ rows.mT

    def sample(self, eps: Tensor) -> Tensor:
        flat = eps.reshape(eps.shape[0], -1)
        solved = torch.linalg.solve_triangular(self.factor.mT, flat.to(self.factor).mT, upper=True).mT
        return solved.reshape(eps.shape).to(eps)

    def adjoint(self, v: Tensor) -> Tensor:
        flat = v.reshape(v.shape[0], -1)
        solved = torch.linalg.solve_triangular(self.factor, flat.to(self.factor).mT, upper=False).mT
        return solved.reshape(v.shape).to(v)

    def variances(self) -> Tensor:
        return self._inverse_factor.square().sum(0)


@saved
@dataclass(frozen=True, eq=False)
class FullBlock:
    """The whole H of one block, (p, p)."""

    matrix: Tensor

    @property
    def only_diagonal(self) -> None:
        return None

    def __add__(self, other: FullBlock) -> FullBlock:
        return FullBlock(self.matrix + other.matrix)

    def mixed(self, others: Sequence[FullBlock], weights: Tensor) -> FullBlock:
        return FullBlock(weighted_sum([self.matrix, *(block.matrix for block in others)], weights))

    def state(self) -> State:
        return State("FullBlock", tensors={"matrix": self.matrix})

    @classmethod
    def from_state(cls, state: State, network: Network) -> FullBlock:
        return cls(state.tensors["matrix"].to(network.device, network.dtype))

    def dense(self) -> Tensor:
        return self.matrix

    def diagonal(self) -> Tensor:
        return floored(self.matrix.diagonal())

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> CholeskyPrecision:
        added = prior.whole.double().reshape(-1).expand(len(self.matrix))
        return CholeskyPrecision(cholesky(self.matrix.double() / phi.double() + torch.diag(added), block.weight))
