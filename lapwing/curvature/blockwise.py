"""Curvature with no coupling between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.core.state import State, class_named, saved
from lapwing.curvature.blocks.diagonal import DiagonalPrecision
from lapwing.curvature.blocks.protocol import BlockCurvature, BlockPrecision
from lapwing.errors import UnsupportedError
from lapwing.networks.jacobians import Block, LayerJacobians
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior


@dataclass(frozen=True, eq=False)
class BlockwisePrecision:
    """Λ with no coupling between blocks."""

    blocks: tuple[BlockPrecision, ...]
    layout: tuple[Block, ...]
    selection: Selection
    log_determinant: Tensor | None = None  # if it is not the sum over blocks (single weights selected)

    def logdet(self) -> Tensor:
        if self.log_determinant is not None:
            return self.log_determinant
        return torch.stack([block.logdet().double() for block in self.blocks]).sum()

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        """Return (B, S, C, C), or (B, S, C). Blocks are added one by one, so memory is that of the largest."""
        total: Tensor | None = None
        for precision, (_, part) in zip(self.blocks, jacobian, strict=True):
            covariance = precision.quadratic(part, jacobian.tokens, full)
            total = covariance if total is None else total + covariance
        assert total is not None
        return total

    def cross(self, jacobian: LayerJacobians) -> Tensor:
        parts = [precision.cross(part) for precision, (_, part) in zip(self.blocks, jacobian, strict=True)]
        return torch.stack(parts).sum(0)

    def sample(self, eps: Tensor) -> Tensor:
        return self._flat([p.sample(part) for p, part in zip(self.blocks, self._arranged(eps), strict=True)])

    def adjoint(self, v: Tensor) -> Tensor:
        return self._flat([p.adjoint(part) for p, part in zip(self.blocks, self._arranged(v), strict=True)])

    def solve(self, v: Tensor) -> Tensor:
        pairs = zip(self.blocks, self._arranged(v), strict=True)
        return self._flat([p.sample(p.adjoint(part)) for p, part in pairs])

    def variances(self) -> Tensor:
        return self._flat([precision.variances() for precision in self.blocks])

    def _arranged(self, rows: Tensor) -> list[Tensor]:
        values = self.selection.split(rows)
        return [block.arrange(values) for block in self.layout]

    def _flat(self, parts: list[Tensor]) -> Tensor:
        return in_order(parts, self.layout, self.selection)


@saved
@dataclass(frozen=True, eq=False)
class BlockwiseCurvature:
    """H with no coupling between blocks. ``blocks`` match the network's layout one to one."""

    blocks: tuple[BlockCurvature, ...]
    layout: tuple[Block, ...]
    selection: Selection

    def __add__(self, other: BlockwiseCurvature) -> BlockwiseCurvature:
        if self.layout != other.layout:
            raise UnsupportedError("these curvatures belong to different networks or weights and do not add.")
        if self.structures() != other.structures():
            raise UnsupportedError(
                f"curvatures with the blocks {self.structures()} and {other.structures()} do not add; expected the "
                "same structures. Fit both with the same method and settings."
            )
        total = tuple(a + b for a, b in zip(self.blocks, other.blocks, strict=True))
        return replace(self, blocks=total)

    def mixed(self, others: Sequence[BlockwiseCurvature], weights: Tensor) -> BlockwiseCurvature:
        """Return the weighted sum of this curvature and the others, differentiable in the weights (1 + others,)."""
        columns = zip(self.blocks, *(other.blocks for other in others), strict=True)
        return replace(self, blocks=tuple(first.mixed(rest, weights) for first, *rest in columns))

    def precision(self, phi: Tensor, prior: BoundPrior) -> BlockwisePrecision:
        if self.selection.index is not None:
            return self._subnetwork_precision(phi, prior)
        blocks = tuple(c.precision(phi, prior.on(b), b) for c, b in zip(self.blocks, self.layout, strict=True))
        return BlockwisePrecision(blocks, self.layout, self.selection)

    def _subnetwork_precision(self, phi: Tensor, prior: BoundPrior) -> BlockwisePrecision:
        """Return Λ of single weights, for diagonal blocks only.

        Entries that are not selected get no variance and do not enter the determinant.
        """
        parts = [block.only_diagonal for block in self.blocks]
        diagonals = [part for part in parts if part is not None]
        if len(diagonals) < len(parts):
            raise UnsupportedError(
                "a subnetwork of single weights has no Kronecker structure; use method=Full() or Diagonal()."
            )
        values = in_order(diagonals, self.layout, self.selection, picked=False)
        precision = self.selection.picked(values) / phi.to(values) + prior.vector.to(values)
        inverse = self.selection.split(precision.reciprocal())
        blocks = tuple(DiagonalPrecision(block.arrange(inverse), precision.new_zeros(())) for block in self.layout)
        return BlockwisePrecision(blocks, self.layout, self.selection, precision.log().sum(dtype=torch.float64))

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        return self.precision(phi, prior).logdet()

    def diagonal(self) -> Tensor:
        parts = [block.diagonal() for block in self.blocks]
        return in_order(parts, self.layout, self.selection)

    def state(self) -> State:
        return State("BlockwiseCurvature", parts={str(i): block.state() for i, block in enumerate(self.blocks)})

    @classmethod
    def from_state(cls, state: State, network: Network) -> BlockwiseCurvature:
        stored = [state.parts[str(i)] for i in range(len(state.parts))]
        blocks = tuple(class_named(part.name).from_state(part, network) for part in stored)
        return cls(blocks, network.layout, network.selection)

    def structures(self) -> list[str]:
        """Return the name of the structure of every block, in the order of the network's layout."""
        return [type(block).__name__ for block in self.blocks]


def in_order(parts: list[Tensor], layout: tuple[Block, ...], selection: Selection, picked: bool = True) -> Tensor:
    """Join tensors in the forms of their blocks to one in the order of theta, (..., P).

    With ``picked=False`` the entries that are not selected are included.
    """
    by_name: dict[str, Tensor] = {}
    for part, block in zip(parts, layout, strict=True):
        by_name.update(block.spread(part))
    dtype = max((part.dtype for part in parts), key=lambda d: torch.finfo(d).bits)
    flat = torch.cat([by_name[name].to(dtype) for name in selection.names], -1)
    return selection.picked(flat) if picked else flat


def prior_precision(prior: BoundPrior, layout: tuple[Block, ...], selection: Selection) -> BlockwisePrecision:
    """Return the prior alone as a precision: its ``quadratic`` is the prior covariance of outputs."""
    inverse = selection.split(prior.vector.detach().double().reciprocal())
    zero = torch.zeros((), dtype=torch.float64, device=prior.values.device)
    parts = tuple(DiagonalPrecision(block.arrange(inverse), zero) for block in layout)
    return BlockwisePrecision(parts, layout, selection)
