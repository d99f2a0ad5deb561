"""The selected weights: names, shapes and order, and the rules that select them, the rule for the last layer included.

The tangent model has the selected weights alone. ``find_head`` finds the linear map that makes the outputs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.networks.graph import Graph
from lapwing.networks.jacobians import Block
from lapwing.networks.rules import Node, Use, output_shape
from lapwing.runtime.settings import Rule, of_class, refuse_other_arguments


@dataclass(frozen=True, eq=False)
class Selection:
    """Names and shapes of the selected parameters, and the order of the flat vector theta (P,).

    ``index`` picks single entries out of the concatenated parameters; None takes them all.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    index: Tensor | None = None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each parameter."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @cached_property
    def slices(self) -> Mapping[str, slice]:
        """The place of each parameter in the concatenation of all."""
        ends = accumulate(self.sizes)
        return {name: slice(end - size, end) for name, size, end in zip(self.names, self.sizes, ends, strict=True)}

    @property
    def total(self) -> int:
        """The number of entries of all named parameters together."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """P: the number of uncertain weights."""
        return self.total if self.index is None else len(self.index)

    @cached_property
    def counts(self) -> Mapping[str, int] | None:
        """The number of chosen entries of each parameter; None if all are chosen."""
        if self.index is None:
            return None
        ends = torch.tensor([part.stop for part in self.slices.values()], device=self.index.device)
        parameter = torch.searchsorted(ends, self.index, right=True)
        return dict(zip(self.names, torch.bincount(parameter, minlength=len(ends)).tolist(), strict=True))

    def pick(self, full: Tensor) -> Tensor:
        """Return theta (..., P) from all entries (..., total)."""
        return full if self.index is None else full[..., self.index.to(full.device)]

    def fill(self, theta: Tensor) -> Tensor:
        """Return all entries (..., total) from theta (..., P), zero where not selected."""
        if self.index is None:
            return theta
        full = theta.new_zeros(*theta.shape[:-1], self.total)
        full[..., self.index.to(theta.device)] = theta
        return full

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """Return theta (..., P) as parameters by name, (..., *shape)."""
        full, parts = self.fill(theta), zip(self.slices.items(), self.shapes, strict=True)
        return {name: full[..., part].reshape((*full.shape[:-1], *shape)) for (name, part), shape in parts}

    def layer_of(self) -> tuple[str, ...]:
        """Return the name of the module that has each parameter: weight and bias of one layer share it."""
        return tuple(name.rpartition(".")[0] for name in self.names)


@runtime_checkable
class Weights(Protocol):
    """A rule that selects weights."""

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the parameters that must be in the graph before the choice can be made."""
        ...

    def choose(self, model: nn.Module, graph: Graph) -> Selection:
        """Return the selection, given the graph of the outputs with the uses of the needed parameters."""
        ...


@runtime_checkable
class NeedsNoGraph(Protocol):
    """A rule that reads the names and sizes of the parameters alone."""

    def select(self, model: nn.Module) -> Selection:
        """Return the selection."""
        ...


def float_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters that are real or complex numbers, by name."""
    return {name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}


def require_real(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names; raise if one of these parameters is complex, since the posterior is over real numbers."""
    tensors = dict(model.named_parameters())
    for name in names:
        if tensors[name].is_complex():
            raise ModelError(
                f"the parameter {name!r} is complex ({tensors[name].dtype}); expected real numbers. Keep it as a real "
                "parameter with a last dimension of 2 and call torch.view_as_complex in forward, or leave it out: "
                "requires_grad_(False) on it, or weights=lw.named(...)."
            )
    return names


def make_selection(model: nn.Module, names: tuple[str, ...], index: Tensor | None = None) -> Selection:
    """Return the selection of the named parameters; raise if one of them is complex."""
    tensors = float_parameters(model)
    return Selection(require_real(model, names), tuple(tuple(tensors[name].shape) for name in names), index)


