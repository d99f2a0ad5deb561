"""The Jacobians of blocks that are not kept as two factors: whole ones, and those of embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lapwing.errors import ModelError
from lapwing.linalg.dense import Axes, Basis
from lapwing.networks.jacobians import BlockJacobian, KroneckerRows
from lapwing.runtime.memory import chunks

if TYPE_CHECKING:
    from lapwing.networks.jacobians import Block, BlockJacobian, KroneckerRows
    from lapwing.networks.selection import Selection


DROPPED = 13  # bits at the end of a float32 that TF32 does not have


def coarse(x: Tensor) -> bool:
    """Return whether a product with this factor rounds it to the ten bits of TF32, as GPUs may be set to do."""
    if x.device.type != "cuda" or x.dtype != torch.float32:
        return False
    settings = torch.backends.cuda.matmul
    chosen = getattr(settings, "fp32_precision", None)  # newer; reading the older name may then raise
    return bool(settings.allow_tf32) if chosen is None else chosen == "tf32"


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split x = high + low, float32, so that TF32 holds all bits of high and almost all of low.

    >>> high, low = halves(torch.tensor([1.0, 1.0 + 2.0**-12]))
    >>> high.tolist(), low.tolist()
    ([1.0, 1.0], [0.0, 0.000244140625])
    """
    high = (x.view(torch.int32) & -(1 << DROPPED)).view(torch.float32)
    return high, x - high


def product(x: Tensor, fixed: Tensor) -> Tensor:
    """Return x @ fixed, where the rows of x are the vectors that an operator is applied to.

    Rounding ``fixed`` gives a slightly different operator. Rounding x gives no linear operator at all, and no linear
    system can be solved with it to more than three digits. So x is multiplied in two halves, at twice the cost.
    """
    if not coarse(x):
        return x @ fixed
    high, low = halves(x)
    return (high @ fixed).add_(low @ fixed)


