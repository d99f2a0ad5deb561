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
    """The Jacobian of a batch, block by block. Row k belongs to seed k; ``tokens`` counts data per sample."""

    parts: tuple[Callable[[], BlockJacobian], ...]
    layout: tuple[Block, ...]
    selection: Selection
    batch: int
    outputs: int
    dtype: torch.dtype
    tokens: int = 1

    def __iter__(self) -> Iterator[tuple[Block, BlockJacobian]]:
        """Block by block: each is formed when its turn comes and dropped after, so memory follows the largest.

        Blocks without a rule are formed together, and stay."""
        for block, part in zip(self.layout, self.parts, strict=True):
            yield block, part()

    def whole(self) -> Tensor:
        """The Jacobian itself, (B, K, P). For small networks and for tests."""
        parts: dict[str, Tensor] = {}
        for block, jacobian in self:
            dense = jacobian.whole()  # flat where a linear block is held as one
            parts.update(block.spread(dense.reshape(*dense.shape[:2], *block.form)))
        return self.selection.picked(torch.cat([parts[name] for name in self.selection.names], -1))

    def double(self) -> LayerJacobians:
        """The same in float64, for differences that cancel."""
        parts = tuple(partial(_cast, part, torch.float64) for part in self.parts)
        return replace(self, parts=parts, dtype=torch.float64)

    def jvp(self, v: Tensor) -> Tensor:
        """J v for every row of v (n, P): (n, B, K), from the stored factors."""
        values = self.selection.split(v.to(self.dtype))
        total: Tensor | None = None
        for block, jac in self:
            found = jac.jvp(block.arrange(values))
            total = found if total is None else total + found
        assert total is not None
        return total

    def vjp(self, u: Tensor) -> Tensor:
        """Jᵀ u for every u (n, B, K), summed over samples: (n, P)."""
        parts: dict[str, Tensor] = {}
        for block, jacobian in self:
            found = jacobian.vjp(u.to(self.dtype)).reshape(len(u), *block.form)
            parts.update(block.spread(found))
        return self.selection.picked(torch.cat([parts[name] for name in self.selection.names], -1))

    def gram(self, v: Tensor) -> Tensor:
        """Jᵀ J v for every row of v (n, P): every block is formed once, for both ways."""
        formed = tuple(partial(_same, part().formed(len(v))) for part in self.parts)
        ready = replace(self, parts=formed)
        return ready.vjp(ready.jvp(v))

    def held(self) -> LayerJacobians:
        """The same with every block formed now, in the form in which repeated products are cheapest."""
        kept = tuple(part().compact() for part in self.parts)
        return replace(self, parts=tuple(partial(_same, part) for part in kept))

    def held_bytes(self) -> int:
        """What ``held`` would take, without taking it: one block after another is looked at."""
        return sum(part.compact_numbers() for _, part in self) * torch.finfo(self.dtype).bits // 8

    @property
    def nbytes(self) -> int:
        """What the blocks take once they are formed."""
        total = 0
        for _, part in self:
            tensors = (getattr(part, name) for name in ("a", "g", "j", "token", "owner", "rows") if hasattr(part, name))
            total += sum(t.numel() * t.element_size() for t in tensors)
        return total


def _same(part: BlockJacobian) -> BlockJacobian:
    return part


def _cast(part: Callable[[], BlockJacobian], dtype: torch.dtype) -> BlockJacobian:
    return part().to(dtype)
