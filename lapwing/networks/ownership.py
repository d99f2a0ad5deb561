"""Which rows of a product belong to which sample.

In most networks the walk over the graph already knows: rows are batch-major. Attention works time-major inside,
and recurrent nets stack time steps; there one probe decides. The seeds of the samples whose number has bit j set are
doubled, one backward pass for each bit: a row's gradient doubles if its sample has that bit, in every dtype.
A row that does neither belongs to several samples (it lies before a broadcast over the batch).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.networks import graph as graphs
from lapwing.networks.forms import Elementwise, Lookup, Pattern
from lapwing.networks.rules import Use, Uses


def find_patterns(raw: Tensor, graph: graphs.Graph, uses: Uses) -> tuple[Mapping[Any, Pattern | None], bool]:
    """For each node that uses a parameter, how its rows run over the samples; None if they are shared.

    The flag says whether another batch of the same shapes has the same patterns for certain: rows that no gradient
    reaches fit anywhere, so that several patterns may fit this batch alone.
    """
    batch = raw.shape[0]
    found: dict[Any, Pattern | None] = {}
    probed = []
    rows_of = {use.node: row_count(use) for use in uses.uses}
    for use in uses.uses:
        rows = rows_of[use.node]
        if graph.batch_major[use.node] and rows % batch == 0:
            found[use.node] = (1, batch, rows // batch)
        elif use.node not in probed:
            probed.append(use.node)
    if probed:
        owners = _owners(raw, {node: rows_of[node] for node in probed}, batch)
        fits = {node: _fitting(owner, batch) for node, owner in owners.items()}
        found.update({node: fit[0] if fit else None for node, fit in fits.items()})
        return found, all(len(fit) == 1 for fit in fits.values())
    return found, True


def row_count(use: Use) -> int:
    """How many rows a use has: images of a convolution, else everything before the parameter's own dimensions."""
    shape = graphs.output_shape(use.node)
    if isinstance(use.form, Elementwise) and not use.form.channel:
        return torch.Size(shape[: len(shape) - len(use.form.shape)]).numel()
    if isinstance(use.form, Lookup):
        return torch.Size(shape[:-1]).numel()
    return shape[0]


def _owners(raw: Tensor, rows_of: Mapping[Any, int], batch: int) -> dict[Any, Tensor | None]:
    """The sample of every row: -1 where no gradient arrives, None if rows are shared."""
    nodes = list(rows_of)
    generator = torch.Generator().manual_seed(0)
    seed = (torch.randn(raw.shape, generator=generator).abs() + 0.5).to(raw)
    edges = [GradientEdge(node, 0) for node in nodes]

    def pull(scale: Tensor) -> tuple[Tensor | None, ...]:
        scaled = seed * scale.to(raw).view(-1, *(1,) * (raw.ndim - 1))
        return torch.autograd.grad(raw, edges, scaled, retain_graph=True, allow_unused=True)

    numbers = torch.arange(batch, device=raw.device)
    plain = pull(torch.ones(batch, device=raw.device))
    owners: dict[Any, Tensor | None] = {}
    alive = {}
    for node, grad in zip(nodes, plain, strict=True):
        rows = rows_of[node]
        size = raw.new_zeros(rows) if grad is None else grad.reshape(rows, -1).abs().amax(1)
        alive[node] = size
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
            limit = tolerance * alive[node]
            same = (after - before).abs().amax(1) <= limit
            twice = (after - 2 * before).abs().amax(1) <= limit
            live = owner >= 0
            if bool((live & ~same & ~twice).any()):
                owners[node] = None
            else:
                owners[node] = torch.where(live & twice, owner + (1 << bit), owner)
    return owners


def _fitting(owner: Tensor | None, batch: int) -> list[Pattern]:
    """Every (outer, sample, inner) such that row r belongs to sample (r // inner) % batch."""
    if owner is None or len(owner) % batch:
        return []
    share = len(owner) // batch
    rows = torch.arange(len(owner), device=owner.device)
    live = owner >= 0
    return [
        (share // inner, batch, inner)
        for inner in range(share, 0, -1)
        if share % inner == 0 and bool((((rows // inner) % batch == owner) | ~live).all())
    ]
