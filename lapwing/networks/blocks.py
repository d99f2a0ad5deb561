"""Parameters in blocks: how the entries of a block are arranged, and what its Jacobian over a batch answers.

A *linear* block is a weight used as a linear map, with its bias as one more input column. Every other parameter is a
block without that structure.

There are three forms of Jacobians. ``LinearJacobian`` keeps the two factors of a linear map, ``LookupJacobian`` those
of an embedding, and ``DenseJacobian`` the whole Jacobian: small for biases and norms; where it is large, as for tied or
normalised weights, the byte budget counts it and a chunk has fewer samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lapwing.networks.linear_jacobian import LinearJacobian


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


@dataclass(frozen=True, eq=False)
class KroneckerRows:
    """Rows whose Gram matrices are the Kronecker factors of a linear block.

    Inputs are either rows (G, N, d_in), or, for an embedding, the number of times that each row of the table is used,
    (d_in,): the Gram matrix of one-hot rows is the diagonal matrix of these counts.
    """

    inputs: Tensor | None
    counts: Tensor | None
    outputs: Tensor  # ([G,] ..., d_out); by runs (G, M, T, d_out), where channels lie before pixels in memory
    by_runs: bool
    number: int  # of positions in all samples together


class BlockJacobian(Protocol):
    """The Jacobian of a block for K seeds and B samples, with the entries of the block in its ``form``."""

    @property
    def batch(self) -> int:
        """B, the number of samples."""
        ...

    @property
    def positions(self) -> int:
        """How often a sample uses the block: pixels of an image, tokens of a text. 1 where the Jacobian is whole."""
        ...

    @property
    def nbytes(self) -> int:
        """The memory that its tensors take."""
        ...

    @property
    def remark(self) -> str:
        """A remark on how it is kept, for reports; "" where the kind of its block says it."""
        ...

    def to(self, dtype: torch.dtype) -> BlockJacobian:
        """Return it in another dtype."""
        ...

    def joined(self, other: BlockJacobian) -> BlockJacobian:
        """Return the sum with the Jacobian of another use of the same block, which has the same form."""
        ...

    def rotated(self, out: Tensor, inp: Tensor | None) -> BlockJacobian:
        """Return it in the bases out (G, d_out, d_out) and inp (G, d_in, d_in). For factored forms."""
        ...

    def kronecker_rows(self, reduce: bool) -> KroneckerRows:
        """Return the rows of both Kronecker factors; ``reduce`` pools the positions of a sample. For factored forms."""
        ...

    def single_map(self) -> LinearJacobian | None:
        """Return it if it is one linear map that each sample uses once, otherwise None."""
        ...

    def whole(self) -> Tensor:
        """Return the Jacobian itself, (B, K, *form)."""
        ...

    def squares(self) -> Tensor:
        """Return the sum over samples and outputs of the squared Jacobian, (*form)."""
        ...

    def weighted(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        """Return Σ_ij J_kij weights_ij J_lij: (B, S, C, C) if full, otherwise its diagonal (B, S, C)."""
        ...

    def cross(self, weights: Tensor) -> Tensor:
        """Return Σ_ij J_bkij weights_ij J_clij between all samples: (B K, B K)."""
        ...

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        """Return J diag(weights) J'ᵀ between the samples of two batches, (B K, B' K'); without weights, J J'ᵀ."""
        ...

    def jvp(self, v: Tensor) -> Tensor:
        """Return J v for v (n, *form): (n, B, K)."""
        ...

    def vjp(self, u: Tensor) -> Tensor:
        """Return Jᵀ u for u (n, B, K), summed over samples: (n, *form)."""
        ...

    def formed(self, count: int) -> BlockJacobian:
        """Return the form in which one product with ``count`` vectors, there and back, is cheapest."""
        ...

    def compact(self) -> BlockJacobian:
        """Return the form in which repeated products are cheapest."""
        ...

    def compact_numbers(self) -> int:
        """Return how many numbers the compact form has."""
        ...


def whole_between(one: BlockJacobian, other: BlockJacobian, weights: Tensor | None) -> Tensor:
    """Return J diag(weights) J'ᵀ, with both Jacobians formed whole."""
    rows = one.whole().flatten(2).flatten(0, 1)
    last = rows if other is one else other.whole().flatten(2).flatten(0, 1)
    return (rows if weights is None else rows * weights.reshape(-1)) @ last.mT
