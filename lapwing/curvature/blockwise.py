"""Curvature with no coupling between blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from lapwing.core.state import Part, State, saved
from lapwing.curvature.blocks import BlockCurvature, BlockPrecision, BlockSum, DiagonalPrecision
from lapwing.curvature.factors import decompose
from lapwing.curvature.protocols import floored_by_layer
from lapwing.curvature.sweep import Sweep
from lapwing.errors import UnsupportedError
from lapwing.networks.jacobians import Block, LayerJacobians, in_order
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior


@dataclass(frozen=True, eq=False)
class BlockwisePrecision:
    """Λ with no coupling between blocks."""

    blocks: tuple[BlockPrecision, ...]
    layout: tuple[Block, ...]
    selection: Selection

    def logdet(self) -> Tensor:
        return torch.stack([block.log_determinant.double() for block in self.blocks]).sum()

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        """Return (B, S, C, C), or (B, S, C). Blocks are added one by one, so memory is that of the largest."""
        each = (self.blocks[i].quadratic(part, jacobian.tokens, full) for i, part in jacobian.each())
        return reduce(_added, each)

    def quadratics(self, precisions: Sequence[BlockwisePrecision], jacobian: LayerJacobians) -> list[Tensor]:
        """Return ``quadratic`` of all precisions; every block is formed, and rotated into its basis, once."""
        totals: list[Tensor] | None = None
        for i, part in jacobian.each():
            blocks = [precision.blocks[i] for precision in precisions]
            covariances = blocks[0].quadratics(blocks, part, jacobian.tokens)
            totals = covariances if totals is None else [*map(_added, totals, covariances)]
        assert totals is not None
        return totals

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        if other is None:
            pairs = zip(self.blocks, jacobian, strict=True)
            return reduce(_added, (precision.cross(part) for precision, (_, part) in pairs))
        triples = zip(self.blocks, jacobian, other, strict=True)
        return reduce(_added, (precision.cross(part, second) for precision, (_, part), (_, second) in triples))

    def sample(self, eps: Tensor) -> Tensor:
        return self._by_block(eps, lambda precision, part: precision.sample(part))

    def adjoint(self, v: Tensor) -> Tensor:
        return self._by_block(v, lambda precision, part: precision.adjoint(part))

    def solve(self, v: Tensor) -> Tensor:
        return self._by_block(v, lambda precision, part: precision.sample(precision.adjoint(part)))

    def variances(self) -> Tensor:
        return in_order([precision.variances() for precision in self.blocks], self.layout, self.selection)

    def _by_block(self, rows: Tensor, apply: Callable[[BlockPrecision, Tensor], Tensor]) -> Tensor:
        """Return ``apply(precision, part)`` of all blocks, joined, for the parts of rows (n, P)."""
        values = self.selection.split(rows)
        pairs = zip(self.blocks, self.layout, strict=True)
        parts = [apply(precision, block.arrange(values)) for precision, block in pairs]
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
        priors = [prior.on(block) for block in self.layout]
        pairs = zip(self.blocks, priors, strict=True)
        decompose([factor for curvature, on_block in pairs for factor in curvature.factors(on_block)])
        triples = zip(self.blocks, priors, self.layout, strict=True)
        blocks = tuple(curvature.precision(phi, on_block, block) for curvature, on_block, block in triples)
        return BlockwisePrecision(blocks, self.layout, self.selection)

    def _subnetwork_precision(self, phi: Tensor, prior: BoundPrior) -> BlockwisePrecision:
        """Return Λ of single weights, for diagonal blocks only.

        Entries that are not selected get no variance and do not enter the determinant.
        """
        values = self.plain_diagonal()
        precision = values / phi.to(values) + prior.vector.to(values)
        return _diagonal_precision(precision, self.layout, self.selection)

    def plain_diagonal(self) -> Tensor:
        """Return the diagonal of H as it is, (P,), for diagonal blocks only; ``diagonal`` raises small entries."""
        parts = [block.only_diagonal for block in self.blocks]
        diagonals = [part for part in parts if part is not None]
        if len(diagonals) < len(parts):
            raise UnsupportedError(
                "a subnetwork of single weights has no Kronecker structure; use method=Full() or Diagonal()."
            )
        return in_order(diagonals, self.layout, self.selection)

    def refuse_prior(self, phi: Tensor, prior: BoundPrior) -> None:
        """Raise if a block cannot take the prior: any takes one precision, for others its factorisation tells."""
        if self.selection.index is None:
            for curvature, block in zip(self.blocks, self.layout, strict=True):
                on_block = prior.on(block)
                if on_block.whole.ndim and curvature.only_diagonal is None:
                    curvature.precision(phi, on_block, block)

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        return self.precision(phi, prior).logdet()

    def diagonal(self) -> Tensor:
        if self.selection.index is not None:  # the floor is that of the chosen weights
            return floored_by_layer(self.plain_diagonal(), self.selection)
        return in_order([block.diagonal() for block in self.blocks], self.layout, self.selection)

    @property
    def findings(self) -> tuple[str, ...]:
        """Remarks on factors that are approximated, in words."""
        pairs = zip(self.blocks, self.layout, strict=True)
        return tuple(remark for curvature, block in pairs for remark in curvature.remarks(block))

    def coupled(self) -> Tensor:
        """Return one for every weight in a block with more than its diagonal, and zero for the rest, (P,)."""
        like = self.blocks[0].diagonal()
        parts = [
            torch.full(block.form, float(curvature.only_diagonal is None)).to(like)
            for curvature, block in zip(self.blocks, self.layout, strict=True)
        ]
        return in_order(parts, self.layout, self.selection)

    def state(self) -> State:
        return State("BlockwiseCurvature", parts={str(i): block.state() for i, block in enumerate(self.blocks)})

    @classmethod
    def from_state(cls, state: State, network: Network) -> BlockwiseCurvature:
        """Build the curvature; each block gets the network with the one block of the layout that it belongs to."""
        views = [replace(network, layout=(block,)) for block in network.layout]
        blocks = state.read(**{str(i): Part(BlockCurvature, view) for i, view in enumerate(views)})
        return cls(tuple(blocks.values()), network.layout, network.selection)

    def structures(self) -> list[str]:
        """Return the name of the structure of every block, in the order of the network's layout."""
        return [type(block).__name__ for block in self.blocks]


