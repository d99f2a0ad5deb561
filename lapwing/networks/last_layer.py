"""Finding the last layer of a network in its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lapwing.errors import ModelError
from lapwing.networks.forms import Node
from lapwing.networks.graph import Graph, Uses, leaf_name
from lapwing.networks.ops.operation import operation
from lapwing.networks.selection import Selection, float_parameters, selected


@dataclass(frozen=True)
class LastLayer:
    """The linear map nearest to the output, with its bias, as the graph shows it.

    Dropout, flatten, pooling or a reshape after it do not matter. Several heads that reach the output side by side are
    taken together. Frozen parameters are selected too.

    Raises:
        ModelError: if there is no linear map of a parameter on the way from the output.

    >>> import torch
    >>> import lapwing as lw
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> x, y = torch.randn(10, 3), torch.randn(10, 2)
    >>> lw.fit(net, [(x, y)], "regression", weights=lw.last_layer).network.selection.names
    ('2.weight', '2.bias')
    """

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(float_parameters(model))

    def choose(self, model: nn.Module, graph: Graph, uses: Uses) -> Selection:
        names_of = {id(p): name for name, p in float_parameters(model).items()}
        maps = _linear_maps(graph, uses, names_of)
        frontier = _frontier(graph, maps)
        if not frontier:
            raise ModelError(
                "there is no linear map of a parameter on the way from the output; "
                "choose the weights by name with named(pattern)."
            )
        chosen = {name for node in frontier for name in maps[node]}
        chosen |= {use.name for use in uses.uses if use.node in frontier}
        sums = _sums_after(graph, frontier)  # a bias that is added separately
        chosen |= {use.name for use in uses.uses if use.node in sums and use.form.kind == "dense"}
        return selected(model, tuple(name for name in names_of.values() if name in chosen))


last_layer = LastLayer()


def _linear_maps(graph: Graph, uses: Uses, names_of: Mapping[int, str]) -> dict[Node, tuple[str, ...]]:
    """Return all nodes that are linear maps with a weight, and the parameters of each."""
    maps: dict[Node, tuple[str, ...]] = dict(uses.nodes_without_rule)  # a head without a rule is a head as well
    for use in uses.uses:
        if use.form.kind != "dense":
            maps[use.node] = (*maps.get(use.node, ()), use.name)
    for node in graph.nodes:  # a product with a weight that is computed first: weight norm, a cosine head
        data = operation(node).data_operand
        if data is not None and node not in maps:
            sides = [child for i, (child, _) in enumerate(node.next_functions) if i != data and child]
            computed = _leaves([side for side in sides if leaf_name(side, names_of) is None], names_of)
            if computed:
                maps[node] = computed
    return maps


def _leaves(nodes: list[Node], names_of: Mapping[int, str]) -> tuple[str, ...]:
    """Return the parameters at the end of every path from these nodes."""
    names, seen, stack = [], set(nodes), list(nodes)
    while stack:
        node = stack.pop()
        name = leaf_name(node, names_of)
        if name is not None:
            names.append(name)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return tuple(names)


def _frontier(graph: Graph, maps: Mapping[Node, object]) -> list[Node]:
    """Return the maps that are the first on some path from the output and not upstream of another such map."""
    first, seen, stack = [], set(), [graph.nodes[0]]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in maps:
            first.append(node)
        else:
            stack.extend(child for child, _ in node.next_functions if child is not None)
    upstream: set[Node] = set()
    stack = [child for node in first for child, _ in node.next_functions if child is not None]
    while stack:
        node = stack.pop()
        if node not in upstream:
            upstream.add(node)
            stack.extend(child for child, _ in node.next_functions if child is not None)
    return [node for node in first if node not in upstream]


def _sums_after(graph: Graph, frontier: list[Node]) -> set[Node]:
    """Return the sums that add something to the output of a frontier node, with nothing but moves in between."""
    below = set(frontier)
    sums = set()
    for node in reversed(graph.nodes):
        if any(child in below for child, _ in node.next_functions if child is not None):
            facts = operation(node)
            if facts.carries_parameter:
                below.add(node)
            elif facts.adds:
                sums.add(node)
    return sums
