"""Walking an autograd graph: where each parameter is used, and where samples stay in order.

The network runs as it is. Afterwards the graph that autograd built is walked from the output: a product whose weight
operand leads to a parameter is one use of that parameter, and the tensor that the node saved is its input. Nothing is
hooked, patched or registered in the model, so functional code, attention and tied weights are read like any layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import ModelError
from lapwing.networks.ops import Operation, operation
from lapwing.networks.rules import LEAF, Node, ParameterOperand, Use, lookup, output_shape

Carried = dict[Node, tuple[str, tuple[tuple[Node, Operation], ...]]]  # its name, and the nodes that move its entries


@dataclass(frozen=True, eq=False)
class Graph:
    """The nodes above an output, consumers before producers, and all uses of parameters among them."""

    nodes: tuple[Node, ...]
    operations: Mapping[Node, Operation]  # the facts about each node
    consumers: Mapping[Node, int]  # how many nodes use the output of each
    batch_major: Mapping[Node, bool]  # whether sample b owns the b-th contiguous share of the node's output
    follows_shapes: bool  # whether shapes alone decide which rows belong to which sample
    signature: tuple[Any, ...]  # names and shapes of all operations, and how they are connected
    leaves: Mapping[Node, str]  # the nodes that stand for a parameter, and its name
    uses: tuple[Use, ...]
    without_rule: Mapping[Node, tuple[str, ...]]  # the nodes that use parameters without a rule, and these parameters

    @cached_property
    def uses_of(self) -> Mapping[str, list[Use]]:
        """The uses of each parameter that has some, by its name."""
        by_name: dict[str, list[Use]] = {}
        for use in self.uses:
            by_name.setdefault(use.name, []).append(use)
        return by_name

    @cached_property
    def parents(self) -> Mapping[Node, list[Node]]:
        """The nodes that use the output of each node."""
        above: dict[Node, list[Node]] = {}
        for node in self.nodes:
            for child, _ in node.next_functions:
                above.setdefault(child, []).append(node)
        return above

    @cached_property
    def added(self) -> Mapping[Node, str]:
        """The nodes that use a parameter other than as a linear map, with its name."""
        return {use.node: use.name for use in self.uses if not use.linear}

    @cached_property
    def unread(self) -> Mapping[str, str]:
        """The parameters above which an operation has no rule, each with the name of the first such operation."""
        names: dict[str, str] = {}
        for node, others in self.without_rule.items():
            for name in others:
                names.setdefault(name, node.name())
        return names

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """The signature in which a size only matters as one or more, and the number of rows also as one per sample."""
        batch = output_shape(self.nodes[0])[0]
        rows = lambda n: n if n < 2 else 2 if n == batch else 3 if n % max(1, batch) == 0 else 4
        kinds = lambda shape: (*map(rows, shape[:1]), *(min(n, 2) for n in shape[1:]))
        return tuple((name, kinds(shape), edges) for name, shape, edges in self.signature)

    @property
    def last(self) -> str:
        """The name of the last operation that computes numbers and does not only move them, such as "sigmoid"."""
        node = self.nodes[0]
        while self.operations[node].carries_parameter and node.next_functions[0][0] in self.operations:
            node = node.next_functions[0][0]
        return node.name().partition("Backward")[0].lower()


def read_graph(output: Tensor, tensors: Mapping[str, Tensor] | None = None, names: Collection[str] = ()) -> Graph:
    """Walk the graph of ``output``, follow the samples of its first dimension, and find the uses of parameters.

    ``tensors`` are all parameters of the network; those with these ``names`` are looked for.
    """
    parameters = {name: tensors[name] for name in names} if tensors else {}
    root: Node = output.grad_fn
    batch = output.shape[0]
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
    name_of = {id(tensor): name for name, tensor in parameters.items()}
    operations: dict[Node, Operation] = {}
    leaves: dict[Node, str] = {}
    place = {node: i for i, node in enumerate(degree)}
    signature: list[tuple[Any, ...]] = []
    follows_shapes, queue = True, deque[Node]([root])
    while queue:
        node = queue.popleft()
        name = node.name()
        facts = operations[node] = operation(node)
        if name == LEAF:
            if id(node.variable) in name_of:
                leaves[node] = name_of[id(node.variable)]
            else:
                _refuse_kept(node.variable, parameters)
            signature.append((name, (), leaves.get(node)))
            continue
        shape = output_shape(node)
        sizes = tuple(n if type(n) is int else -1 for n in shape)  # ragged dimensions have no number
        signature.append((name, sizes, tuple((place.get(child), part) for child, part in node.next_functions)))
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
    uses, without_rule = _find_uses(operations, leaves, parameters)
    uses = _after_broadcast(uses, operations, consumers)
    return Graph(
        tuple(operations), operations, consumers, major, follows_shapes, tuple(signature), leaves, uses, without_rule
    )


def _refuse_kept(leaf: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Raise if a leaf shares its memory with a parameter and is not that parameter: it comes from an earlier run."""
    for name, parameter in parameters.items():
        if parameter.layout is leaf.layout is torch.strided and parameter.data_ptr() == leaf.data_ptr() != 0:
            raise ModelError(kept_value_message(name))


