"""Single entries of a block, where weights are chosen one by one, and the Jacobian of these entries alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.linalg.bases import Basis
from lapwing.networks.dense_jacobian import DenseJacobian, whole_between

if TYPE_CHECKING:
    from lapwing.networks.jacobians import Block, BlockJacobian, KroneckerRows
    from lapwing.networks.selection import Selection

# A product over a whole layer runs so many times as fast, for each multiplication, as one over gathered entries.
FASTER = 8


def are_few(count: int, size: int, seeds: int, positions: int) -> bool:
    """Return whether the columns of ``count`` out of ``size`` entries are cheaper than the factors of a whole block.

    Columns take ``seeds`` numbers for each entry and sample, a product with the factors ``positions`` multiplications.
    """
    return FASTER * seeds * count <= positions * size and 2 * count <= size


@dataclass(frozen=True, eq=False)
class Entries:
    """Chosen entries of one block: where they are in its form, flattened, (n,), and their places in theta, (n,)."""

    form: tuple[int, ...]
    at: Tensor
    places: Tensor

    @classmethod
    def of(cls, layout: tuple[Block, ...], selection: Selection, device: torch.device) -> tuple[Entries, ...]:
        """Return the chosen entries of all blocks; every block has at least one."""
        numbers = selection.split(torch.arange(1, selection.size + 1, device=device))
        parts = []
        for block in layout:
            flat = block.arrange(numbers).reshape(-1)
            at = flat.nonzero()[:, 0]
            parts.append(cls(block.form, at, flat[at] - 1))
        return tuple(parts)

    @property
    def size(self) -> int:
        """The number of all entries of the block."""
        return math.prod(self.form)

    def spread(self, values: Tensor) -> Tensor:
        """Return values (..., n) of the entries as those of the whole block, (..., *form), zero elsewhere."""
        full = values.new_zeros(*values.shape[:-1], self.size)
        full[..., self.at] = values
        return full.unflatten(-1, self.form)

    @cached_property
    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        """The group, output and input of every entry of a linear map, (n,) each."""
        _, d_out, d_in = self.form
        return self.at // (d_out * d_in), self.at // d_in % d_out, self.at % d_in

    @cached_property
    def starts(self) -> list[int]:
        """For every output of all groups, how many entries come before its own; and the number of all. They rise."""
        groups, d_out, d_in = self.form
        ends = torch.arange(groups * d_out + 1, device=self.at.device) * d_in
        return list(torch.searchsorted(self.at, ends).tolist())

    @cached_property
    def runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """The entries of a linear map in S runs of equal length w, each of entries of one output.

        Returns the output of each run, counted through all groups, (S,); the inputs of its entries, (S, w), filled up
        with zeros; and the place of every entry among the S w, (n,). At most twice as many places as entries.
        """
        _, _, d_in = self.form
        output, inverse, counts = torch.unique_consecutive(self.at // d_in, return_inverse=True, return_counts=True)
        width = -(-len(self.at) // len(output))
        n_runs = -(-counts // width)
        rank = torch.arange(len(self.at), device=self.at.device) - (counts.cumsum(0) - counts)[inverse]
        place = ((n_runs.cumsum(0) - n_runs)[inverse] + rank // width) * width + rank % width
        inputs = self.at.new_zeros(int(n_runs.sum()) * width)
        inputs[place] = self.at % d_in
        return output.repeat_interleave(n_runs), inputs.reshape(-1, width), place


@dataclass(frozen=True, eq=False)
class PickedJacobian:
    """The Jacobian of some entries of a block, j (B, K, n); to all other entries it gives a derivative of zero."""

    picked: DenseJacobian
    chosen: Entries
    positions: int

    @classmethod
    def of(cls, whole: BlockJacobian, chosen: Entries) -> PickedJacobian:
        """Return the columns of the chosen entries; no others are formed."""
        return cls(DenseJacobian(whole.columns(chosen)), chosen, whole.positions)

    @property
    def nbytes(self) -> int:
        return self.picked.nbytes

    @property
    def widths(self) -> tuple[int, int]:
        raise AssertionError("single entries have no factors")

    def to(self, dtype: torch.dtype) -> PickedJacobian:
        return replace(self, picked=self.picked.to(dtype))

    def samples(self, rows: slice) -> PickedJacobian:
        return replace(self, picked=self.picked.samples(rows))

    def joined(self, other: BlockJacobian) -> PickedJacobian:
        return replace(self, picked=DenseJacobian(self.picked.j + other.columns(self.chosen)))

    def rotated(self, out: Basis, inp: Basis, crossed: bool = True) -> PickedJacobian:
        raise AssertionError("single entries have no factors to rotate")

    def kronecker_rows(self, reduce: bool, weights: Tensor | None = None) -> KroneckerRows:
        raise AssertionError("single entries have no Kronecker factors")

    def squares_in(self, out: Basis, inp: Basis) -> Tensor:
        raise AssertionError("single entries have no factors to rotate")

    def single_map(self) -> None:
        return None

    def whole(self) -> Tensor:
        return self.chosen.spread(self.picked.j)

    def columns(self, entries: Entries) -> Tensor:
        assert entries is self.chosen, "a Jacobian has the columns that it was made for"
        return self.picked.j

    def squares(self) -> Tensor:
        return self.chosen.spread(self.picked.squares())

    def unit_squares(self) -> Tensor:
        return self.picked.unit_squares()

    def weighted(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        return self.picked.weighted(weights.reshape(-1)[self.chosen.at], tokens, full)

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        same = other if other is self else DenseJacobian(other.columns(self.chosen))
        chosen = None if weights is None else weights.reshape(-1)[self.chosen.at]
        return whole_between(self.picked, self.picked if same is self else same, chosen)

    def jvp(self, v: Tensor) -> Tensor:
        return self.picked.jvp(v.flatten(1)[:, self.chosen.at])

    def vjp(self, u: Tensor) -> Tensor:
        return self.chosen.spread(self.picked.vjp(u))

    def formed(self, count: int | None = None) -> PickedJacobian:
        return self

    def formed_numbers(self) -> int:
        return self.picked.formed_numbers()
