"""The Jacobian of a linear block, kept in factors, and the curvature of the last linear layer.

On a CPU, sums over the Jacobian of a weight that is used at many positions are formed in pieces that stay in its cache.
The whole Jacobian of a layer, K d_out d_in numbers for each sample, would be written to memory and read back several
times, which takes longer than its products. A piece is a band of outputs of one sample.

Where single weights are selected, only their columns are formed. For the weight of output i and input j, output k and
sample b, the entry is Σ_t g_kbti a_btj. Few weights of a layer are gathered; many are picked out of the products of a
few outputs of the layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from lapwing.linalg.dense import Basis
from lapwing.networks.jacobians import (
    LAYER_SPEED,
    BlockJacobian,
    DenseJacobian,
    Entries,
    KroneckerRows,
    product,
    product_onto,
    small_results_budget,
)
from lapwing.runtime.memory import chunks, concat_chunks, even_chunks

PIECE_BYTES = 2**20  # bytes of a piece: half of what a core's second cache holds


def pieces(a: Tensor, g: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield the number of a sample, a band of outputs, and the Jacobian there, (K, band, d_in).

    Inputs are a (B, T, d_in), gradients g (K, B, T, d_out).
    """
    outputs, batch, _, d_out = g.shape
    band = max(1, PIECE_BYTES // (a.element_size() * outputs * a.shape[-1]))
    for sample in range(batch):
        rows = a[sample].expand(outputs, -1, -1)
        for first in range(0, d_out, band):
            outs = slice(first, min(first + band, d_out))
            yield sample, outs, torch.bmm(g[:, sample, :, outs].mT, rows)


def weighted(a: Tensor, g: Tensor, weights: Tensor, tokens: int, full: bool) -> Tensor:
    """Return Σ_ij J_kij weights_ij J_lij under each of n weights (n, d_out, d_in): (n, B, S, C, C), or (n, B, S, C)."""
    outputs, batch = g.shape[:2]
    classes = outputs // tokens
    total = a.new_zeros(len(weights), batch, tokens, classes, *(classes,) * full)
    roots = weights.sqrt()
    for sample, band, part in pieces(a, g):
        for number, root in enumerate(roots[:, band]):
            scaled = part * root if number < len(roots) - 1 else part.mul_(root)
            rows = scaled.reshape(tokens, classes, -1)
            total[number, sample] += rows @ rows.mT if full else rows.square().sum(-1)
    return total


def squares(a: Tensor, g: Tensor) -> Tensor:
    """Return the sum over samples and outputs of the squared Jacobian, (d_out, d_in)."""
    total = a.new_zeros(g.shape[-1], a.shape[-1])
    for _, band, part in pieces(a, g):
        total[band] += part.mul_(part).sum(0)
    return total


def columns(a: Tensor, g: Tensor, entries: Entries) -> Tensor:
    """Return the Jacobian of the entries, (B, K, n), from inputs a (G, B, T, d_in) and gradients g (G, K, B, T, d_out).

    Memory besides the result: as much again where there is one position, and the inputs and gradients of a few entries
    where there are several.
    """
    if a.shape[2] == 1:
        return _columns_at_one_position(a, g, entries)
    if LAYER_SPEED * len(entries.at) <= entries.size:
        return _gather_columns(a, g, entries)
    return _pick_columns_by_bands(a, g, entries)


def _columns_at_one_position(a: Tensor, g: Tensor, entries: Entries) -> Tensor:
    group, output, inp = entries.coordinates
    if len(a) == 1:
        inputs = a[0, :, 0].index_select(-1, inp)
        rows = g[0, :, :, 0].transpose(0, 1).index_select(-1, output)
    else:
        inputs = a[group, :, 0, inp].mT
        rows = g[group, :, :, 0, output].permute(2, 1, 0)
    return rows * inputs.unsqueeze(1) if rows.requires_grad or inputs.requires_grad else rows.mul_(inputs.unsqueeze(1))


def _gather_columns(a: Tensor, g: Tensor, entries: Entries) -> Tensor:
    """Multiply the gradients of each output with the inputs of its entries, in runs of equal length."""
    outputs, inputs, place = entries.equal_runs
    _, seeds, batch, positions, d_out = g.shape
    group, output = outputs // d_out, outputs % d_out
    width = inputs.shape[1]
    each = 2 * g.element_size() * batch * positions * (seeds + width)
    parts = []
    for some in even_chunks(len(outputs), max(1, small_results_budget(g.device) // each)):
        # Indices that are apart put their dimension first: (S, K, B, T) and (S, w, B, T).
        rows = g[group[some], :, :, :, output[some]].transpose(1, 2)
        below = a[group[some, None], :, :, inputs[some]].transpose(1, 2)
        parts.append(torch.matmul(rows, below.mT).permute(1, 2, 0, 3).flatten(2))  # (B, K, S w)
    return torch.cat(parts, -1).index_select(-1, place)


def _pick_columns_by_bands(a: Tensor, g: Tensor, entries: Entries) -> Tensor:
    """Form the Jacobian of a few outputs of the layer at a time, and pick the entries."""
    groups, seeds, batch, _, d_out = g.shape
    starts, d_in = entries.starts, a.shape[-1]
    each = 2 * g.element_size() * batch * seeds * d_in
    parts = []
    for group in range(groups):
        inputs = a[group].unsqueeze(1)  # (B, 1, T, d_in)
        for band in even_chunks(d_out, max(1, small_results_budget(g.device) // each)):
            first, last = group * d_out + band.start, group * d_out + band.stop
            at = entries.at[starts[first] : starts[last]] - first * d_in
            if len(at):
                rows = g[group, ..., band].permute(1, 0, 3, 2)  # (B, K, band, T)
                parts.append(torch.matmul(rows, inputs).flatten(2).index_select(-1, at))
    return torch.cat(parts, -1)


@dataclass(frozen=True, eq=False)
class LinearJacobian(BlockJacobian):
    """The Jacobian of a linear block in factors: a (G, B, T, d_in), g (G, K, B, T, d_out).

    For output k and sample b it is Σ_t g_kbt ⊗ a_bt. Where samples have several ``lengths``, both are zero beyond them.
    """

    a: Tensor
    g: Tensor
    lengths: Tensor | None = None  # (B,); None if every sample has all T positions

    @property
    def batch(self) -> int:
        return self.a.shape[1]

    @property
    def positions(self) -> int:
        return self.a.shape[2]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.g.nbytes

    @property
    def widths(self) -> tuple[int, int]:
        return self.g.shape[-1], self.a.shape[-1]

    def to(self, dtype: torch.dtype) -> LinearJacobian:
        return LinearJacobian(self.a.to(dtype), self.g.to(dtype), self.lengths)

    def samples(self, rows: slice) -> LinearJacobian:
        lengths = None if self.lengths is None else self.lengths[rows]
        return LinearJacobian(self.a[:, rows], self.g[:, :, rows], lengths)

    def add(self, other: LinearJacobian) -> LinearJacobian:
        """Return the sum of two uses: their positions stand side by side."""
        lengths = None
        if self.lengths is not None or other.lengths is not None:
            lengths = self._counts() + other._counts()
        return LinearJacobian(torch.cat([self.a, other.a], 2), torch.cat([self.g, other.g], 3), lengths)

    def _counts(self) -> Tensor:
        """Return the number of positions of each sample, (B,)."""
        return torch.full((self.batch,), self.positions, device=self.a.device) if self.lengths is None else self.lengths

    def rotate(self, out: Basis, inp: Basis, crossed: bool = True) -> LinearJacobian:
        a = _by_group(self.a, inp.coordinates if crossed or self.positions > 1 else inp.lengths)
        if self.g.stride(2) == 0 and self.g.shape[2] > 1:  # the same for every sample: rotate once
            g = _by_group(self.g[:, :, :1], out.coordinates)
            return replace(self, a=a, g=g.expand(*self.g.shape[:-1], g.shape[-1]))
        return replace(self, a=a, g=_by_group(self.g, out.coordinates))

    def kronecker_rows(self, reduce: bool, weights: Tensor | None = None) -> KroneckerRows:
        a, g, number = self.a, self.g, float(self.batch * self.positions)
        if reduce and self.positions > 1:
            g, number = g.sum(3, keepdim=True), self.batch
            a = a.mean(2, keepdim=True) if self.lengths is None else self._mean_inputs()
        if weights is not None or self.lengths is not None:
            counts = self._counts().clamp_max(1) if reduce else self._counts()
            number = float(counts.sum() if weights is None else counts.to(weights) @ weights)
        a = a if weights is None else a * weights.sqrt().to(a)[:, None, None]
        by_runs = g.stride(-1) != 1 and g.shape[3] >= g.shape[4]  # a convolution's gradient, channels before pixels
        outputs = g.flatten(1, 2) if by_runs else g.flatten(1, 3)
        return KroneckerRows(a.flatten(1, 2), None, outputs, by_runs, number)

    def _mean_inputs(self) -> Tensor:
        """Return the mean input of each sample over the positions that it has, (G, B, 1, d_in)."""
        return self.a.sum(2, keepdim=True) / self._counts().clamp_min(1)[:, None, None]

    def single_map(self) -> LinearJacobian | None:
        return self if self.positions == 1 and self.a.shape[0] == 1 else None

    def pairs(self, rows: slice, first: Tensor, second: Tensor) -> Tensor:
        """Return Σ_k g_ki g_kj for pairs of outputs i, j of some samples, (rows, pairs), for one group and position."""
        g = self.g[0, :, rows, 0].transpose(0, 1).double()  # (rows, K, d_out)
        return torch.bmm(g.mT, g)[:, first, second]

    def pieces(self, width: int, most: int | None = None) -> Iterator[LinearJacobian]:
        """Yield runs of samples whose Jacobians, ``width`` numbers for each sample, fit the byte budget."""
        for rows in chunks(self.batch, self.a.element_size() * width, self.a.device, most=most):
            yield LinearJacobian(self.a[:, rows], self.g[:, :, rows])

    def _bands(self, numbers: int) -> list[slice]:
        """Return runs of the layer's outputs that take this many numbers each at one sample; often it is one run."""
        return list(chunks(self.g.shape[-1], self.a.element_size() * numbers, self.a.device))

    def _band(self, band: slice) -> LinearJacobian:
        return replace(self, g=self.g[..., band])

    def _products(self, seeds_first: bool = True) -> Tensor:
        """Return the Jacobian itself, (B, G, K, d_out, d_in), or (B, G, d_out, K, d_in)."""
        g = self.g.permute(2, 0, 1, 4, 3) if seeds_first else self.g.permute(2, 0, 4, 1, 3)
        rows = g.flatten(0, 1).flatten(1, 2)
        a = self.a.transpose(0, 1).flatten(0, 1)
        product = rows * a if self.positions == 1 else torch.bmm(rows, a)
        return product.reshape(*g.shape[:4], -1)

    def whole(self) -> Tensor:
        return self._products().transpose(1, 2)

    def columns(self, entries: Entries) -> Tensor:
        return columns(self.a, self.g, entries)

    @property
    def _near_cache(self) -> bool:
        """Whether the Jacobian of one sample is larger than a processor's cache, so that it is formed in pieces."""
        if not self.a.is_cpu or len(self.a) > 1 or self.a.requires_grad or self.g.requires_grad:
            return False
        row = self.a.element_size() * self.g.shape[1] * self.a.shape[-1]
        return row <= PIECE_BYTES < row * self.g.shape[-1]

    def squares(self) -> Tensor:
        if self.positions == 1:
            return torch.bmm(_summed_squares(self.g[:, :, :, 0]).mT, self.a[:, :, 0].square())
        if self._near_cache:
            return squares(self.a[0], self.g[0]).unsqueeze(0)
        (groups, outputs, _, _, d_out), d_in = self.g.shape, self.a.shape[-1]
        seeds = list(chunks(outputs, 4 * self.a.element_size() * groups * d_out * d_in, self.a.device))
        if len(seeds) > 1:
            return torch.stack([replace(self, g=self.g[:, run]).squares() for run in seeds]).sum(0)
        if len(bands := self._bands(3 * groups * outputs * d_in)) > 1:
            return torch.cat([self._band(band).squares() for band in bands], 1)
        total = self.a.new_zeros(groups, outputs, d_out, d_in)
        # On a CPU take a few samples at a time, so that they are in the cache when they are squared.
        for piece in self.pieces(2 * total.numel(), 32 if self.a.is_cpu else None):
            product = piece._products()
            total += product.mul_(product).sum(0)
        return total.sum(1)

    def unit_squares(self) -> Tensor:
        return self.g.square().sum(3).permute(1, 2, 0, 3).flatten(2)

    def quadratic_form(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        return self.quadratic_forms(weights.unsqueeze(0), tokens, full)[0]

    def quadratic_forms(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        """Return ``quadratic_form`` under each of n weights (n, G, d_out, d_in): (n, B, S, C, C), or (n, B, S, C).

        Where a weight is used at several positions, the Jacobian itself is formed, once for all.
        """
        outputs = self.g.shape[1]
        classes = outputs // tokens
        if self.positions == 1:
            squares = self.a[:, :, 0].square()
            return torch.stack([self._diagonal_form(squares @ each.mT, tokens, full) for each in weights])
        if self._near_cache:
            return weighted(self.a[0], self.g[0], weights[:, 0], tokens, full)
        numbers = weights.shape[1] * outputs * (2 * weights.shape[-1] + full * classes)  # for each output of the layer
        if len(bands := self._bands(numbers)) > 1:
            sums = (self._band(band).quadratic_forms(weights[:, :, band], tokens, full) for band in bands)
            return reduce(Tensor.add_, sums)
        roots = weights.sqrt()[:, :, :, None]  # (n, G, d_out, 1, d_in)
        parts = []
        for piece in self.pieces(numbers * weights.shape[2]):
            rows = piece._products(seeds_first=False)
            size, last = piece.batch, rows.shape[-1]
            forms = []
            for number, root in enumerate(roots):
                reused = number < len(roots) - 1 or rows.requires_grad
                scaled = rows * root if reused else rows.mul_(root)
                # Many small products over the outputs of the layer: one long one would leave a GPU idle.
                scaled = scaled.reshape(size, -1, tokens, classes, last)
                forms.append((scaled @ scaled.mT).sum(1) if full else scaled.square().sum((1, -1)))
            parts.append(torch.stack(forms) if len(forms) > 1 else forms[0].unsqueeze(0))
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

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

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        """Return J diag(weights) J'ᵀ between the samples of two batches, (B K, B' K').

        Without weights it is a product of two Gram matrices, (a·a')(g·g') summed over positions, where that costs less
        than this layer's Jacobians. Differentiable in the factors.
        """
        if not isinstance(other, LinearJacobian):
            return super().between(other, weights)
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

        def kernel(piece: LinearJacobian) -> Tensor:
            size = piece.batch
            a = torch.bmm(piece.a.reshape(groups, size * positions, -1), right_a.mT)
            g = torch.bmm(piece.g.reshape(groups, outputs * size * positions, d_out), right_g.mT)
            if positions == places == 1:
                product = a.reshape(groups, 1, size, 1, others) * g.reshape(groups, outputs, size, columns, others)
                return product.sum(0).permute(1, 0, 3, 2).reshape(size * outputs, others * columns)
            product = a.reshape(groups, 1, size, positions, 1, others, places) * g.reshape(
                groups, outputs, size, positions, columns, others, places
            )
            return product.sum((0, 3, 6)).permute(1, 0, 3, 2).reshape(size * outputs, others * columns)

        numbers = 4 * groups * outputs * positions * columns * others * places
        return concat_chunks(map(kernel, self.pieces(numbers)), batch * outputs)

    def _outer(self, other: LinearJacobian, weights: Tensor | None) -> Tensor:
        """Return J diag(weights) J'ᵀ from the Jacobians of a few outputs of the layer at a time."""
        height, width = self.batch * self.g.shape[1], other.batch * other.g.shape[1]
        total = self.a.new_zeros(height, width)
        copies = (1 if weights is None else 2) * height + (0 if other is self else width)
        for band in self._bands(copies * self.a.shape[-1] * self.a.shape[0]):
            rows = self._band(band).whole()
            last = rows if other is self else other._band(band).whole()
            rows = (rows if weights is None else rows * weights[:, band]).reshape(height, -1)
            last = last.reshape(width, -1).mT
            total = total + rows @ last if rows.requires_grad or last.requires_grad else total.addmm_(rows, last)
        return total

    def jvp(self, v: Tensor) -> Tensor:
        count, groups, d_out, d_in = v.shape
        wide = v.transpose(0, 1).reshape(groups, count * d_out, d_in)
        parts = []
        for piece in self.pieces(2 * groups * self.positions * count * d_out):
            size = piece.batch
            a = piece.a.reshape(groups, size * self.positions, d_in)
            if a.is_cuda:  # fast only where both factors have the sum along memory
                a = a.contiguous()
            at_outputs = product_onto(a, wide.mT).reshape(groups, size, self.positions, count, d_out)
            left = at_outputs.permute(1, 3, 0, *(4, 2) if self._channels_first else (2, 4)).reshape(size, count, -1)
            parts.append(product(left, piece._rows().mT))
        return torch.cat(parts).transpose(0, 1)

    def vjp(self, u: Tensor) -> Tensor:
        count = u.shape[0]
        groups, _, _, positions, d_out = self.g.shape
        inner = (d_out, positions) if self._channels_first else (positions, d_out)
        total, start = u.new_zeros(groups, count * d_out, self.a.shape[-1]), 0
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
        """Whether g lies in memory as the gradient of an image does, with positions innermost."""
        return self.g.stride(-2) < self.g.stride(-1)

    def _rows(self) -> Tensor:
        """Return g as (B, K, G d_out T) or (B, K, G T d_out), whichever needs no copy for one group."""
        order = (4, 3) if self._channels_first else (3, 4)
        return self.g.permute(2, 1, 0, *order).reshape(self.batch, self.g.shape[1], -1)

    def materialise(self, count: int | None = None) -> LinearJacobian | DenseJacobian:
        """Return the form in which one product with ``count`` vectors, there and back, is cheapest.

        The whole Jacobian takes K T multiplications for each weight to form, and then K for each weight and vector in
        each direction; the factors take T. It is not formed if it needs much more memory than its factors. Without
        ``count`` products are repeated, so it is formed if there are more positions than outputs.
        """
        (_, outputs, _, positions, d_out), d_in = self.g.shape, self.a.shape[-1]
        whole = positions > outputs
        if count is not None:
            cheaper = outputs * (positions + 2 * count) < 2 * count * positions
            whole = cheaper and outputs * d_out * d_in <= 3 * positions * (d_in + outputs * d_out)
        return DenseJacobian(self.whole().flatten(2)) if whole else self

    def materialised_size(self) -> int:
        groups, outputs, batch, positions, d_out = self.g.shape
        if positions > outputs:
            return batch * outputs * groups * d_out * self.a.shape[-1]
        return self.a.numel() + self.g.numel()


def _summed_squares(g: Tensor) -> Tensor:
    """Return Σ_k g² for g (G, K, ...), one seed at a time, so that no second tensor of all seeds is written."""
    total = g[:, 0] * g[:, 0]
    for k in range(1, g.shape[1]):
        total.addcmul_(g[:, k], g[:, k])
    return total


def _by_group(x: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``turn`` of the vectors x (G, ..., d), which takes (G, n, d) for several groups."""
    if len(x) == 1:
        return turn(x)
    turned = turn(x.reshape(len(x), -1, x.shape[-1]))
    return turned.reshape(*x.shape[:-1], turned.shape[-1])


@dataclass(frozen=True, eq=False)
class HeadGGN:
    """JᵀHJ of a linear map whose outputs are those of the network, Σ H_bt ⊗ a_bt a_btᵀ, without J.

    H of every position is diagonal, or has -Σ_m outer_m outer_mᵀ off its diagonal: one term for each of the M data
    that share a position, usually one. Memory: 1 + M numbers for each output, where C seeds have C.
    """

    a: Tensor  # (G, B, T, d_in)
    diagonal: Tensor  # (G, B T, d_out), float64
    outer: Tensor | None  # (G, M, B T, d_out), float64

    @property
    def widths(self) -> tuple[int, int]:
        """The numbers of outputs and inputs of each map."""
        return self.diagonal.shape[-1], self.a.shape[-1]

    def kronecker_rows(self, reduce: bool, weights: Tensor | None = None) -> KroneckerRows:
        """Return what the two Kronecker factors are sums of. A datum has one position, so ``reduce`` pools inputs."""
        a = self.a if weights is None else self.a * weights.sqrt().to(self.a)[:, None, None]
        pooled = reduce and a.shape[2] > 1
        a = a.mean(2) if pooled else a.flatten(1, 2)
        number = a.shape[1] if weights is None else float(weights.sum()) * (a.shape[1] // len(weights))
        outer = None if self.outer is None else self.outer.flatten(1, 2)
        return KroneckerRows(a, None, outer, False, number, self.diagonal.sum(1))

    def squares(self) -> Tensor:
        """Return the diagonal of JᵀHJ, (G, d_out, d_in)."""
        a = self.a.flatten(1, 2)
        return torch.bmm(self.diagonal.mT.to(a), a.square())

    def squares_in(self, out: Basis, inp: Basis) -> Tensor:
        """Return the diagonal of JᵀHJ in these bases, the mean over the directions of each part: (G, m_out, m_in)."""
        total = self.diagonal if self.outer is None else self.diagonal + self.outer.square().sum(1)
        rotated = out.diagonal_of(total)
        if self.outer is not None:
            each = [out.pool(out.coordinates(term).square()) for term in self.outer.unbind(1)]
            rotated = rotated - torch.stack(each).sum(0)
        a = inp.pool(inp.lengths(self.a.flatten(1, 2)).double().square())
        return torch.bmm(rotated.clamp_min(0).mT, a)

    def pairs(self, rows: slice, first: Tensor, second: Tensor) -> Tensor:
        """Return the entries of H for pairs of outputs at some of the B T positions, (rows, pairs), for one group."""
        diagonal = self.diagonal[0, rows]
        if self.outer is None:
            return torch.where(first == second, diagonal[:, first], 0.0)
        outer = self.outer[0, :, rows]
        return torch.where(first == second, diagonal[:, first], -(outer[..., first] * outer[..., second]).sum(0))
