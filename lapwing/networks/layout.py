"""The arrangement of parameters in blocks, and the memory that one sample takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from lapwing.errors import FileError
from lapwing.networks.budget import Footprint
from lapwing.networks.entries import are_few
from lapwing.networks.graph import Graph
from lapwing.networks.jacobians import Block
from lapwing.networks.passes import numbers_at_once
from lapwing.networks.patterns import Patterns
from lapwing.networks.selection import Selection
from lapwing.networks.uses import Node, Shape, Use, output_numbers, output_shape

Layout = tuple[Block, ...]


def arranged(graph: Graph, patterns: Patterns, shapes: Mapping[str, Shape]) -> Layout:
    """Return the blocks of all parameters: which of them go together, and the kind of each block."""
    uses_of: dict[str, list[Use]] = {name: [] for name in shapes}
    without_rule = dict(graph.unread)
    for use in graph.uses:
        uses_of[use.name].append(use)
        if patterns[use.node] is None:
            without_rule.setdefault(use.name, "rows shared by the whole batch")
    biases = _joined_biases(graph, uses_of, without_rule, shapes)
    blocks = []
    for name, uses in uses_of.items():
        if name in biases.values():
            continue
        if name in without_rule:
            blocks.append(Block("opaque", name, shapes[name], why=f"no rule for {without_rule[name]}"))
        elif not uses:
            blocks.append(Block("dense", name, shapes[name], why="not used by the network"))
        elif len({(use.kind, use.table > 0) for use in uses}) > 1:
            blocks.append(Block("dense", name, shapes[name], why="used in both orientations"))
        else:
            first = uses[0]
            why = first.remark if first.linear else "no linear map"
            blocks.append(Block(first.kind, name, shapes[name], biases.get(name), first.groups, why))
    return tuple(blocks)


def _joined_biases(
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


def without_factors(graph: Graph, patterns: Patterns, layout: Layout) -> dict[int, str]:
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


def refuse_other_parameters(selection: Selection, layout: Layout, model: nn.Module) -> None:
    """Raise ``FileError`` unless the selection and the blocks from a file are those of this model's parameters."""
    tensors = {name: tuple(p.shape) for name, p in model.named_parameters() if p.is_floating_point()}
    if not selection.names or selection.shapes != tuple(tensors.get(name) for name in selection.names):
        raise FileError(f"the file selects {selection.names!r:.80}, which are not parameters of these shapes")
    covered = [name for block in layout for name in block.names]
    if sorted(covered) != sorted(selection.names) or len(set(covered)) != len(covered):
        raise FileError("the blocks of the file do not have each selected parameter once")
    index = selection.index
    if index is not None and (not len(index) or int(index.max()) >= selection.total):
        raise FileError(f"the file selects single weights beyond the {selection.total} of its parameters, or none")
    for block in layout:
        wide = block.linear and len(block.shape) >= 2 and block.shape[0] % block.groups == 0
        single = not block.linear and block.groups == 1 and block.bias is None
        bias = None if block.bias is None else (block.groups * block.d_out,)
        if (
            block.shape != tensors[block.weight]
            or not (wide or single)
            or bias not in (None, tensors.get(block.bias or ""))
        ):
            raise FileError(f"the block of {block.weight!r} in the file does not fit the parameter")


def footprint(
    layout: Layout,
    graph: Graph,
    raw: Tensor,
    outputs: int,
    recurrent: bool,
    counts: Mapping[str, int] | None = None,
) -> Footprint:
    """Return the memory of one sample, measured on the graph of a batch with this many outputs for each sample.

    ``counts`` has the number of chosen entries of each parameter, where they are chosen one by one.
    """
    batch = len(raw)
    width = _gradient_numbers(graph.uses) // batch
    patches = max((use.patch_size // batch for use in graph.uses), default=0)
    # Jacobians that are larger than the gradients they are read from. Those of opaque blocks exist together, since one
    # pass gives them all; of the others one at a time.
    opaque, largest = 0, 0
    for block in layout:
        if not block.has_rule:
            opaque += block.size
        elif not block.linear or counts is not None:
            read = _gradient_numbers(use for use in graph.uses if use.name == block.weight) // batch
            formed = block.size
            if block.linear and counts is not None:  # its columns, where they are few
                count = sum(counts[name] for name in block.names)
                few = are_few(count, block.size, outputs, read // (block.groups * block.d_out))
                formed = count if few else 0
            largest = max(largest, formed if formed > read else 0)
    computed = sum(map(output_numbers, _computing(graph)))
    at_once = None if recurrent else numbers_at_once(graph, {use.node for use in graph.uses}, raw.dtype)
    live = width if at_once is None else min(width, at_once // batch)
    return Footprint(max(width, outputs), patches, opaque + largest, computed // batch, max(live, outputs))


def widest_result(graph: Graph, batch: int) -> int:
    """Return how many numbers the largest result of an operation has, for each sample."""
    return max(map(output_numbers, _computing(graph)), default=0) // batch


def _computing(graph: Graph) -> Iterator[Node]:
    """Yield the nodes whose output is a result of its own: no parameter, and no view of another result."""
    return (
        node for node, facts in graph.operations.items() if not facts.carries_parameter and node not in graph.leaves
    )


def _gradient_numbers(uses: Iterable[Use]) -> int:
    """Return how many numbers the gradients at the nodes of these uses have, for each seed."""
    return sum(output_numbers(node) for node in {use.node for use in uses})
