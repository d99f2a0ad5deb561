"""Walking an autograd graph: where each parameter is used, and which rows belong to which sample.

The network runs as it is. Afterwards the graph that autograd built is walked from the output: a product whose weight
operand leads to a parameter is one use of that parameter, and what the node saved is its input. Nothing is hooked,
patched or registered in the model, so functional code, attention and tied weights are read like any layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lapwing.networks.forms import Node, Use, output_shape
from lapwing.networks.ops.operation import LEAF, operation, operation_named


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