class NamedWeights:
    """A rule that needs no graph: the parameters that it names are those that it selects."""

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the parameters."""
        raise NotImplementedError

    def choose(self, model: nn.Module, graph: Graph) -> Selection:
        return self.select(model)

    def select(self, model: nn.Module) -> Selection:
        """Return the selection, for callers without a graph."""
        return make_selection(model, self.needs(model))


@dataclass(frozen=True)
class AllWeights(NamedWeights):
    """Every parameter that requires a gradient.

    Raises:
        ModelError: if no parameter requires a gradient.

    >>> import lapwing as lw
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> x, y = torch.randn(10, 3), torch.randn(10, 2)
    >>> posterior = lw.fit(net, [(x, y)], "regression", weights=lw.all_weights)
    >>> posterior.network.selection.size
    26
    """

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        names = tuple(name for name, p in float_parameters(model).items() if p.requires_grad)
        if not names:
            raise ModelError(
                "no parameter of the model requires a gradient, so none is uncertain; "
                "call model.requires_grad_(True), or choose weights with last_layer or named(pattern)."
            )
        return require_real(model, names)


@dataclass(frozen=True)
class Named(NamedWeights):
    """Parameters whose full name matches a regular expression, frozen parameters included."""

    pattern: str

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        try:
            names = tuple(name for name in float_parameters(model) if re.search(self.pattern, name))
        except re.error as error:
            raise ModelError(
                f"{self.pattern!r} is not a regular expression: {error}; expected one, such as '^0'."
            ) from error
        if not names:
            raise ModelError(
                f"no parameter name matches {self.pattern!r}; the model has "
                f"{', '.join(list(float_parameters(model))[:20])}."
            )
        return require_real(model, names)


@dataclass(frozen=True, eq=False)
class Subnetwork(NamedWeights):
    """Single entries of the flat vector of all weights that require a gradient."""

    index: Tensor

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        return all_weights.needs(model)

    def select(self, model: nn.Module) -> Selection:
        whole = make_selection(model, self.needs(model))
        index = self.index.nonzero()[:, 0] if self.index.dtype == torch.bool else self.index.long()
        if self.index.dtype == torch.bool and len(self.index) != whole.size:
            raise ModelError(f"the mask has {len(self.index)} entries; expected {whole.size}, one for each weight.")
        if not len(index) or int(index.min()) < 0 or int(index.max()) >= whole.size:
            raise ModelError(f"subnetwork indices must be in 0..{whole.size - 1} and at least one; got {len(index)}.")
        mask = torch.zeros(whole.size, dtype=torch.bool, device=index.device)
        mask[index] = True
        if int(mask.sum()) != len(index):
            raise ModelError("subnetwork indices repeat; give each weight once.")
        parts = {name: part for name, part in whole.slices.items() if bool(mask[part].any())}
        kept = torch.cat([torch.arange(part.start, part.stop, device=index.device) for part in parts.values()])
        # Theta keeps the order of the indices as given, so that vectors of the prior belong to the right weights.
        return make_selection(model, tuple(parts), torch.searchsorted(kept, index))


all_weights = AllWeights()


@refuse_other_arguments
def named(pattern: str) -> Weights:
    """Select the parameters whose name matches a regular expression: LoRA weights, one block.

    Args:
        pattern: a regular expression, searched for in the full name of every parameter (``"0.weight"``). Frozen
            parameters are selected too.

    Returns:
        A rule for the argument ``weights`` of ``fit``.

    Raises:
        ModelError: in ``fit``, if the pattern is not a regular expression or no name matches.

    >>> import lapwing as lw
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> x, y = torch.randn(10, 3), torch.randn(10, 2)
    >>> lw.fit(net, [(x, y)], "regression", weights=lw.named("^2")).network.selection.names
    ('2.weight', '2.bias')
    """
    of_class("a regular expression for names of parameters", str).check("pattern", pattern)
    return Named(pattern)


@refuse_other_arguments
def subnetwork(index: Tensor | Sequence[int] | Sequence[bool]) -> Weights:
    """Select single weights, by their positions in the flat vector of all weights that require a gradient.

    Args:
        index: positions (n,), each once, or a mask over all weights. Vectors of the prior and samples of the weights
            have the order in which positions are given; a mask gives rising positions.

    Returns:
        A rule for the argument ``weights`` of ``fit``. Methods that need whole layers (``Kron``, ``EKron``) refuse it;
        use ``Full`` or ``Diagonal``. ``lw.subnetworks`` has rules that choose the positions.

    Raises:
        ModelError: if they are not whole numbers (n,); in ``fit``, if positions repeat, are out of range or are none,
            or if a mask has another length.

    >>> import lapwing as lw
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> x, y = torch.randn(10, 3), torch.randn(10, 2)
    >>> some = lw.subnetwork(torch.tensor([0, 5, 20]))
    >>> lw.fit(net, [(x, y)], "regression", method=lw.Full(), weights=some).network.selection.size
    3
    """
    INDEX.check("index", index)
    return Subnetwork(torch.as_tensor(index))


def _is_index(value: object) -> bool:
    index = torch.as_tensor(value)
    return index.ndim == 1 and not index.is_floating_point() and not index.is_complex() and not index.is_meta


INDEX = Rule(
    "whole numbers (n,), the positions of weights, or a mask with True or False for each", _is_index, ModelError
)


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
    time, or if it is not a linear map with outputs of its own at every position: a convolution is one, a transposed
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
    used_once = sum(other.name == use.name for other in graph.uses) == 1
    numbers = [i for i, block in enumerate(layout) if block.linear and block.weight == use.name]
    if not (used_once and use.own_rows and numbers):
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
        unscaled = operand == 0 or node._saved_alpha == 1
        return operand if unscaled and output_shape(child) == output_shape(node) else None
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
            above = _walk([side for side in sides if side not in graph.leaves])
            computed = tuple(graph.leaves[leaf] for leaf in above if leaf in graph.leaves)
            if computed:
                maps[node] = computed
    return maps


def _walk(nodes: Iterable[Node | None], stop: Collection[Node] = ()) -> dict[Node, None]:
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
    first = [node for node in _walk([graph.nodes[0]], stop=maps) if node in maps]
    upstream = _walk(child for node in first for child, _ in node.next_functions)
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
