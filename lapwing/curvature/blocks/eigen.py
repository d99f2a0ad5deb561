"""A block in a Kronecker eigenbasis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.state import State, saved
from lapwing.curvature.protocols import floored
from lapwing.errors import UnsupportedError
from lapwing.networks.jacobians import Block, BlockJacobian
from lapwing.networks.network import Network
from lapwing.priors.bound import BlockPrior


@dataclass(frozen=True, eq=False)
class EigenPrecision:
    """Λ with known eigenvectors U ⊗ V. ``inverse`` (G, d_out, d_in) holds one over the eigenvalues.

    The bases need not be orthogonal: a prior that differs by input or output is folded into them. ``inp`` is None for
    the identity.
    """

    out: Tensor
    inp: Tensor | None
    inverse: Tensor
    log_determinant: Tensor

    def logdet(self) -> Tensor:
        return self.log_determinant

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        return self._rotated(jacobian).weighted(self.inverse.to(self.out.dtype), tokens, full)

    def cross(self, jacobian: BlockJacobian) -> Tensor:
        rotated = self._rotated(jacobian)
        return rotated.between(rotated, self.inverse.to(self.out.dtype))

    def _rotated(self, jacobian: BlockJacobian) -> BlockJacobian:
        return jacobian.rotated(self.out, self.inp)

    def sample(self, eps: Tensor) -> Tensor:
        rotated = self.out.to(eps) @ (eps * self.inverse.sqrt().to(eps))
        return rotated if self.inp is None else rotated @ self.inp.to(eps).mT

    def adjoint(self, v: Tensor) -> Tensor:
        rotated = self.out.to(v).mT @ (v if self.inp is None else v @ self.inp.to(v))
        return rotated * self.inverse.sqrt().to(v)

    def variances(self) -> Tensor:
        variances = self.out.square() @ self.inverse.to(self.out)
        return variances if self.inp is None else variances @ self.inp.square().mT


@saved
@dataclass(frozen=True, eq=False)
class EigenBlock:
    """H in a Kronecker eigenbasis with its exact diagonal there (EKFAC): ``values`` (G, d_out, d_in)."""

    out: Tensor
    inp: Tensor | None
    values: Tensor

    @property
    def only_diagonal(self) -> None:
        return None

    def __add__(self, other: EigenBlock) -> EigenBlock:
        raise UnsupportedError(
            "eigenvalue-corrected curvatures of different data have different bases and do not add; "
            "add Kron() curvatures, or fit EKron() on all the data."
        )

    def mixed(self, others: Sequence[EigenBlock], weights: Tensor) -> EigenBlock:
        raise UnsupportedError(
            "eigenvalue-corrected curvatures of different outputs have different bases and do not add; "
            "use Kron(), Diagonal() or Full()."
        )

    def state(self) -> State:
        tensors = {"out": self.out, "values": self.values}
        return State("EigenBlock", tensors=tensors if self.inp is None else {**tensors, "inp": self.inp})

    @classmethod
    def from_state(cls, state: State, network: Network) -> EigenBlock:
        tensors = {key: t.to(network.device, network.dtype) for key, t in state.tensors.items()}
        return cls(tensors["out"], tensors.get("inp"), tensors["values"])

    def dense(self) -> Tensor:
        blocks = []
        for g, values in enumerate(self.values):
            inp = torch.eye(values.shape[1]).to(values) if self.inp is None else self.inp[g]
            basis = torch.kron(self.out[g].contiguous(), inp.contiguous())
            blocks.append((basis * values.reshape(-1)) @ basis.T)
        return torch.block_diag(*blocks)

    def diagonal(self) -> Tensor:
        diagonal = self.out.square() @ self.values
        return floored(diagonal if self.inp is None else diagonal @ self.inp.square().mT)

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> EigenPrecision:
        if prior.whole.ndim:
            raise UnsupportedError(
                f"the prior differs inside {block.weight}; EKron allows one precision for each block. "
                "Use isotropic() or per_layer(), or method=Kron(), Diagonal() or Full()."
            )
        values = self.values / phi.to(self.values) + prior.value.to(self.values)
        return EigenPrecision(self.out, self.inp, values.reciprocal(), values.log().sum(dtype=torch.float64))
