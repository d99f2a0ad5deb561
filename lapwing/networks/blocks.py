"""Parameters in blocks, and how the entries of a block are arranged.

A *linear* block is a weight used as a linear map, with its bias as one more input column. Every other parameter is a
block without that structure. The Jacobians of blocks are in the files ``*_jacobian.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Parameters that are handled together.

    ``kind``: "rows" for a weight stored (d_out, d_in), "columns" for one stored (d_in, d_out), "dense" for a parameter
    that is no linear map, "opaque" for one that has no rule; ``why`` gives the reason. Groups count independent maps
    (grouped convolution). ``d_in`` includes the bias column.
    """

    kind: str
    weight: str
    shape: tuple[int, ...]
    bias: str | None = None
    groups: int = 1
    why: str = ""

    @property
    def linear(self) -> bool:
        """Whether it is a linear map."""
        return self.kind in ("rows", "columns")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def d_out(self) -> int:
        """The number of outputs of each map."""
        size = self.shape[0] if self.kind == "rows" else math.prod(self.shape[1:])
        return size // self.groups if self.kind == "rows" else size

    @property
    def d_in(self) -> int:
        """The number of inputs of each map, with one more for a bias."""
        size = math.prod(self.shape[1:]) if self.kind == "rows" else self.shape[0] // self.groups
        return size + (self.bias is not None)

    @property
    def size(self) -> int:
        """The number of entries."""
        return self.groups * self.d_out * self.d_in if self.linear else math.prod(self.shape)

    @property
    def form(self) -> tuple[int, ...]:
        """The shape in which the entries are arranged: (G, d_out, d_in) for a linear map, otherwise (size,)."""
        return (self.groups, self.d_out, self.d_in) if self.linear else (self.size,)

    def arrange(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return parameters (..., *shape) as one tensor (..., *form)."""
        weight = values[self.weight]
        lead = weight.shape[: weight.ndim - len(self.shape)]
        if not self.linear:
            return weight.reshape(*lead, -1)
        if self.kind == "rows":
            matrix = weight.reshape(*lead, self.groups, self.d_out, -1)
        else:
            matrix = weight.reshape(*lead, self.groups, -1, self.d_out).mT
        if self.bias is None:
            return matrix
        return torch.cat([matrix, values[self.bias].reshape(*lead, self.groups, self.d_out, 1)], -1)

    def spread(self, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter by name, flat in its last dimension: the inverse of ``arrange``."""
        lead = matrix.shape[: matrix.ndim - len(self.form)]
        if not self.linear:
            yield self.weight, matrix
            return
        weight = matrix if self.bias is None else matrix[..., :-1]
        yield self.weight, (weight if self.kind == "rows" else weight.mT).reshape(*lead, -1)
        if self.bias is not None:
            yield self.bias, matrix[..., -1].reshape(*lead, -1)
