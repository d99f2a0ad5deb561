"""A diagonal block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.state import State, saved
from lapwing.curvature.protocols import floored, weighted_sum
from lapwing.networks.jacobians import Block, BlockJacobian
from lapwing.networks.network import Network
from lapwing.priors.bound import BlockPrior


@dataclass(frozen=True, eq=False)
class DiagonalPrecision:
    """Λ diagonal; ``inverse`` is one over it, in the block's form."""

    inverse: Tensor
    log_determinant: Tensor

    def logdet(self) -> Tensor:
        return self.log_determinant

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        return jacobian.weighted(self.inverse, tokens, full)

    def cross(self, jacobian: BlockJacobian) -> Tensor:
        return jacobian.between(jacobian, self.inverse)

    def sample(self, eps: Tensor) -> Tensor:
        return eps * self.inverse.sqrt().to(eps)

    def adjoint(self, v: Tensor) -> Tensor:
        return self.sample(v)

    def variances(self) -> Tensor:
        return self.inverse


@saved
@dataclass(frozen=True, eq=False)
class DiagonalBlock:
    """The diagonal of H, in the block's form."""

    values: Tensor

    @property
    def only_diagonal(self) -> Tensor:
        return self.values

    def __add__(self, other: DiagonalBlock) -> DiagonalBlock:
        return DiagonalBlock(self.values + other.values)

    def mixed(self, others: Sequence[DiagonalBlock], weights: Tensor) -> DiagonalBlock:
        return DiagonalBlock(weighted_sum([self.values, *(block.values for block in others)], weights))

    def state(self) -> State:
        return State("DiagonalBlock", tensors={"values": self.values})

    @classmethod
    def from_state(cls, state: State, network: Network) -> DiagonalBlock:
        return cls(state.tensors["values"].to(network.device, network.dtype))

    def dense(self) -> Tensor:
        return torch.diag(self.values.reshape(-1))

    def diagonal(self) -> Tensor:
        return floored(self.values)

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> DiagonalPrecision:
        values = self.values / phi.to(self.values) + prior.whole.to(self.values)
        return DiagonalPrecision(values.reciprocal(), values.log().sum(dtype=torch.float64))
