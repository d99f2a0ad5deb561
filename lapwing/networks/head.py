"""The last linear layer of a network: the path from the outputs back to it, on which entries only move."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lapwing.networks.graph import Graph
from lapwing.networks.jacobians import Block
from lapwing.networks.uses import Node, Use, output_shape


@dataclass(frozen=True, eq=False)
class Head:
    """A linear map whose outputs are the outputs of the network, in another shape or order."""

    number: int  # of its block in the layout
    use: Use
    path: tuple[tuple[Node, int], ...]  # the nodes from the output to it, each with the operand that leads on
    graph: Graph

    def carried(self, values: Tensor) -> Tensor:
        """Return values (K, *output of the network) at the outputs of the map, (K, *output of its node).

        Entries are moved and not computed with, so no digit is lost, whatever the dtype of the network.
        """
        for node, operand in self.path:
            facts = self.graph.operations[node]
            if facts.reshapes:
                values = values.reshape(len(values), *output_shape(node.next_functions[operand][0]))
            elif not facts.adds:
                assert facts.gradient is not None
                values, _ = facts.gradient.pull(node, values, operand, False)
        return values


def find_head(graph: Graph, layout: tuple[Block, ...]) -> Head | None:
    """Return the linear map that ends the network, if its Jacobian moves entries and does nothing else.

    Reshapes, transposes and an added bias may follow it. None if something else does, if its weight is used a second
    time, or if it is no linear map with outputs of its own at every position: a convolution is one, a transposed
    convolution is not.
    """
    maps = {use.node: use for use in graph.uses if use.linear}
    node, path = graph.nodes[0], []
    while node not in maps:
        operand = _leading_operand(graph, node)
        if operand is None:
            return None
        path.append((node, operand))
        node = node.next_functions[operand][0]
        if graph.consumers[node] > 1:
            return None
    use = maps[node]
    alone = sum(other.name == use.name for other in graph.uses) == 1
    numbers = [i for i, block in enumerate(layout) if block.linear and block.weight == use.name]
    if not (alone and use.own_rows and numbers):
        return None
    block = layout[numbers[0]]
    same = (block.kind, block.groups) == (use.kind, use.groups)
    return Head(numbers[0], use, tuple(path), graph) if same else None


def _leading_operand(graph: Graph, node: Node) -> int | None:
    """Return the operand of a node whose entries it moves, or adds a parameter or a constant to; None if there is none.

    A node that follows a linear map with something else is computed with, and so is the sum of two branches.
    """
    facts = graph.operations[node]
    added = {use.name for use in graph.uses if use.node is node}
    operands = [
        i for i, (child, _) in enumerate(node.next_functions)
        if child is not None and not _is_added(graph, child, bool(added))
    ]  # fmt: skip
    if len(operands) != 1 or node.next_functions[operands[0]][1] != 0:
        return None
    (operand,) = operands
    child = node.next_functions[operand][0]
    if facts.adds:
        plain = operand == 0 or node._saved_alpha == 1
        return operand if plain and output_shape(child) == output_shape(node) else None
    moves = facts.reshapes or (facts.moves and facts.gradient is not None)
    return operand if moves else None


def _is_added(graph: Graph, node: Node, used: bool) -> bool:
    """Return whether a node is a parameter, as it is or moved, that the node after it uses."""
    while used and node is not None and graph.operations[node].carries_parameter:
        node = node.next_functions[0][0]
    return used and node in graph.leaves


def is_local(tokens: Tensor, classes: int) -> bool:
    """Return whether every token has all its classes at one position, for the tokens (positions, outputs) of a map.

    >>> import torch
    >>> is_local(torch.tensor([[0, 0], [1, 1]]), 2), is_local(torch.tensor([[0, 1], [0, 1]]), 2)
    (True, False)
    """
    positions, outputs = tokens.shape
    if outputs % classes:
        return False
    ordered = tokens.sort(-1).values.reshape(positions, -1, classes)
    return bool((ordered[..., 0] == ordered[..., -1]).all())
