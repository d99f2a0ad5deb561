"""Curvature with no coupling between blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.curvature.structures import BlockCurvature, BlockPrecision, DiagonalBlock, DiagonalPrecision
from lapwing.errors import UnsupportedError
from lapwing.networks.blocks import Block
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior


@dataclass(frozen=True, eq=False)
class BlockwisePrecision:
    """Λ with no coupling between blocks."""

    blocks: tuple[BlockPrecision, ...]
    layout: tuple[Block, ...]
    selection: Selection
    log_determinant: Tensor | None = None  # where it is not the sum over blocks (single weights selected)

    def logdet(self) -> Tensor:
        if self.log_determinant is not None:
            return self.log_determinant
        return torch.stack([block.logdet().double() for block in self.blocks]).sum()

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        """(B, S, C, C), or (B, S, C): one block after another, so memory follows the largest."""
        total: Tensor | None = None
        for precision, (_, part) in zip(self.blocks, jacobian, strict=True):
            found = precision.quadratic(part, jacobian.tokens, full)
            total = found if total is None else total + found
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
        both = zip(self.blocks, self._arranged(v), strict=True)
        return self._flat([p.sample(p.adjoint(part)) for p, part in both])

    def variances(self) -> Tensor:
        return self._flat([precision.variances() for precision in self.blocks])

    def _arranged(self, rows: Tensor) -> list[Tensor]:
        values = self.selection.split(rows)
        return [block.arrange(values) for block in self.layout]

    def _flat(self, parts: list[Tensor]) -> Tensor:
        return in_order(parts, self.layout, self.selection)


@dataclass(frozen=True, eq=False)
class BlockwiseCurvature:
    """H with no coupling between blocks. ``blocks`` match the network's layout one to one."""

    blocks: tuple[BlockCurvature, ...]
    layout: tuple[Block, ...]
    selection: Selection

    def __add__(self, other: BlockwiseCurvature) -> BlockwiseCurvature:
        if self.layout != other.layout:
            raise UnsupportedError("these curvatures belong to different networks or weights and do not add.")
        total = tuple(a + b for a, b in zip(self.blocks, other.blocks, strict=True))
        return BlockwiseCurvature(total, self.layout, self.selection)

    def precision(self, phi: Tensor, prior: BoundPrior) -> BlockwisePrecision:
        if self.selection.index is not None:
            return self._subnetwork_precision(phi, prior)
        found = tuple(c.precision(phi, prior.on(b), b) for c, b in zip(self.blocks, self.layout, strict=True))
        return BlockwisePrecision(found, self.layout, self.selection)

    def _subnetwork_precision(self, phi: Tensor, prior: BoundPrior) -> BlockwisePrecision:
        """Only diagonals: entries that are not selected get no variance and no share of the determinant."""
        if not all(isinstance(block, DiagonalBlock) for block in self.blocks):
            raise UnsupportedError(
                "a subnetwork of single weights has no Kronecker structure; use method=Full() or Diagonal()."
            )
        parts = [block.values for block in self.blocks if isinstance(block, DiagonalBlock)]
        values = in_order(parts, self.layout, self.selection, picked=False)
        chosen = self.selection.picked(values) / phi.to(values) + prior.vector.to(values)
        inverse = self.selection.split(chosen.reciprocal())
        found = tuple(DiagonalPrecision(block.arrange(inverse), chosen.new_zeros(())) for block in self.layout)
        return BlockwisePrecision(found, self.layout, self.selection, chosen.log().sum(dtype=torch.float64))

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        return self.precision(phi, prior).logdet()

    def diagonal(self) -> Tensor:
        parts = [block.diagonal() for block in self.blocks]
        return in_order(parts, self.layout, self.selection)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{key}": t for i, block in enumerate(self.blocks) for key, t in block.tensors().items()}

    def structures(self) -> list[str]:
        """The structure of every block, by name; a user sees here what became of each parameter."""
        return [type(block).__name__ for block in self.blocks]


def in_order(parts: list[Tensor], layout: tuple[Block, ...], selection: Selection, picked: bool = True) -> Tensor:
    """Tensors in the forms of their blocks as one in the order of theta, (..., P)."""
    found: dict[str, Tensor] = {}
    for part, block in zip(parts, layout, strict=True):
        found.update(block.spread(part))
    dtype = max((part.dtype for part in parts), key=lambda d: torch.finfo(d).bits)
    flat = torch.cat([found[name].to(dtype) for name in selection.names], -1)
    return selection.picked(flat) if picked else flat


def prior_precision(prior: BoundPrior, layout: tuple[Block, ...], selection: Selection) -> BlockwisePrecision:
    """The prior alone, as a precision without data: what it says of outputs is the kernel's diagonal."""
    inverse = selection.split(prior.vector.detach().double().reciprocal())
    zero = torch.zeros((), dtype=torch.float64, device=prior.values.device)
    parts = tuple(DiagonalPrecision(block.arrange(inverse), zero) for block in layout)
    return BlockwisePrecision(parts, layout, selection)
