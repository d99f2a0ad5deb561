"""The columns of single weights in the Jacobian of a linear map, without those of other weights.

For the weight of output i and input j, output k and sample b, the entry is Σ_t g_kbti a_btj. Few weights of a layer are
gathered; many are picked out of the products of a few outputs of the layer at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.core.memory import evenly
from lapwing.networks.budget import near
from lapwing.networks.entries import FASTER, Entries


def columns(a: Tensor, g: Tensor, entries: Entries) -> Tensor:
    """Return the Jacobian of the entries, (B, K, n), from inputs a (G, B, T, d_in) and gradients g (G, K, B, T, d_out).

    Memory besides the result: as much again where there is one position, and the inputs and gradients of a few entries
    where there are several.
    """
    if a.shape[2] == 1:
        return _at_one_position(a, g, entries)
    if FASTER * len(entries.at) <= entries.size:
        return _gathered(a, g, entries)
    return _banded(a, g, entries)


def _at_one_position(a: Tensor, g: Tensor, entries: Entries) -> Tensor:
    group, output, inp = entries.coordinates
    if len(a) == 1:
        inputs = a[0, :, 0].index_select(-1, inp)
        rows = g[0, :, :, 0].transpose(0, 1).index_select(-1, output)
    else:
        inputs = a[group, :, 0, inp].mT
        rows = g[group, :, :, 0, output].permute(2, 1, 0)
    return rows * inputs.unsqueeze(1) if rows.requires_grad or inputs.requires_grad else rows.mul_(inputs.unsqueeze(1))


def _gathered(a: Tensor, g: Tensor, entries: Entries) -> Tensor:
    """Multiply the gradients of each output with the inputs of its entries, in runs of equal length."""
    outputs, inputs, place = entries.runs
    _, seeds, batch, positions, d_out = g.shape
    group, output = outputs // d_out, outputs % d_out
    width = inputs.shape[1]
    each = 2 * g.element_size() * batch * positions * (seeds + width)
    parts = []
    for some in evenly(len(outputs), max(1, near(g.device) // each)):
        # Indices that are apart put their dimension first: (S, K, B, T) and (S, w, B, T).
        rows = g[group[some], :, :, :, output[some]].transpose(1, 2)
        below = a[group[some, None], :, :, inputs[some]].transpose(1, 2)
        parts.append(torch.matmul(rows, below.mT).permute(1, 2, 0, 3).flatten(2))  # (B, K, S w)
    return torch.cat(parts, -1).index_select(-1, place)


def _banded(a: Tensor, g: Tensor, entries: Entries) -> Tensor:
    """Form the Jacobian of a few outputs of the layer at a time, and pick the entries."""
    groups, seeds, batch, _, d_out = g.shape
    starts, d_in = entries.starts, a.shape[-1]
    each = 2 * g.element_size() * batch * seeds * d_in
    parts = []
    for group in range(groups):
        inputs = a[group].unsqueeze(1)  # (B, 1, T, d_in)
        for band in evenly(d_out, max(1, near(g.device) // each)):
            first, last = group * d_out + band.start, group * d_out + band.stop
            at = entries.at[starts[first] : starts[last]] - first * d_in
            if len(at):
                rows = g[group, ..., band].permute(1, 0, 3, 2)  # (B, K, band, T)
                parts.append(torch.matmul(rows, inputs).flatten(2).index_select(-1, at))
    return torch.cat(parts, -1)
