"""Kronecker factors of the curvature, and their correction in the eigenbasis."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lapwing.core.settings import require_integer
from lapwing.curvature.blocks.diagonal import DiagonalBlock
from lapwing.curvature.blocks.eigen import EigenBlock
from lapwing.curvature.blocks.full import FullBlock
from lapwing.curvature.blocks.kronecker import KroneckerBlock
from lapwing.curvature.blocks.protocol import BlockCurvature
from lapwing.curvature.blockwise import BlockwiseCurvature
from lapwing.curvature.sweep import checked_curvature
from lapwing.errors import UnsupportedError
from lapwing.linalg.gram import Gram
from lapwing.networks.jacobians import Block, BlockJacobian, LayerJacobians
from lapwing.networks.network import Network


def check_settings(curvature: str, sharing: str, full_limit: int) -> None:
    """Raise unless the settings that all methods with Kronecker factors share are valid."""
    checked_curvature(curvature)
    if sharing not in ("expand", "reduce"):
        raise UnsupportedError(f"sharing is {sharing!r}; expected 'expand' or 'reduce'.")
    require_integer("full_limit", full_limit, least=0)


class _KroneckerSum:
    """The two factors of a linear block, summed over a pass."""

    def __init__(self, block: Block, sharing: str, dtype: torch.dtype, device: torch.device) -> None:
        self._sharing, self._block = sharing, block
        self._out = Gram(block.d_out, dtype, device, block.groups)
        self._inp: Gram | None = None
        self._counts: Tensor | None = None
        self._rows = 0
        self._options = (dtype, device)

    def add(self, jacobian: BlockJacobian) -> None:
        rows = jacobian.kronecker_rows(self._sharing == "reduce")
        if rows.counts is not None:
            counts = rows.counts.to(self._options[0])
            self._counts = counts if self._counts is None else self._counts + counts
        if rows.inputs is not None:
            if self._inp is None:
                self._inp = Gram(self._block.d_in, *self._options, self._block.groups)
            self._inp.add(rows.inputs)
        add = self._out.add_runs if rows.by_runs else self._out.add
        add(rows.outputs)
        self._rows += rows.number

    def value(self) -> KroneckerBlock:
        out = self._out.value()
        out = out if out.ndim == 3 else out.unsqueeze(0)
        if self._counts is not None:
            return KroneckerBlock(self._counts.unsqueeze(0), out, self._rows)
        assert self._inp is not None
        inp = self._inp.value()
        return KroneckerBlock(inp if inp.ndim == 3 else inp.unsqueeze(0), out, self._rows)


class _DenseSum:
    """A block that is no linear map, summed over a pass: all of it if it is small, else its diagonal."""

    def __init__(self, block: Block, limit: int, dtype: torch.dtype, device: torch.device) -> None:
        whole = block.size <= limit
        self._gram = Gram(block.size, dtype, device) if whole else None
        self._squares = None if whole else torch.zeros(block.size, dtype=dtype, device=device)

    def add(self, jacobian: BlockJacobian) -> None:
        if self._gram is not None:
            self._gram.add(jacobian.whole().flatten(0, 1))
        else:
            assert self._squares is not None
            self._squares += jacobian.squares()

    def value(self) -> BlockCurvature:
        if self._gram is not None:
            return FullBlock(self._gram.value())
        assert self._squares is not None
        return DiagonalBlock(self._squares)


def kronecker_curvature(
    sweep: Iterable[LayerJacobians], network: Network, sharing: str, full_limit: int
) -> BlockwiseCurvature:
    """Return Kronecker factors for linear blocks and full or diagonal blocks for the rest, by one pass."""
    if network.selection.index is not None:
        raise UnsupportedError("a subnetwork of single weights has no Kronecker structure; use Full() or Diagonal().")
    options = (network.dtype, network.device)
    sums: list[_KroneckerSum | _DenseSum] = [
        _KroneckerSum(block, sharing, *options) if block.linear else _DenseSum(block, full_limit, *options)
        for block in network.layout
    ]
    for jacobians in sweep:
        for total, (_, part) in zip(sums, jacobians, strict=True):
            total.add(part)
        del jacobians, part  # before the next chunk is computed
    return BlockwiseCurvature(tuple(total.value() for total in sums), network.layout, network.selection)


def eigen_corrected(sweep: Iterable[LayerJacobians], kron: BlockwiseCurvature) -> BlockwiseCurvature:
    """Return the exact diagonal of the curvature in the eigenbasis of each Kronecker block, by a second pass."""
    bases = [block.eigen if isinstance(block, KroneckerBlock) else None for block in kron.blocks]
    values: list[Tensor | None] = [None] * len(bases)
    for jacobians in sweep:
        for i, (basis, (_, part)) in enumerate(zip(bases, jacobians, strict=True)):
            if basis is not None:
                squares = part.rotated(basis[1], basis[3]).squares()
                total = values[i]
                values[i] = squares if total is None else total + squares
        del jacobians, part  # before the next chunk is computed
    corrected: list[BlockCurvature] = []
    for block, basis, value in zip(kron.blocks, bases, values, strict=True):
        if basis is None or value is None:
            corrected.append(block)
        else:
            corrected.append(EigenBlock(basis[1], basis[3], value))
    return BlockwiseCurvature(tuple(corrected), kron.layout, kron.selection)
