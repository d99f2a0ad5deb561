"""The Jacobian of a batch, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lapwing.networks.blocks import Block, BlockJacobian
from lapwing.networks.selection import Selection


@dataclass(frozen=True, eq=False)
class LayerJacobians:
    """The Jacobian of a batch, block by block, for K = ``outputs`` seeds; a sample has ``tokens`` data."""

    parts: tuple[Callable[[], BlockJacobian], ...]
    layout: tuple[Block, ...]
    selection: Selection
    batch: int
    outputs: int
    dtype: torch.dtype
    tokens: int = 1

    def __iter__(self) -> Iterator[tuple[Block, BlockJacobian]]:
        """Yield block by block. Each is formed when it is reached and dropped afterwards, so only one is in memory.

        Blocks without a rule are formed together and stay in memory.
        """
        for block, part in zip(self.layout, self.parts, strict=True):
            yield block, part()

    def whole(self) -> Tensor:
        """Return the Jacobian itself, (B, K, P). For small networks and for tests."""
        parts: dict[str, Tensor] = {}
        for block, jacobian in self:
            dense = jacobian.whole()  # flat where a linear block is kept whole
            parts.update(block.spread(dense.reshape(*dense.shape[:2], *block.form)))
        return self.selection.picked(torch.cat([parts[name] for name in self.selection.names], -1))

    def double(self) -> LayerJacobians:
        """Return it in float64, for differences in which digits cancel."""
        parts = tuple(partial(_cast, part, torch.float64) for part in self.parts)
        return replace(self, parts=parts, dtype=torch.float64)

    def jvp(self, v: Tensor) -> Tensor:
        """Return J v for every row of v (n, P): (n, B, K), from the stored factors."""
        values = self.selection.split(v.to(self.dtype))
        total: Tensor | None = None
        for block, jacobian in self:
            part = jacobian.jvp(block.arrange(values))
            total = part if total is None else total + part
        assert total is not None
        return total

    def vjp(self, u: Tensor) -> Tensor:
        """Return Jᵀ u for every u (n, B, K), summed over samples: (n, P)."""
        parts: dict[str, Tensor] = {}
        for block, jacobian in self:
            back = jacobian.vjp(u.to(self.dtype)).reshape(len(u), *block.form)
            parts.update(block.spread(back))
        return self.selection.picked(torch.cat([parts[name] for name in self.selection.names], -1))

    def gram(self, v: Tensor) -> Tensor:
        """Return Jᵀ J v for every row of v (n, P); every block is formed once, for both products."""
        formed = tuple(partial(_same, part().formed(len(v))) for part in self.parts)
        ready = replace(self, parts=formed)
        return ready.vjp(ready.jvp(v))

    def held(self) -> LayerJacobians:
        """Return it with every block formed now, in the form in which repeated products are cheapest."""
        kept = tuple(part().compact() for part in self.parts)
        return replace(self, parts=tuple(partial(_same, part) for part in kept))

    def held_bytes(self) -> int:
        """Return the bytes that ``held`` would take; the blocks are formed one after another."""
        return sum(part.compact_numbers() for _, part in self) * torch.finfo(self.dtype).bits // 8

    @property
    def nbytes(self) -> int:
        """The bytes that the blocks take once they are formed."""
        return sum(part.nbytes for _, part in self)


def _same(part: BlockJacobian) -> BlockJacobian:
    return part


def _cast(part: Callable[[], BlockJacobian], dtype: torch.dtype) -> BlockJacobian:
    return part().to(dtype)
