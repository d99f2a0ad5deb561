"""Parameters in blocks, and the Jacobian of each block in factored form.

A *linear* block is a weight used as a linear map, with its bias as one more input column. Its Jacobian for
output k and sample b is Σ_t g_kbt ⊗ a_bt and is kept as the two factors. Everything else is a *dense* block,
whose Jacobian (B, K, p) is kept whole: small for biases and norms; where it is large, as for tied or normalised
weights, the byte budget counts it and a chunk has fewer samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.networks.budget import temporary
from lapwing.networks.halves import product, product_onto


@dataclass(frozen=True)
class Block:
    """Some parameters that are handled together.

    ``kind``: "rows" for a weight stored (d_out, d_in), "columns" for one stored (d_in, d_out), "dense" for a parameter
    that is no linear map, "opaque" for one that has no rule; ``why`` says it in words. Groups count independent maps
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
        return self.kind in ("rows", "columns")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def d_out(self) -> int:
        size = self.shape[0] if self.kind == "rows" else math.prod(self.shape[1:])
        return size // self.groups if self.kind == "rows" else size

    @property
    def d_in(self) -> int:
        size = math.prod(self.shape[1:]) if self.kind == "rows" else self.shape[0] // self.groups
        return size + (self.bias is not None)

    @property
    def size(self) -> int:
        return self.groups * self.d_out * self.d_in if self.linear else math.prod(self.shape)

    @property
    def form(self) -> tuple[int, ...]:
        """The shape in which the block's own entries are arranged."""
        return (self.groups, self.d_out, self.d_in) if self.linear else (self.size,)

    def arrange(self, values: Mapping[str, Tensor]) -> Tensor:
        """Parameters (..., *shape) as one tensor (..., *form)."""
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
        """The inverse of ``arrange``: each parameter by name, flat in its last dimension."""
        lead = matrix.shape[: matrix.ndim - len(self.form)]
        if not self.linear:
            yield self.weight, matrix
            return
        weight = matrix if self.bias is None else matrix[..., :-1]
        yield self.weight, (weight if self.kind == "rows" else weight.mT).reshape(*lead, -1)
        if self.bias is not None:
            yield self.bias, matrix[..., -1].reshape(*lead, -1)


