"""Which rows at a node of a graph belong to which sample.

In most networks the walk over the graph already knows: rows are batch-major. Attention works time-major inside, and
recurrent networks stack time steps; there a probe decides. The seeds of the samples whose number has bit j set are
doubled, for each bit: the gradient of a row doubles if its sample has that bit, in every dtype. A row whose gradient
neither doubles nor stays belongs to several samples (it lies before a broadcast over the batch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lapwing.networks.graph import Graph
from lapwing.networks.passes import gradients, numbers_at_once
from lapwing.networks.uses import Node, Pattern, Ragged, Regular

Patterns = Mapping[Node, Pattern | None]  # how rows run over the samples; None if samples share rows


def find_patterns(raw: Tensor, graph: Graph, recurrent: bool) -> tuple[Patterns, bool]:
    """Return for each node that uses a parameter how its rows run over the samples; None if samples share rows.

    The flag says whether these patterns hold for every batch of the same shapes. They may not if several patterns fit
    this batch: a row that no gradient reaches may belong to any sample. They do not if the rows follow no order.
    """
    batch = raw.shape[0]
    patterns: dict[Node, Pattern | None] = {}
    probed: dict[Node, int] = {}
    for node, rows in {use.node: use.n_rows for use in graph.uses}.items():
        if graph.batch_major[node] and rows % batch == 0:
            patterns[node] = Regular(1, batch, rows // batch)
        else:
            probed[node] = rows
    if not probed:
        return patterns, True
    certain = True
    for node, owner in _owners(raw, graph, probed, recurrent).items():
        fits = [] if owner is None else _fitting(owner, batch)
        patterns[node] = fits[0] if fits else None if owner is None else Ragged.of(owner, batch)
        certain = certain and len(fits) == 1
    return patterns, certain


def _owners(raw: Tensor, graph: Graph, rows_of: Mapping[Node, int], recurrent: bool) -> dict[Node, Tensor | None]:
    """Return the sample of every row: -1 where no gradient arrives, None if samples share rows."""
    batch, nodes = len(raw), list(rows_of)
    bits = max(1, (batch - 1).bit_length())
    generator = torch.Generator().manual_seed(0)
    seed = (torch.randn(raw.shape, generator=generator).abs() + 0.5).to(raw)
    numbers = torch.arange(batch, device=raw.device)
    scales = torch.stack([1.0 + ((numbers >> bit) & 1) for bit in range(bits)]).to(seed)
    seeds = torch.cat([seed[None], seed * scales.view(bits, batch, *(1,) * (raw.ndim - 1))])
    owners: dict[Node, Tensor | None] = {}
    for node, first, grads in _probed(raw, graph, nodes, seeds, recurrent):
        grads = grads.reshape(len(grads), rows_of[node], grads[0].numel() // max(1, rows_of[node]))
        sizes = grads[0].abs().amax(1) if grads.numel() else seed.new_zeros(rows_of[node])
        before = owners[node] if node in owners else torch.where(sizes > 0, 0, -1)
        owners[node] = _with_bits(before, grads, sizes, first)
    return owners


def _probed(
    raw: Tensor, graph: Graph, nodes: list[Node], seeds: Tensor, recurrent: bool
) -> Iterator[tuple[Node, int, Tensor]]:
    """Yield nodes with the gradients there for the first seed and for those of some bits, and the first of these bits.

    All bits in one pass, which drops each gradient after its use; by autograd, which holds them, one after another.
    """
    if not recurrent and numbers_at_once(graph, nodes, raw.dtype) is not None:
        yield from ((node, 0, grads) for node, grads in gradients(raw, graph, nodes, seeds, recurrent))
        return
    plain = dict(gradients(raw, graph, nodes, seeds[:1], recurrent))
    for bit, doubled in enumerate(seeds[1:]):
        for node, grad in gradients(raw, graph, nodes, doubled[None], recurrent):
            yield node, bit, torch.cat([plain[node], grad])


def _with_bits(owner: Tensor | None, grads: Tensor, sizes: Tensor, first: int) -> Tensor | None:
    """Return the numbers of the samples with some more bits, from the gradients (1 + bits, rows, entries) of a node.

    The first are those of seeds that are not doubled, and ``sizes`` their largest entry in each row. Rounding is
    relative to the terms of a row, which may be far larger than their sum: behind a LayerNorm they cancel.
    """
    eps = torch.finfo(grads.dtype).eps
    limit = max(64 * eps, eps**0.5) * sizes
    for bit, after in enumerate(grads[1:] if grads.numel() else (), first):
        same = (after - grads[0]).abs().amax(1) <= limit
        twice = (after - 2 * grads[0]).abs().amax(1) <= limit
        if owner is None or bool(((owner >= 0) & ~same & ~twice).any()):
            return None
        owner = torch.where((owner >= 0) & twice, owner + (1 << bit), owner)
    return owner


def _fitting(owner: Tensor, batch: int) -> list[Regular]:
    """Return every regular pattern that fits: row r belongs to sample (r // inner) % batch."""
    if len(owner) % batch:
        return []
    share = len(owner) // batch
    rows = torch.arange(len(owner), device=owner.device)
    unreached = owner < 0
    return [
        Regular(share // inner, batch, inner)
        for inner in range(share, 0, -1)
        if share % inner == 0 and bool((((rows // inner) % batch == owner) | unreached).all())
    ]