def _added(total: Tensor, part: Tensor) -> Tensor:
    """Return the sum of two results, in the memory of the first where no gradient needs it."""
    return total + part if total.requires_grad or part.requires_grad else total.add_(part)


def blockwise_sum(sweep: Sweep, network: Network, sums: Sequence[BlockSum]) -> BlockwiseCurvature:
    """Return the sums of all blocks over a pass; ``sums`` has an empty one for each block of the network."""
    for number, part, first in sweep.blocks():
        sums[number].add(part, first, sweep.weights)
        del part  # before the next one is computed
    for total in sums:
        total.settle(sweep.processes)
    own = [total.totals() for total in sums]
    everywhere = iter(sweep.processes.sum([part for parts in own for part in parts]))
    blocks = tuple(total.value([next(everywhere) for _ in parts]) for total, parts in zip(sums, own, strict=True))
    return BlockwiseCurvature(blocks, network.layout, network.selection)


def prior_precision(prior: BoundPrior, layout: tuple[Block, ...], selection: Selection) -> BlockwisePrecision:
    """Return the prior alone as a precision: its ``quadratic`` is the prior covariance of outputs."""
    return _diagonal_precision(prior.vector.detach().double(), layout, selection)


def _diagonal_precision(values: Tensor, layout: tuple[Block, ...], selection: Selection) -> BlockwisePrecision:
    """Return Λ = diag(values), (P,). Entries that are not selected get no variance and a log-precision of zero."""
    inverse, logs = selection.split(values.reciprocal()), selection.split(values.log())
    blocks = tuple(
        DiagonalPrecision(block.arrange(inverse), block.arrange(logs).sum(dtype=torch.float64)) for block in layout
    )
    return BlockwisePrecision(blocks, layout, selection)
