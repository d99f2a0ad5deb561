"""Walking an autograd graph: where each parameter is used, which rows belong to which sample, and which blocks follow.

The network runs as it is. Afterwards the graph that autograd built is walked from the output: a product whose weight
operand leads to a parameter is one use of that parameter, and the tensor that the node saved is its input. Nothing is
hooked, patched or registered in the model, so functional code, attention and tied weights are read like any layer.

In most networks the walk already knows the rows of each sample: they are batch-major. Attention works time-major
inside, and recurrent networks stack time steps; there a probe decides. The seeds of the samples whose number has bit j
set are doubled, for each bit: the gradient of a row doubles if its sample has that bit, in every dtype. A row whose
gradient neither doubles nor stays belongs to several samples (it lies before a broadcast over the batch).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import ModelError
from lapwing.networks.jacobians import Block
from lapwing.networks.ops import Operation, operation
from lapwing.networks.pull import gradients, numbers_at_once
from lapwing.networks.rules import (
    LEAF,
    Node,
    ParameterOperand,
    Pattern,
    Ragged,
    Regular,
    Shape,
    Use,
    lookup,
    output_shape,
)

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
    def form(self) -> tuple[object, ...]:
        """The signature in which a size only matters as one or more, and the number of rows also as one per sample.

        The rows of a parameter have nothing to do with samples.
        """
        batch, carried = output_shape(self.nodes[0])[0], _carried_parameters(self.operations, self.leaves)
        rows = lambda n: n if n < 2 else 2 if n == batch else 3 if n % max(1, batch) == 0 else 4
        kinds = lambda shape: (*map(rows, shape[:1]), *(min(n, 2) for n in shape[1:]))
        return tuple(
            (name, shape if node in carried else kinds(shape), edges)
            for node, (name, shape, edges) in zip(self.nodes, self.signature, strict=True)
        )

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


def _carried_parameters(operations: Mapping[Node, Operation], leaves: Mapping[Node, str]) -> Carried:
    """Return the nodes whose output is a parameter, with its name and the nodes on the way to it, nearest first."""
    carried: Carried = {node: (name, ()) for node, name in leaves.items()}
    for node in reversed(tuple(operations)):  # producers before consumers
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


Patterns = Mapping[Node, Pattern | None]  # how rows run over the samples; None if samples share rows


def find_patterns(raw: Tensor, graph: Graph, recurrent: bool) -> tuple[Patterns, bool]:
    """Return for each node that uses a parameter how its rows run over the samples; None if samples share rows.

    The flag says whether these patterns hold for every batch of the same shapes. They may not if several patterns fit
    this batch: a row that no gradient reaches may belong to any sample. They do not if the rows follow no order.
    """
    batch = raw.shape[0]
    patterns: dict[Node, Pattern | None] = {}
    probed: dict[Node, int] = {}
    for node, rows in {use.node: use.n_rows for use in graph.uses}.items():
        if graph.batch_major[node] and rows % batch == 0:
            patterns[node] = Regular(1, batch, rows // batch)
        else:
            probed[node] = rows
    if not probed:
        return patterns, True
    certain = True
    for node, owner in _owners(raw, graph, probed, recurrent).items():
        fits = [] if owner is None else _find_regular(owner, batch)
        patterns[node] = fits[0] if fits else None if owner is None else Ragged.of(owner, batch)
        certain = certain and len(fits) == 1
    return patterns, certain


def _owners(raw: Tensor, graph: Graph, rows_of: Mapping[Node, int], recurrent: bool) -> dict[Node, Tensor | None]:
    """Return the sample of every row: -1 where no gradient arrives, None if samples share rows."""
    batch, nodes = len(raw), list(rows_of)
    bits = max(1, (batch - 1).bit_length())
    generator = torch.Generator().manual_seed(0)
    seed = (torch.randn(raw.shape, generator=generator).abs() + 0.5).to(raw)
    numbers = torch.arange(batch, device=raw.device)
    scales = torch.stack([1.0 + ((numbers >> bit) & 1) for bit in range(bits)]).to(seed)
    seeds = torch.cat([seed[None], seed * scales.view(bits, batch, *(1,) * (raw.ndim - 1))])
    owners: dict[Node, Tensor | None] = {}
    for node, first, grads in _probe_gradients(raw, graph, nodes, seeds, recurrent):
        grads = grads.reshape(len(grads), rows_of[node], grads[0].numel() // max(1, rows_of[node]))
        sizes = grads[0].abs().amax(1) if grads.numel() else seed.new_zeros(rows_of[node])
        before = owners[node] if node in owners else torch.where(sizes > 0, 0, -1)
        owners[node] = _with_bits(before, grads, sizes, first)
    return owners


def _probe_gradients(
    raw: Tensor, graph: Graph, nodes: list[Node], seeds: Tensor, recurrent: bool
) -> Iterator[tuple[Node, int, Tensor]]:
    """Yield nodes with the gradients there for the first seed and for those of some bits, and the first of these bits.

    All bits in one pass, which drops each gradient after its use; by autograd, which holds them, one after another.
    """
    if not recurrent and numbers_at_once(graph, nodes, raw.dtype) is not None:
        yield from ((node, 0, grads) for node, grads in gradients(raw, graph, nodes, seeds, recurrent))
        return
    without_doubling = dict(gradients(raw, graph, nodes, seeds[:1], recurrent))
    for bit, doubled in enumerate(seeds[1:]):
        for node, grad in gradients(raw, graph, nodes, doubled[None], recurrent):
            yield node, bit, torch.cat([without_doubling[node], grad])


def _with_bits(owner: Tensor | None, grads: Tensor, sizes: Tensor, first: int) -> Tensor | None:
    """Return the numbers of the samples with some more bits, from the gradients (1 + bits, rows, entries) of a node.

    The first are those of seeds that are not doubled, and ``sizes`` their largest entry in each row. Rounding is
    relative to the terms of a row, which may be far larger than their sum: behind a LayerNorm they cancel.
    """
    eps = torch.finfo(grads.dtype).eps
    limit = max(64 * eps, eps**0.5) * sizes
    for bit, after in enumerate(grads[1:] if grads.numel() else (), first):
        same = (after - grads[0]).abs().amax(1) <= limit
        twice = (after - 2 * grads[0]).abs().amax(1) <= limit
        if owner is None or bool(((owner >= 0) & ~same & ~twice).any()):
            return None
        owner = torch.where((owner >= 0) & twice, owner + (1 << bit), owner)
    return owner


def _find_regular(owner: Tensor, batch: int) -> list[Regular]:
    """Return every regular pattern that fits: row r belongs to sample (r // inner) % batch."""
    if len(owner) % batch:
        return []
    share = len(owner) // batch
    rows = torch.arange(len(owner), device=owner.device)
    unreached = owner < 0
    return [
        Regular(share // inner, batch, inner)
        for inner in range(share, 0, -1)
        if share % inner == 0 and bool((((rows // inner) % batch == owner) | unreached).all())
    ]


Layout = tuple[Block, ...]
UNUSED = "not used by the network"


def arrange_blocks(graph: Graph, patterns: Patterns, shapes: Mapping[str, Shape]) -> Layout:
    """Return the blocks of all parameters: which of them go together, and the kind of each block."""
    uses_of = {name: graph.uses_of.get(name, []) for name in shapes}
    without_rule = dict(graph.unread)
    for use in graph.uses:
        if patterns[use.node] is None:
            without_rule.setdefault(use.name, "rows shared by the whole batch")
    biases = _biases_to_join(graph, uses_of, without_rule, shapes)
    blocks = []
    for name, uses in uses_of.items():
        if name in biases.values():
            continue
        if name in without_rule:
            blocks.append(Block("opaque", name, shapes[name], why=f"no rule for {without_rule[name]}"))
        elif not uses:
            blocks.append(Block("dense", name, shapes[name], why=UNUSED))
        elif len({(use.kind, use.table > 0) for use in uses}) > 1:
            blocks.append(Block("dense", name, shapes[name], why="used in both orientations"))
        else:
            first = uses[0]
            why = first.remark if first.linear else "no linear map"
            blocks.append(Block(first.kind, name, shapes[name], biases.get(name), first.groups, why))
    return tuple(blocks)


def _biases_to_join(
    graph: Graph, uses_of: Mapping[str, list[Use]], without_rule: Mapping[str, str], shapes: Mapping[str, Shape]
) -> dict[str, str]:
    """Return weight -> bias, where every use of either is a use of both on the same rows."""
    pairs = {}
    for name, uses in uses_of.items():
        candidates = {_bias_of(graph, use) for use in uses}
        bias = candidates.pop() if len(candidates) == 1 else None
        usable = bias in uses_of and bias not in without_rule and name not in without_rule
        if bias is not None and usable and len(uses_of[bias]) == len(uses):
            width = Block(uses[0].kind, name, shapes[name]).d_out
            if shapes[bias] == (width,):
                pairs[name] = bias
    return pairs


def unreadable_blocks(graph: Graph, patterns: Patterns, layout: Layout) -> dict[int, str]:
    """Return the blocks whose Jacobian cannot be read from this graph, by number, each with the reason.

    The blocks follow the first batch, and a later one may have another graph: by control flow in the model, or by an
    operation that PyTorch chooses by the shape.
    """
    reasons = {}
    for number, block in enumerate(layout):
        uses = graph.uses_of.get(block.weight, [])
        operations = [graph.unread[name] for name in block.names if name in graph.unread]
        if not block.has_rule:
            reasons[number] = block.why
        elif operations:
            reasons[number] = f"no rule for {operations[0]}"
        elif any(patterns[use.node] is None for use in uses):
            reasons[number] = "rows shared by the whole batch"
        elif block.linear and len({use.table > 0 for use in uses}) > 1:
            reasons[number] = "looked up and multiplied"
        elif block.linear and any(_differs(graph, use, block) for use in uses):
            reasons[number] = "used in another way than in the first batch"
        elif block.bias is not None and len(graph.uses_of.get(block.bias, ())) != len(uses):
            reasons[number] = "used apart from its bias"
    return reasons


def _differs(graph: Graph, use: Use, block: Block) -> bool:
    """Return whether the use of the weight of a linear block is not that of the first batch."""
    looked_up = use.table > 0 and use.remark != block.why  # its inputs would have to be written as one-hot vectors
    if looked_up or (use.kind, use.groups) != (block.kind, block.groups):
        return True
    return block.bias is not None and _bias_of(graph, use) != block.bias


def _bias_of(graph: Graph, use: Use) -> str | None:
    """Return the bias that is added to a product, at the same node or right after it and to nothing else."""
    if use.bias is not None or not use.takes_bias:
        return use.bias
    node = product = use.node
    while graph.consumers.get(node, 0) == 1:
        (parent,) = graph.parents[node]
        if graph.operations[parent].reshapes:
            node = parent
            continue
        same = (
            graph.operations[parent].adds
            and output_shape(parent)[-1:] == output_shape(product)[-1:]
            and math.prod(output_shape(parent)) == math.prod(output_shape(product))  # nothing was broadcast
        )
        return graph.added.get(parent) if same else None
    return None