def product_onto(fixed: Tensor, x: Tensor) -> Tensor:
    """Return fixed @ x, where the columns of x are the vectors; see ``product``."""
    if not coarse(x):
        return fixed @ x
    high, low = halves(x)
    return (fixed @ high).add_(fixed @ low)


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

    def expand(self, values: Tensor) -> Tensor:
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
    def equal_runs(self) -> tuple[Tensor, Tensor, Tensor]:
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
class PickedJacobian(BlockJacobian):
    """The Jacobian of some entries of a block, j (B, K, n); to all other entries it gives a derivative of zero."""

    picked: DenseJacobian
    chosen: Entries
    uses: int

    @classmethod
    def of(cls, whole: BlockJacobian, chosen: Entries) -> PickedJacobian:
        """Return the columns of the chosen entries; no others are formed."""
        return cls(DenseJacobian(whole.columns(chosen)), chosen, whole.positions)

    @property
    def positions(self) -> int:
        return self.uses

    @property
    def nbytes(self) -> int:
        return self.picked.nbytes

    def to(self, dtype: torch.dtype) -> PickedJacobian:
        return replace(self, picked=self.picked.to(dtype))

    def samples(self, rows: slice) -> PickedJacobian:
        return replace(self, picked=self.picked.samples(rows))

    def add(self, other: BlockJacobian) -> PickedJacobian:
        return replace(self, picked=DenseJacobian(self.picked.j + other.columns(self.chosen)))

    def whole(self) -> Tensor:
        return self.chosen.expand(self.picked.j)

    def columns(self, entries: Entries) -> Tensor:
        assert entries is self.chosen, "a Jacobian has the columns that it was made for"
        return self.picked.j

    def squares(self) -> Tensor:
        return self.chosen.expand(self.picked.squares())

    def unit_squares(self) -> Tensor:
        return self.picked.unit_squares()

    def quadratic_form(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        return self.picked.quadratic_form(weights.reshape(-1)[self.chosen.at], tokens, full)

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        same = other if other is self else DenseJacobian(other.columns(self.chosen))
        chosen = None if weights is None else weights.reshape(-1)[self.chosen.at]
        return self.picked.between(self.picked if same is self else same, chosen)

    def jvp(self, v: Tensor) -> Tensor:
        return self.picked.jvp(v.flatten(1)[:, self.chosen.at])

    def vjp(self, u: Tensor) -> Tensor:
        return self.chosen.expand(self.picked.vjp(u))

    def materialised_size(self) -> int:
        return self.picked.materialised_size()


@dataclass(frozen=True, eq=False)
class DenseJacobian(BlockJacobian):
    """A Jacobian that is kept whole, j (B, K, p).

    ``form`` (G, d_out, d_in) is that of a linear block, with the weight ``name``, whose factors a batch does not show.
    """

    j: Tensor
    form: tuple[int, ...] = ()  # empty for (p,)
    name: str = ""

    @property
    def nbytes(self) -> int:
        return self.j.nbytes

    @property
    def widths(self) -> tuple[int, int]:
        assert self.form, "a block that is not a linear map has no factors"
        return self.form[1], self.form[2]

    def to(self, dtype: torch.dtype) -> DenseJacobian:
        return replace(self, j=self.j.to(dtype))

    def samples(self, rows: slice) -> DenseJacobian:
        return replace(self, j=self.j[rows])

    def add(self, other: BlockJacobian) -> DenseJacobian:
        return replace(self, j=self.j + other.whole().reshape(self.j.shape))

    def rotate(self, out: Basis, inp: Basis, crossed: bool = True) -> DenseJacobian:
        turned = out.coordinates(inp.coordinates(self.whole()).mT).mT
        return DenseJacobian(turned.flatten(2), tuple(turned.shape[2:]), self.name)

    def kronecker_rows(self, reduce: bool, weights: Tensor | None = None) -> KroneckerRows:
        raise ModelError(
            f"a batch uses {self.name!r} in another way than the first did, by operations that do not show its inputs; "
            "expected one way, since a Kronecker factor is a sum over inputs. Use Full() or Diagonal(), which take "
            "both, compute it in one way in forward, or leave it out with named()."
        )

    def whole(self) -> Tensor:
        return self.j.unflatten(-1, self.form) if self.form else self.j

    def columns(self, entries: Entries) -> Tensor:
        return self.j.index_select(-1, entries.at)

    def squares(self) -> Tensor:
        total = self.j.square().sum((0, 1))
        return total.unflatten(-1, self.form) if self.form else total

    def unit_squares(self) -> Tensor:
        squares = self.j.square().transpose(0, 1)
        return squares.unflatten(-1, self.form).sum(-1).flatten(2) if self.form else squares

    def quadratic_form(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        rows, weights = self.j.reshape(len(self.j), tokens, -1, self.j.shape[-1]), weights.reshape(-1)
        return (rows * weights) @ rows.mT if full else (rows.square() * weights).sum(-1)

    def jvp(self, v: Tensor) -> Tensor:
        return product(v.reshape(len(v), -1), self.j.flatten(0, 1).mT).reshape(len(v), *self.j.shape[:2])

    def vjp(self, u: Tensor) -> Tensor:
        total = product(u.flatten(1), self.j.flatten(0, 1))
        return total.unflatten(-1, self.form) if self.form else total

    def materialised_size(self) -> int:
        return self.j.numel()


@dataclass(frozen=True, eq=False)
class LookupJacobian(BlockJacobian):
    """The Jacobian of an embedding: its input factor is an index and never a one-hot vector.

    Repeats of a token within a sample are added up first, into U segments. ``g`` (K, U, d_out) holds their gradients;
    ``token`` and ``owner`` (U,) say to which row of the table and to which sample a segment belongs.
    """

    g: Tensor
    token: Tensor
    owner: Tensor
    batch: int
    table: int
    rows: Tensor  # sample * table + token of all uses, without padding, for the counts of the input factor
    is_lookup: ClassVar[bool] = True

    @classmethod
    def build(cls, indices: Tensor, g: Tensor, real: Tensor, table: int) -> LookupJacobian:
        """Return it for indices (B, T) and gradients g (K, B, T, d_out); ``real`` (B, T) is False for padding."""
        batch = len(indices)
        key = (torch.arange(batch, device=indices.device)[:, None] * table + indices)[real]
        return cls._sum_by_key(key, g[:, real], batch, table, key)

    @classmethod
    def _sum_by_key(cls, key: Tensor, g: Tensor, batch: int, table: int, rows: Tensor) -> LookupJacobian:
        """Add up the gradients g (K, n, d_out) that have the same key, sample * table + token."""
        unique, inverse = torch.unique(key, return_inverse=True)
        pooled = g.new_zeros(g.shape[0], len(unique), g.shape[-1]).index_add_(1, inverse, g)
        return cls(pooled, unique % table, unique // table, batch, table, rows)

    @property
    def positions(self) -> int:
        return max(1, len(self.rows) // self.batch)

    @property
    def nbytes(self) -> int:
        return self.g.nbytes + self.token.nbytes + self.owner.nbytes + self.rows.nbytes

    @property
    def widths(self) -> tuple[int, int]:
        return self.g.shape[-1], self.table

    def to(self, dtype: torch.dtype) -> LookupJacobian:
        return replace(self, g=self.g.to(dtype))

    def samples(self, rows: slice) -> LookupJacobian:
        """Return that of some samples; repeats of a token count once for the input factor."""
        chosen = (self.owner >= rows.start) & (self.owner < rows.stop)
        token, owner = self.token[chosen], self.owner[chosen] - rows.start
        key = owner * self.table + token
        return LookupJacobian(self.g[:, chosen], token, owner, rows.stop - rows.start, self.table, key)

    def add(self, other: LookupJacobian) -> LookupJacobian:
        key = torch.cat([part.owner * part.table + part.token for part in (self, other)])
        g, rows = torch.cat([self.g, other.g], 1), torch.cat([self.rows, other.rows])
        return self._sum_by_key(key, g, self.batch, self.table, rows)

    def rotate(self, out: Basis, inp: Basis, crossed: bool = True) -> LookupJacobian:
        assert isinstance(inp, Axes), "a lookup has no input basis"
        g = self.g if inp.scale is None else self.g * inp.scale[0][self.token].unsqueeze(-1).to(self.g)
        return replace(self, g=out.coordinates(g))

    def kronecker_rows(self, reduce: bool, weights: Tensor | None = None) -> KroneckerRows:
        each = None if weights is None else weights[self.rows // self.table]
        counts = torch.bincount(self.rows % self.table, weights=each, minlength=self.table)
        number = float(self.rows.numel() if each is None else each.sum())
        return KroneckerRows(None, counts, self.g.flatten(0, 1), False, number)

    def whole(self) -> Tensor:
        outputs, _, d_out = self.g.shape
        full = self.g.new_zeros(self.batch, self.table, outputs, d_out)
        full[self.owner, self.token] = self.g.transpose(0, 1)
        return full.permute(0, 2, 3, 1).unsqueeze(2)

    def columns(self, entries: Entries) -> Tensor:
        _, output, row = entries.coordinates
        keys = self.owner * self.table + self.token  # they rise: see ``_pooled``
        wanted = torch.arange(self.batch, device=keys.device)[:, None] * self.table + row  # (B, n)
        place = torch.searchsorted(keys, wanted).clamp_max(max(0, len(keys) - 1))
        if not len(keys):
            return self.g.new_zeros(self.batch, len(self.g), len(row))
        columns = self.g[:, place, output]  # (K, B, n)
        return torch.where(keys[place] == wanted, columns, 0.0).transpose(0, 1)

    def squares(self) -> Tensor:
        total = self.g.new_zeros(self.table, self.g.shape[-1])
        return total.index_add_(0, self.token, self.g.square().sum(0)).mT.unsqueeze(0)

    def unit_squares(self) -> Tensor:
        total = self.g.new_zeros(self.g.shape[0], self.batch, self.g.shape[-1])
        return total.index_add_(1, self.owner, self.g.square())

    def quadratic_form(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        seeds, segments, d_out = self.g.shape
        classes = seeds // tokens
        shape = (self.batch, tokens, classes, classes) if full else (self.batch, tokens, classes)
        total = self.g.new_zeros(shape)
        numbers = seeds * (3 * d_out + (classes if full else 1))
        for part in chunks(segments, self.g.element_size() * numbers, self.g.device):
            rows = self.g[:, part].transpose(0, 1).reshape(-1, tokens, classes, d_out)
            scaled = rows * weights[0].mT[self.token[part]][:, None, None]
            forms = scaled @ rows.mT if full else (scaled * rows).sum(-1)
            total.index_add_(0, self.owner[part], forms)
        return total

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        """Return J diag(weights) J'ᵀ, over the rows of the table that either batch has."""
        if not isinstance(other, LookupJacobian):
            return super().between(other, weights)
        tokens = torch.unique(torch.cat([self.token, other.token]))
        left = self._over(tokens)
        right = left if other is self else other._over(tokens)
        if weights is not None:
            left = left * weights[0].mT[tokens]
        return left.flatten(1) @ right.flatten(1).mT

    def _over(self, tokens: Tensor) -> Tensor:
        """Return the Jacobian over some rows of the table, (B K, len(tokens), d_out)."""
        outputs, _, d_out = self.g.shape
        place = torch.searchsorted(tokens, self.token)
        full = self.g.new_zeros(self.batch, len(tokens), outputs, d_out)
        full = full.index_put((self.owner, place), self.g.transpose(0, 1))
        return full.permute(0, 2, 1, 3).reshape(-1, len(tokens), d_out)

    def jvp(self, v: Tensor) -> Tensor:
        picked = v[:, 0].mT[:, self.token]  # (n, U, d_out)
        parts = torch.einsum("kui,nui->nuk", self.g, picked)
        return parts.new_zeros(v.shape[0], self.batch, self.g.shape[0]).index_add_(1, self.owner, parts)

    def vjp(self, u: Tensor) -> Tensor:
        mixed = torch.einsum("kui,nuk->nui", self.g, u[:, self.owner])
        total = mixed.new_zeros(u.shape[0], self.table, self.g.shape[-1]).index_add_(1, self.token, mixed)
        return total.mT.unsqueeze(1)

    def materialised_size(self) -> int:
        return self.g.numel()
