"""The rule that selects the last layer of a network, read from its graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from lapwing.errors import ModelError
from lapwing.networks.graph import Graph
from lapwing.networks.selection import Selection, float_parameters, selected
from lapwing.networks.uses import Node


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

    def choose(self, model: nn.Module, graph: Graph) -> Selection:
        maps = _linear_maps(graph)
        frontier = _frontier(graph, maps)
        if not frontier:
            raise ModelError(
                "there is no linear map of a parameter on the way from the output; "
                "choose the weights by name with named(pattern)."
            )
        chosen = {name for node in frontier for name in maps[node]}
        sums = _sums_after(graph, frontier)  # a bias that is added separately
        chosen |= {use.name for use in graph.uses if use.node in frontier or (use.node in sums and not use.linear)}
        return selected(model, tuple(name for name in self.needs(model) if name in chosen))


last_layer = LastLayer()


def _linear_maps(graph: Graph) -> dict[Node, tuple[str, ...]]:
    """Return all nodes that are linear maps with a weight, and the parameters of each."""
    maps = dict(graph.without_rule)  # a head without a rule is a head as well
    for use in graph.uses:
        if use.linear:
            maps[use.node] = (*maps.get(use.node, ()), use.name)
    for node, facts in graph.operations.items():  # a product with a weight that is computed first: weight norm
        if facts.data_operand is not None and node not in maps:
            sides = [child for i, (child, _) in enumerate(node.next_functions) if i != facts.data_operand]
            above = _reached([side for side in sides if side not in graph.leaves])
            computed = tuple(graph.leaves[leaf] for leaf in above if leaf in graph.leaves)
            if computed:
                maps[node] = computed
    return maps


def _reached(nodes: Iterable[Node | None], stop: Collection[Node] = ()) -> dict[Node, None]:
    """Return the nodes on every path from these ones, in a fixed order; paths end at the nodes of ``stop``."""
    seen: dict[Node, None] = {}
    stack = [node for node in nodes if node is not None]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            if node not in stop:
                stack.extend(child for child, _ in node.next_functions if child is not None)
    return seen


def _frontier(graph: Graph, maps: Mapping[Node, object]) -> list[Node]:
    """Return the maps that are the first on some path from the output and not upstream of another such map."""
    first = [node for node in _reached([graph.nodes[0]], stop=maps) if node in maps]
    upstream = _reached(child for node in first for child, _ in node.next_functions)
    return [node for node in first if node not in upstream]


def _sums_after(graph: Graph, frontier: list[Node]) -> set[Node]:
    """Return the sums that add something to the output of a frontier node, with nothing but moves in between."""
    below = set(frontier)
    sums = set()
    for node in reversed(graph.nodes):
        if any(child in below for child, _ in node.next_functions):
            if graph.operations[node].carries_parameter:
                below.add(node)
            elif graph.operations[node].adds:
                sums.add(node)
    return sums
