"""Which rows at a node belong to which sample.

In most networks the walk over the graph already knows: rows are batch-major. Attention works time-major inside, and
recurrent networks stack time steps; there a probe decides. The seeds of the samples whose number has bit j set are
doubled, with one backward pass for each bit: the gradient of a row doubles if its sample has that bit, in every
dtype. A row whose gradient neither doubles nor stays belongs to several samples (it lies before a broadcast over the
batch).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.networks.forms import Node, Pattern
from lapwing.networks.graph import Graph, Uses

Patterns = Mapping[Node, Pattern | None]


def find_patterns(raw: Tensor, graph: Graph, uses: Uses) -> tuple[Patterns, bool]:
    """Return for each node that uses a parameter how its rows run over the samples; None if samples share rows.

    The flag says whether every other batch of the same shapes has the same patterns: rows that no gradient reaches
    fit any sample, so that several patterns may fit one batch.
    """
    batch = raw.shape[0]
    patterns: dict[Node, Pattern | None] = {}
    probed: dict[Node, int] = {}
    rows_of = {use.node: use.n_rows for use in uses.uses}
    for node, rows in rows_of.items():
        if graph.batch_major[node] and rows % batch == 0:
            patterns[node] = (1, batch, rows // batch)
        else:
            probed[node] = rows
    if not probed:
        return patterns, True
    fits = {node: _fitting(owner, batch) for node, owner in _owners(raw, probed, batch).items()}
    patterns.update({node: fit[0] if fit else None for node, fit in fits.items()})
    return patterns, all(len(fit) == 1 for fit in fits.values())


def _owners(raw: Tensor, rows_of: Mapping[Node, int], batch: int) -> dict[Node, Tensor | None]:
    """Return the sample of every row: -1 where no gradient arrives, None if samples share rows."""
    nodes = list(rows_of)
    generator = torch.Generator().manual_seed(0)
    seed = (torch.randn(raw.shape, generator=generator).abs() + 0.5).to(raw)
    edges = [GradientEdge(node, 0) for node in nodes]

    def pull(scale: Tensor) -> tuple[Tensor | None, ...]:
        scaled = seed * scale.to(raw).view(-1, *(1,) * (raw.ndim - 1))
        return torch.autograd.grad(raw, edges, scaled, retain_graph=True, allow_unused=True)

    numbers = torch.arange(batch, device=raw.device)
    plain = pull(torch.ones(batch, device=raw.device))
    owners: dict[Node, Tensor | None] = {}
    sizes = {}
    for node, grad in zip(nodes, plain, strict=True):
        rows = rows_of[node]
        size = raw.new_zeros(rows) if grad is None else grad.reshape(rows, -1).abs().amax(1)
        sizes[node] = size
        owners[node] = torch.where(size > 0, 0, -1)
    tolerance = 64 * torch.finfo(raw.dtype).eps
    for bit in range(max(1, (batch - 1).bit_length())):
        doubled = pull(1.0 + ((numbers >> bit) & 1))
        for node, before, after in zip(nodes, plain, doubled, strict=True):
            owner = owners[node]
            if owner is None or before is None or after is None:
                continue
            rows = len(owner)
            before, after = before.reshape(rows, -1), after.reshape(rows, -1)
            limit = tolerance * sizes[node]
            same = (after - before).abs().amax(1) <= limit
            twice = (after - 2 * before).abs().amax(1) <= limit
            reached = owner >= 0
            if bool((reached & ~same & ~twice).any()):
                owners[node] = None
            else:
                owners[node] = torch.where(reached & twice, owner + (1 << bit), owner)
    return owners


def _fitting(owner: Tensor | None, batch: int) -> list[Pattern]:
    """Return every (outer, sample, inner) such that row r belongs to sample (r // inner) % batch."""
    if owner is None or len(owner) % batch:
        return []
    share = len(owner) // batch
    rows = torch.arange(len(owner), device=owner.device)
    unreached = owner < 0
    return [
        (share // inner, batch, inner)
        for inner in range(share, 0, -1)
        if share % inner == 0 and bool((((rows // inner) % batch == owner) | unreached).all())
    ]
