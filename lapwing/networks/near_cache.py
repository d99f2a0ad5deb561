"""Sums over the Jacobian of a weight that is used at many positions, on a CPU: formed in pieces that stay in its cache.

The whole Jacobian of a layer, K d_out d_in numbers for each sample, would be written to memory and read back several
times, which takes longer than its products. A piece is a band of outputs of one sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

NEAR = 2**20  # bytes of a piece: half of what a core's second cache holds


def pieces(a: Tensor, g: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield the number of a sample, a band of outputs, and the Jacobian there, (K, band, d_in).

    Inputs are a (B, T, d_in), gradients g (K, B, T, d_out).
    """
    outputs, batch, _, d_out = g.shape
    band = max(1, NEAR // (a.element_size() * outputs * a.shape[-1]))
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
    for sample, band, product in pieces(a, g):
        for number, root in enumerate(roots[:, band]):
            scaled = product * root if number < len(roots) - 1 else product.mul_(root)
            rows = scaled.reshape(tokens, classes, -1)
            total[number, sample] += rows @ rows.mT if full else rows.square().sum(-1)
    return total


def squares(a: Tensor, g: Tensor) -> Tensor:
    """Return the sum over samples and outputs of the squared Jacobian, (d_out, d_in)."""
    total = a.new_zeros(g.shape[-1], a.shape[-1])
    for _, band, product in pieces(a, g):
        total[band] += product.mul_(product).sum(0)
    return total
