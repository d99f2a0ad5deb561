"""The Jacobian of one block over a batch: what every form of it answers.

There are three forms. ``LinearJacobian`` keeps the two factors of a linear map, ``LookupJacobian`` those of an
embedding, and ``DenseJacobian`` the whole Jacobian: small for biases and norms; where it is large, as for tied or
normalised weights, the byte budget counts it and a chunk has fewer samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lapwing.networks.linear_jacobian import LinearJacobian


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