def kept_value_message(name: str, where: str = "") -> str:
    """Say that the model keeps what it computed from a parameter in an earlier run."""
    return (
        f"the model keeps a value that it computed from {name!r} in an earlier run{where}, and its outputs follow that "
        "value and not the parameter; expected a function of the parameters in every run. Empty the cache before the "
        "fit (set the attribute to None), or compute the value in every forward."
    )


def _find_uses(
    operations: dict[Node, Operation], leaves: Mapping[Node, str], parameters: Mapping[str, Tensor]
) -> tuple[tuple[Use, ...], dict[Node, tuple[str, ...]]]:
    """Return every use of a parameter, and the nodes that use parameters without a rule."""
    uses: list[Use] = []
    without_rule: dict[Node, tuple[str, ...]] = {}
    carried = _carried_parameters(operations, leaves)
    for node, facts in operations.items():
        if node in carried:
            if not uses and not without_rule and node is next(iter(operations)):  # the output is the parameter itself
                without_rule[node] = (carried[node][0],)
            continue
        sources = {}
        for operand, edge in enumerate(node.next_functions):
            if edge[0] in carried:
                name, moves = carried[edge[0]]
                sources[operand] = ParameterOperand(name, parameters[name], moves, edge)
        if not sources:
            continue
        by_operand = {} if facts.uses is None else dict(facts.uses(node, sources))
        uses.extend(by_operand.values())
        others = tuple(source.name for operand, source in sources.items() if operand not in by_operand)
        if others:
            without_rule[node] = others
    return tuple(uses), without_rule


def _after_broadcast(
    uses: tuple[Use, ...], operations: dict[Node, Operation], consumers: Mapping[Node, int]
) -> tuple[Use, ...]:
    """Return the uses, with a lookup that all samples share where its rows are broadcast over the samples."""
    lookups = {use.node: use for use in uses if operations[use.node].looks_up}
    moved: dict[Node, Use] = {}
    for node in operations if lookups else ():
        for operand in range(len(node.next_functions)):
            below = _broadcast_lookup(node, operand, operations, consumers)
            if below in lookups and below not in moved:
                name, size = lookups[below].name, lookups[below].table
                moved[below] = lookup(below, name, size, after=node)
    return tuple(moved.get(use.node, use) if use.node in lookups else use for use in uses)


def _broadcast_lookup(
    node: Node, operand: int, operations: Mapping[Node, Operation], consumers: Mapping[Node, int]
) -> Node | None:
    """Return the embedding whose rows a sum or an expansion broadcasts over leading dimensions; None if there is none.

    Nothing but changes of shape may lie between them, and nobody else may take the rows.
    """
    facts, out = operations[node], output_shape(node)
    if not ((facts.adds and node._saved_alpha == 1) or facts.expands):
        return None
    child, number = node.next_functions[operand]
    if child is None:
        return None
    shape = output_shape(child, number)
    while shape and shape[0] == 1:
        shape = shape[1:]
    if len(shape) < 1 or len(shape) >= len(out) or out[len(out) - len(shape) :] != shape:
        return None
    while operations[child].reshapes and not operations[child].casts and consumers[child] == 1:
        child = child.next_functions[0][0]
    return child if operations[child].looks_up and consumers[child] == 1 else None


def _carried_parameters(operations: dict[Node, Operation], leaves: Mapping[Node, str]) -> Carried:
    """Return the nodes whose output is a parameter, with its name and the nodes on the way to it, nearest first."""
    carried: Carried = {node: (name, ()) for node, name in leaves.items()}
    for node in reversed(operations):  # producers before consumers
        below = node.next_functions
        if len(below) == 1 and below[0][0] in carried and operations[node].carries_parameter:
            name, moves = carried[below[0][0]]
            carried[node] = (name, ((node, operations[node]), *moves))
    return carried


def refuse_wrong_gradients(graph: Graph) -> None:
    """Raise if the gradient of an operation is not its derivative."""
    for node, facts in graph.operations.items():
        reason = facts.not_derivative(node)
        if reason:
            raise ModelError(reason)


def forward_differs(graph: Graph) -> bool:
    """Return whether forward mode disagrees with the gradient of an operation."""
    return any(facts.forward_differs(node) for node, facts in graph.operations.items())
