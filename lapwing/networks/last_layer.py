"""The last linear layer: its place in the graph, the rule that selects it, its curvature in closed form."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.linalg.dense import Basis
from lapwing.networks.graph import Graph
from lapwing.networks.jacobians import Block, KroneckerRows
from lapwing.networks.selection import Selection, float_parameters, make_selection
from lapwing.networks.uses import Node, Use, output_shape


@dataclass(frozen=True, eq=False)
class Head:
    """A linear map whose outputs are the outputs of the network, in another shape or order."""

    number: int  # of its block in the layout
    use: Use
    path: tuple[tuple[Node, int], ...]  # the nodes from the output to it, each with the operand that leads on
    graph: Graph

    def carry_back(self, values: Tensor) -> Tensor:
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


@dataclass(frozen=True, eq=False)
class HeadGGN:
    """JᵀHJ of a linear map whose outputs are those of the network, Σ H_bt ⊗ a_bt a_btᵀ, without J.

    H of every position is diagonal, or has -Σ_m outer_m outer_mᵀ off its diagonal: one term for each of the M data
    that share a position, usually one. Memory: 1 + M numbers for each output, where C seeds have C.
    """

    a: Tensor  # (G, B, T, d_in)
    diagonal: Tensor  # (G, B T, d_out), float64
    outer: Tensor | None  # (G, M, B T, d_out), float64

    def kronecker_rows(self, reduce: bool, weights: Tensor | None = None) -> KroneckerRows:
        """Return what the two Kronecker factors are sums of. A datum has one position, so ``reduce`` pools inputs."""
        a = self.a if weights is None else self.a * weights.sqrt().to(self.a)[:, None, None]
        pooled = reduce and a.shape[2] > 1
        a = a.mean(2) if pooled else a.flatten(1, 2)
        number = a.shape[1] if weights is None else float(weights.sum()) * (a.shape[1] // len(weights))
        outer = None if self.outer is None else self.outer.flatten(1, 2)
        return KroneckerRows(a, None, outer, False, number, self.diagonal.sum(1))

    def squares(self) -> Tensor:
        """Return the diagonal of JᵀHJ, (G, d_out, d_in)."""
        a = self.a.flatten(1, 2)
        return torch.bmm(self.diagonal.mT.to(a), a.square())

    def squares_in(self, out: Basis, inp: Basis) -> Tensor:
        """Return the diagonal of JᵀHJ in these bases, the mean over the directions of each part: (G, m_out, m_in)."""
        total = self.diagonal if self.outer is None else self.diagonal + self.outer.square().sum(1)
        rotated = out.diagonal_of(total)
        if self.outer is not None:
            each = [out.pool(out.coordinates(term).square()) for term in self.outer.unbind(1)]
            rotated = rotated - torch.stack(each).sum(0)
        a = inp.pool(inp.lengths(self.a.flatten(1, 2)).double().square())
        return torch.bmm(rotated.clamp_min(0).mT, a)

    def pairs(self, rows: slice, first: Tensor, second: Tensor) -> Tensor:
        """Return the entries of H for pairs of outputs at some of the B T positions, (rows, pairs), for one group."""
        diagonal = self.diagonal[0, rows]
        if self.outer is None:
            return torch.where(first == second, diagonal[:, first], 0.0)
        outer = self.outer[0, :, rows]
        return torch.where(first == second, diagonal[:, first], -(outer[..., first] * outer[..., second]).sum(0))


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
        return make_selection(model, tuple(name for name in self.needs(model) if name in chosen))


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
