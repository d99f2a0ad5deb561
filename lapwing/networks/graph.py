"""Walking an autograd graph: where each parameter is used, and which rows belong to which sample.

The network runs as it is. Afterwards the graph that autograd built is walked from the output: a product whose weight
operand leads to a parameter is one use of that parameter, and the tensor that the node saved is its input. Nothing is
hooked, patched or registered in the model, so functional code, attention and tied weights are read like any layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.errors import ModelError
from lapwing.networks.forms import Node, Pattern, Use, output_shape
from lapwing.networks.ops.operation import LEAF, operation, operation_named

Patterns = Mapping[Node, Pattern | None]  # how rows run over the samples; None if samples share rows


@dataclass(frozen=True, eq=False)
class Graph:
    """The nodes above an output, consumers before producers."""

    nodes: tuple[Node, ...]
    consumers: Mapping[Node, int]  # how many nodes use the output of each
    batch_major: Mapping[Node, bool]  # whether sample b owns the b-th contiguous share of the node's output
    follows_shapes: bool  # whether shapes alone decide which rows belong to which sample
    signature: tuple[Any, ...]  # names and shapes of all operations


@dataclass(frozen=True, eq=False)
class Uses:
    """All uses of parameters in a graph, and those for which there is no rule."""

    uses: tuple[Use, ...]
    without_rule: Mapping[str, str] = field(default_factory=dict)  # parameter -> name of the operation
    nodes_without_rule: Mapping[Node, tuple[str, ...]] = field(default_factory=dict)  # node -> parameters


def read(output: Tensor, batch: int) -> Graph:
    """Walk the graph of ``output`` and follow the samples of its first dimension through it."""
    root: Node = output.grad_fn
    degree: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is None:
                continue
            if child not in degree:
                degree[child] = 0
                stack.append(child)
            degree[child] += 1
    consumers = dict(degree)
    major = dict.fromkeys(degree, True)
    nodes, signature, queue = [], [], deque[Node]([root])
    follows_shapes = True
    while queue:
        node = queue.popleft()
        nodes.append(node)
        name = node.name()
        if name != LEAF:
            shape, facts = output_shape(node), operation_named(name)
            signature.append((name, shape))
            follows_shapes = follows_shapes and facts.follows_shapes
            keeps = facts.keeps(node, shape, batch) if major[node] else None
            for operand, (child, number) in enumerate(node.next_functions):
                if child is None:
                    continue
                if keeps is None or not keeps(operand, child, number):
                    major[child] = False
                degree[child] -= 1
                if degree[child] == 0:
                    queue.append(child)
    return Graph(tuple(nodes), consumers, major, follows_shapes, tuple(signature))


def find_uses(graph: Graph, parameters: Mapping[int, str], tensors: Mapping[str, Tensor]) -> Uses:
    """Return every use of a parameter in the graph. ``parameters`` maps ``id`` to name, ``tensors`` name to tensor."""
    uses: list[Use] = []
    without_rule: dict[str, str] = {}
    nodes_without_rule: dict[Node, tuple[str, ...]] = {}
    carried = _carried_parameters(graph, parameters)
    for node in graph.nodes:
        if node in carried:
            continue
        sources = {i: (*carried[edge[0]], edge) for i, edge in enumerate(node.next_functions) if edge[0] in carried}
        if not sources:
            continue
        rule = operation(node).uses
        by_operand = dict(rule(node, sources, tensors)) if rule is not None else {}
        uses.extend(by_operand.values())
        for operand, (parameter, _, _) in sources.items():
            if operand not in by_operand:
                without_rule.setdefault(parameter, node.name())
                nodes_without_rule[node] = (*nodes_without_rule.get(node, ()), parameter)
    return Uses(tuple(uses), without_rule, nodes_without_rule)


def leaf_name(node: Node, parameters: Mapping[int, str]) -> str | None:
    """Return the name of the parameter that this node stands for, or None. ``parameters`` maps ``id`` to name."""
    return parameters.get(id(node.variable)) if node.name() == LEAF else None


def _carried_parameters(graph: Graph, parameters: Mapping[int, str]) -> dict[Node, tuple[str, tuple[Node, ...]]]:
    """Return the nodes whose output is a parameter, with its name and the nodes on the way to it, nearest first."""
    carried: dict[Node, tuple[str, tuple[Node, ...]]] = {}
    for node in reversed(graph.nodes):  # producers before consumers
        name = leaf_name(node, parameters)
        if name is not None:
            carried[node] = (name, ())
            continue
        below = node.next_functions
        if len(below) == 1 and below[0][0] in carried and operation(node).carries_parameter:
            name, moves = carried[below[0][0]]
            carried[node] = (name, (node, *moves))
    return carried


def refuse_wrong_gradients(graph: Graph) -> None:
    """Raise if the gradient of an operation is not its derivative."""
    for node in graph.nodes:
        rule = operation(node).not_derivative
        reason = "" if rule is None else rule(node)
        if reason:
            raise ModelError(reason)


def forward_differs(graph: Graph) -> bool:
    """Return whether forward mode disagrees with the gradient of an operation."""
    rules = ((node, operation(node).forward_differs) for node in graph.nodes)
    return any(rule is not None and rule(node) for node, rule in rules)


# Which rows at a node belong to which sample. In most networks the walk over the graph already knows: rows are
# batch-major. Attention works time-major inside, and recurrent networks stack time steps; there a probe decides. The
# seeds of the samples whose number has bit j set are doubled, with one backward pass for each bit: the gradient of a
# row doubles if its sample has that bit, in every dtype. A row whose gradient neither doubles nor stays belongs to
# several samples (it lies before a broadcast over the batch).


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