@dataclass(frozen=True, eq=False)
class LinearJacobian:
    """Factors of a linear block: a (G, B, T, d_in), g (G, K, B, T, d_out)."""

    a: Tensor
    g: Tensor

    @property
    def batch(self) -> int:
        return self.a.shape[1]

    @property
    def positions(self) -> int:
        return self.a.shape[2]

    def to(self, dtype: torch.dtype) -> LinearJacobian:
        return LinearJacobian(self.a.to(dtype), self.g.to(dtype))

    def joined(self, other: LinearJacobian) -> LinearJacobian:
        """Two uses of one weight add up: their positions stand side by side."""
        return LinearJacobian(torch.cat([self.a, other.a], 2), torch.cat([self.g, other.g], 3))

    def rotated(self, out: Tensor, inp: Tensor | None) -> LinearJacobian:
        """In the bases out (G, d_out, d_out) and inp (G, d_in, d_in)."""
        a = self.a if inp is None else _right(self.a, inp)
        if self.g.stride(2) == 0 and self.g.shape[2] > 1:  # the same for every sample: rotate once
            return LinearJacobian(a, _right(self.g[:, :, :1], out).expand(self.g.shape))
        return LinearJacobian(a, _right(self.g, out))

    def pieces(self, width: int, most: int | None = None) -> Iterator[LinearJacobian]:
        """Runs of samples whose Jacobians, ``width`` numbers for each sample, fit the byte budget."""
        step = max(1, temporary(self.a.device) // (self.a.element_size() * max(width, 1)))
        step = step if most is None else min(step, most)
        for start in range(0, self.batch, step):
            yield LinearJacobian(self.a[:, start : start + step], self.g[:, :, start : start + step])

    def _products(self) -> Tensor:
        """The Jacobian itself, (B, G, K, d_out, d_in)."""
        groups, outputs, batch, positions, d_out = self.g.shape
        g = self.g.permute(2, 0, 1, 4, 3).reshape(batch * groups, outputs * d_out, positions)
        a = self.a.permute(1, 0, 2, 3).reshape(batch * groups, positions, -1)
        product = g * a if positions == 1 else torch.bmm(g, a)
        return product.reshape(batch, groups, outputs, d_out, -1)

    def whole(self) -> Tensor:
        """The Jacobian itself, (B, K, G, d_out, d_in)."""
        return self._products().transpose(1, 2)

    def squares(self) -> Tensor:
        """Σ over samples and outputs of the squared Jacobian, (G, d_out, d_in)."""
        if self.positions == 1:
            return torch.bmm(_summed_squares(self.g[:, :, :, 0]).mT, self.a[:, :, 0].square())
        groups, outputs, _, _, d_out = self.g.shape
        total = self.a.new_zeros(groups, outputs, d_out, self.a.shape[-1])
        # On a CPU a few samples at a time, so that squaring finds them in the cache.
        for piece in self.pieces(2 * total.numel(), 32 if self.a.is_cpu else None):
            product = piece._products()
            total += product.mul_(product).sum(0)
        return total.sum(1)

    def weighted(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        """Σ_ij J_kij weights_ij J_lij: (B, S, C, C) if full, else its diagonal (B, S, C)."""
        outputs = self.g.shape[1]
        classes = outputs // tokens
        if self.positions == 1:
            scale = self.a[:, :, 0].square() @ weights.mT  # (G, B, d_out)
            return self._diagonal_form(scale, tokens, full)
        found = []
        root = weights.sqrt()[:, :, None]  # (G, d_out, 1, d_in)
        for piece in self.pieces(2 * outputs * weights.numel()):
            rows = piece._by_output().mul_(root)
            size, last = piece.batch, rows.shape[-1]
            # Many small products over the outputs of the layer: one long one would leave a GPU idle.
            rows = rows.reshape(size, -1, tokens, classes, last)
            found.append((rows @ rows.mT).sum(1) if full else rows.square().sum((1, -1)))
        return torch.cat(found)

    def _by_output(self) -> Tensor:
        """The Jacobian as (B, G, d_out, K, d_in)."""
        groups, outputs, batch, positions, d_out = self.g.shape
        g = self.g.permute(2, 0, 4, 1, 3).reshape(batch * groups, d_out * outputs, positions)
        a = self.a.permute(1, 0, 2, 3).reshape(batch * groups, positions, -1)
        return torch.bmm(g, a).reshape(batch, groups, d_out, outputs, -1)

    def _diagonal_form(self, scale: Tensor, tokens: int, full: bool) -> Tensor:
        groups, _, batch, _, d_out = self.g.shape
        if groups == 1 and tokens == 1 and self.g.stride(2) == 0:  # the same for every sample: a last layer
            rows = self.g[0, :, 0, 0]  # (K, d_out)
            if not full:
                return (scale[0] @ rows.square().mT).unsqueeze(1)
            return ((rows * scale[0].unsqueeze(1)) @ rows.mT).unsqueeze(1)
        if not full:
            return torch.einsum("gkbi,gbi->bk", self.g[:, :, :, 0].square(), scale).reshape(batch, tokens, -1)
        rows = self.g[:, :, :, 0].permute(0, 2, 1, 3).reshape(groups, batch, tokens, -1, d_out)
        return ((rows * scale[:, :, None, None]) @ rows.mT).sum(0)

    def cross(self, weights: Tensor) -> Tensor:
        """Σ_ij J_bkij weights_ij J_clij between all samples: (B K, B K)."""
        return self.between(self, weights)

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        """J diag(weights) J'ᵀ between the samples of two batches, (B K, B' K'); weights of one where none are given.

        Without weights a product of two Gram matrices, (a·a')(g·g') summed over positions, where that costs less than
        this layer's Jacobians. Differentiable in the factors.
        """
        if not isinstance(other, LinearJacobian):
            return _flat_between(self, other, weights)
        if weights is None and self._grams_cost_less(other):
            return self._grams(other)
        return self._outer(other, weights)

    def _grams_cost_less(self, other: LinearJacobian) -> bool:
        (_, k, b, t, d_out), (_, m, c, u, _), d_in = self.g.shape, other.g.shape, self.a.shape[-1]
        grams = b * t * c * u * (d_in + k * m * d_out)
        return grams <= d_out * d_in * (k * b * t + m * c * u + k * b * m * c)

    def _grams(self, other: LinearJacobian) -> Tensor:
        groups, outputs, batch, positions, d_out = self.g.shape
        _, columns, others, places, _ = other.g.shape
        right_a = other.a.reshape(groups, others * places, -1)
        right_g = other.g.reshape(groups, columns * others * places, d_out)
        if positions == places == 1:
            a = torch.bmm(self.a[:, :, 0], right_a.mT).reshape(groups, 1, batch, 1, others)
            g = torch.bmm(self.g.reshape(groups, outputs * batch, d_out), right_g.mT)
            found = (a * g.reshape(groups, outputs, batch, columns, others)).sum(0)
            return found.permute(1, 0, 3, 2).reshape(batch * outputs, others * columns)
        parts = []
        for piece in self.pieces(3 * groups * outputs * positions * columns * others * places):
            size = piece.batch
            a = torch.bmm(piece.a.reshape(groups, size * positions, -1), right_a.mT)
            g = torch.bmm(piece.g.reshape(groups, outputs * size * positions, d_out), right_g.mT)
            product = a.reshape(groups, 1, size, positions, 1, others, places) * g.reshape(
                groups, outputs, size, positions, columns, others, places
            )
            parts.append(product.sum((0, 3, 6)).permute(1, 0, 3, 2).reshape(size * outputs, others * columns))
        return torch.cat(parts)

    def _outer(self, other: LinearJacobian, weights: Tensor | None) -> Tensor:
        """Over the Jacobians of a few outputs of the layer at a time."""
        mine, theirs = self.batch * self.g.shape[1], other.batch * other.g.shape[1]
        total = self.a.new_zeros(mine, theirs)
        step = max(
            1,
            temporary(self.a.device) // (self.a.element_size() * (mine + theirs) * self.a.shape[-1] * self.a.shape[0]),
        )
        for i in range(0, self.g.shape[-1], step):
            rows = LinearJacobian(self.a, self.g[..., i : i + step]).whole()
            last = rows if other is self else LinearJacobian(other.a, other.g[..., i : i + step]).whole()
            rows = rows if weights is None else rows * weights[:, i : i + step]
            total = total + rows.reshape(mine, -1) @ last.reshape(theirs, -1).mT
        return total

    def jvp(self, v: Tensor) -> Tensor:
        """J v for v (n, G, d_out, d_in): (n, B, K)."""
        count, groups, d_out, d_in = v.shape
        wide = v.transpose(0, 1).reshape(groups, count * d_out, d_in)
        found = []
        for piece in self.pieces(2 * groups * self.positions * count * d_out):
            size = piece.batch
            a = piece.a.reshape(groups, size * self.positions, d_in)
            if a.is_cuda:  # fast only where both factors have the sum along memory
                a = a.contiguous()
            moved = product_onto(a, wide.mT).reshape(groups, size, self.positions, count, d_out)
            left = moved.permute(1, 3, 0, *(4, 2) if self._channels_first else (2, 4)).reshape(size, count, -1)
            found.append(product(left, piece._rows().mT))
        return torch.cat(found).transpose(0, 1)

    def vjp(self, u: Tensor) -> Tensor:
        """Jᵀ u for u (n, B, K), summed over samples: (n, G, d_out, d_in)."""
        count = u.shape[0]
        groups, _, _, positions, d_out = self.g.shape
        inner = (d_out, positions) if self._channels_first else (positions, d_out)
        total, start = u.new_zeros(count * d_out * groups, self.a.shape[-1]).reshape(groups, count * d_out, -1), 0
        for piece in self.pieces(2 * groups * positions * count * d_out):
            size = piece.batch
            mixed = product(u[:, start : start + size].transpose(0, 1), piece._rows())
            left = mixed.reshape(size, count, groups, *inner)
            left = left.permute(2, 1, 3, 0, 4) if self._channels_first else left.permute(2, 1, 4, 0, 3)
            total += product(left.reshape(groups, count * d_out, -1), piece.a.reshape(groups, size * positions, -1))
            start += size
        return total.reshape(groups, count, d_out, -1).transpose(0, 1)

    @property
    def _channels_first(self) -> bool:
        """Whether g lies in memory as the gradient of an image does, positions innermost."""
        return self.g.stride(-2) < self.g.stride(-1)

    def _rows(self) -> Tensor:
        """g as (B, K, G d_out T) or (B, K, G T d_out), whichever needs no copy for one group."""
        order = (4, 3) if self._channels_first else (3, 4)
        return self.g.permute(2, 1, 0, *order).reshape(self.batch, self.g.shape[1], -1)

    def formed(self, count: int) -> LinearJacobian | DenseJacobian:
        """The form in which one product there and back with ``count`` vectors is cheapest.

        Whole, K T multiplications for each weight and K for each vector on either way, instead of T for each vector on
        either way; but not where it takes much more memory than its factors.
        """
        (_, outputs, _, positions, d_out), d_in = self.g.shape, self.a.shape[-1]
        cheaper = outputs * (positions + 2 * count) < 2 * count * positions
        small = outputs * d_out * d_in <= 3 * positions * (d_in + outputs * d_out)
        return DenseJacobian(self.whole().flatten(2)) if cheaper and small else self

    def compact(self) -> LinearJacobian | DenseJacobian:
        """The form in which repeated products are cheaper: whole where positions outnumber outputs."""
        if self.positions <= self.g.shape[1]:
            return self
        return DenseJacobian(self.whole().flatten(2))

    def compact_numbers(self) -> int:
        """How many numbers that form has."""
        if self.positions <= self.g.shape[1]:
            return self.a.numel() + self.g.numel()
        groups, outputs, batch, _, d_out = self.g.shape
        return batch * outputs * groups * d_out * self.a.shape[-1]


@dataclass(frozen=True, eq=False)
class LookupJacobian:
    """An embedding: rows of a table, so the input factor is an index and never a one-hot vector.

    Repeats of a token within a sample are added up first. ``g`` (K, U, d_out) per segment, ``token`` and
    ``owner`` (U,) say which row of the table and which sample a segment belongs to.
    """

    g: Tensor
    token: Tensor
    owner: Tensor
    batch: int
    table: int
    rows: Tensor  # the indices as they came, padding left out, for the factor of counts

    @classmethod
    def build(cls, indices: Tensor, g: Tensor, real: Tensor, table: int) -> LookupJacobian:
        """From indices (B, T), gradients g (K, B, T, d_out) and which of them are no padding (B, T)."""
        batch, _ = indices.shape
        key = (torch.arange(batch, device=indices.device)[:, None] * table + indices)[real]
        unique, inverse = torch.unique(key, return_inverse=True)
        flat = g[:, real]
        pooled = flat.new_zeros(g.shape[0], len(unique), g.shape[-1]).index_add_(1, inverse, flat)
        return cls(pooled, unique % table, unique // table, batch, table, indices[real])

    def to(self, dtype: torch.dtype) -> LookupJacobian:
        return replace(self, g=self.g.to(dtype))

    def joined(self, other: LookupJacobian) -> LookupJacobian:
        g = torch.cat([self.g, other.g], 1)
        key = torch.cat([self.owner * self.table + self.token, other.owner * self.table + other.token])
        unique, inverse = torch.unique(key, return_inverse=True)
        pooled = g.new_zeros(g.shape[0], len(unique), g.shape[-1]).index_add_(1, inverse, g)
        rows = torch.cat([self.rows, other.rows])
        return LookupJacobian(pooled, unique % self.table, unique // self.table, self.batch, self.table, rows)

    def rotated(self, out: Tensor, inp: Tensor | None) -> LookupJacobian:
        if inp is not None:
            raise AssertionError("a lookup has no input basis")
        return replace(self, g=self.g @ out[0])

    def whole(self) -> Tensor:
        outputs, _, d_out = self.g.shape
        full = self.g.new_zeros(self.batch, self.table, outputs, d_out)
        full[self.owner, self.token] = self.g.transpose(0, 1)
        return full.permute(0, 2, 3, 1).unsqueeze(2)

    def squares(self) -> Tensor:
        total = self.g.new_zeros(self.table, self.g.shape[-1])
        return total.index_add_(0, self.token, self.g.square().sum(0)).mT.unsqueeze(0)

    def weighted(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        scale = weights[0].mT[self.token]  # (U, d_out)
        rows = self.g.transpose(0, 1).reshape(len(self.owner), tokens, -1, self.g.shape[-1])
        scaled = rows * scale[:, None, None]
        parts = scaled @ rows.mT if full else (scaled * rows).sum(-1)
        return parts.new_zeros(self.batch, *parts.shape[1:]).index_add_(0, self.owner, parts)

    def cross(self, weights: Tensor) -> Tensor:
        return self.between(self, weights)

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        """As for a linear block, over the rows of the table that either batch has."""
        if not isinstance(other, LookupJacobian):
            return _flat_between(self, other, weights)
        tokens = torch.unique(torch.cat([self.token, other.token]))
        mine = self._over(tokens)
        theirs = mine if other is self else other._over(tokens)
        if weights is not None:
            mine = mine * weights[0].mT[tokens]
        return mine.flatten(1) @ theirs.flatten(1).mT

    def _over(self, tokens: Tensor) -> Tensor:
        """The Jacobian over some rows of the table, (B K, len(tokens), d_out)."""
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

    def formed(self, count: int) -> LookupJacobian:
        return self

    def compact(self) -> LookupJacobian:
        return self

    def compact_numbers(self) -> int:
        return self.g.numel()


@dataclass(frozen=True, eq=False)
class DenseJacobian:
    """The Jacobian of a block that is no linear map, j (B, K, p)."""

    j: Tensor

    @property
    def batch(self) -> int:
        return self.j.shape[0]

    def to(self, dtype: torch.dtype) -> DenseJacobian:
        return DenseJacobian(self.j.to(dtype))

    def joined(self, other: DenseJacobian) -> DenseJacobian:
        return DenseJacobian(self.j + other.j)

    def whole(self) -> Tensor:
        return self.j

    def squares(self) -> Tensor:
        return self.j.square().sum((0, 1))

    def weighted(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        rows, weights = self.j.reshape(self.batch, tokens, -1, self.j.shape[-1]), weights.reshape(-1)
        return (rows * weights) @ rows.mT if full else (rows.square() * weights).sum(-1)

    def cross(self, weights: Tensor) -> Tensor:
        return self.between(self, weights)

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        return _flat_between(self, other, weights)

    def jvp(self, v: Tensor) -> Tensor:
        return product(v.reshape(len(v), -1), self.j.flatten(0, 1).mT).reshape(len(v), *self.j.shape[:2])

    def vjp(self, u: Tensor) -> Tensor:
        return product(u.flatten(1), self.j.flatten(0, 1))

    def formed(self, count: int) -> DenseJacobian:
        return self

    def compact(self) -> DenseJacobian:
        return self

    def compact_numbers(self) -> int:
        return self.j.numel()


BlockJacobian = LinearJacobian | LookupJacobian | DenseJacobian


def _flat_between(one: BlockJacobian, other: BlockJacobian, weights: Tensor | None) -> Tensor:
    """J diag(weights) J'ᵀ of Jacobians that are whole, or of which one is."""
    rows = one.whole().flatten(2).flatten(0, 1)
    last = rows if other is one else other.whole().flatten(2).flatten(0, 1)
    return (rows if weights is None else rows * weights.reshape(-1)) @ last.mT


def _summed_squares(g: Tensor) -> Tensor:
    """Σ_k g² for g (G, K, ...): one seed at a time, so that no second tensor of all seeds is written."""
    total = g[:, 0] * g[:, 0]
    for k in range(1, g.shape[1]):
        total.addcmul_(g[:, k], g[:, k])
    return total


def _right(x: Tensor, basis: Tensor) -> Tensor:
    """x (G, ..., d) times basis (G, d, d)."""
    groups = x.shape[0]
    if groups == 1:
        return x @ basis[0]
    return torch.bmm(x.reshape(groups, -1, x.shape[-1]), basis).reshape(*x.shape[:-1], basis.shape[-1])
