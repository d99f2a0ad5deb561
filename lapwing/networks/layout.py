"""Which parameters form a block together, and how much memory one sample takes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lapwing.networks.blocks import Block
from lapwing.networks.budget import Footprint
from lapwing.networks.forms import Node, Shape, Use, output_shape
from lapwing.networks.graph import Graph, Patterns, Uses
from lapwing.networks.ops.operation import operation

Layout = tuple[Block, ...]


def arranged(graph: Graph, uses: Uses, patterns: Patterns, shapes: Mapping[str, Shape]) -> Layout:
    """Return the blocks of all parameters: which of them go together, and the kind of each block."""
    by_name: dict[str, list[Use]] = {name: [] for name in shapes}
    for use in uses.uses:
        by_name[use.name].append(use)
    without_rule = dict(uses.without_rule)
    for use in uses.uses:
        if patterns[use.node] is None:
            without_rule.setdefault(use.name, "rows shared by the whole batch")
    biases = _joined_biases(graph, by_name, without_rule, shapes)
    blocks = []
    for name, its_uses in by_name.items():
        if name in biases.values():
            continue
        kinds = {use.form.kind for use in its_uses}
        shape = shapes[name]
        if name in without_rule:
            blocks.append(Block("opaque", name, shape, why=f"no rule for {without_rule[name]}"))
        elif not its_uses:
            blocks.append(Block("dense", name, shape, why="not used by the network"))
        elif len(kinds) > 1:
            blocks.append(Block("dense", name, shape, why="used in both orientations"))
        elif kinds == {"dense"}:
            blocks.append(Block("dense", name, shape, why="no linear map"))
        else:
            blocks.append(Block(kinds.pop(), name, shape, biases.get(name), its_uses[0].groups))
    return tuple(blocks)


def _joined_biases(
    graph: Graph,
    by_name: Mapping[str, list[Use]],
    without_rule: Mapping[str, str],
    shapes: Mapping[str, Shape],
) -> dict[str, str]:
    """Return weight -> bias, where every use of either is a use of both on the same rows."""
    parents: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for child, _ in node.next_functions:
            parents.setdefault(child, []).append(node)
    dense = {use.node: use for uses in by_name.values() for use in uses if use.form.kind == "dense"}
    pairs = {}
    for name, its_uses in by_name.items():
        candidates = set()
        for use in its_uses:
            added = None
            if use.form.takes_bias and use.bias is None:
                added = _following_bias(graph, use, dense, parents)
            candidates.add(added.name if added is not None else use.bias)
        bias = candidates.pop() if len(candidates) == 1 else None
        usable = bias in by_name and bias not in without_rule and name not in without_rule
        if bias is not None and usable and len(by_name[bias]) == len(its_uses):
            width = shapes[name][1] if its_uses[0].form.kind == "columns" else shapes[name][0]
            if shapes[bias] == (width,):
                pairs[name] = bias
    return pairs


def _following_bias(
    graph: Graph, use: Use, dense: Mapping[Node, Use], parents: Mapping[Node, list[Node]]
) -> Use | None:
    """Return the bias that is added right after a product and to nothing else, if there is one."""
    node = use.node
    while graph.consumers.get(node, 0) == 1:
        (parent,) = parents[node]
        if operation(parent).reshapes:
            node = parent
            continue
        same = (
            operation(parent).adds
            and output_shape(parent)[-1:] == output_shape(use.node)[-1:]
            and math.prod(output_shape(parent)) == math.prod(output_shape(use.node))  # nothing was broadcast
        )
        return dense.get(parent) if same else None
    return None


def footprint(layout: Layout, uses: Uses, shapes: Mapping[str, Shape], batch: int, outputs: int) -> Footprint:
    """Return the memory of one sample, measured on a batch of this size with this many outputs for each sample."""
    nodes = {use.node for use in uses.uses}
    width = sum(math.prod(output_shape(node)) for node in nodes) // batch
    patches = [use.form.patch_size(output_shape(use.node), shapes[use.name], use.groups) // batch for use in uses.uses]
    return Footprint(max(width, outputs), max(patches, default=0), _kept_whole(layout, uses, batch))


def _kept_whole(layout: Layout, uses: Uses, batch: int) -> int:
    """Return the numbers for each sample and seed in Jacobians that are larger than the gradients they are read from.

    Those of opaque blocks exist together, since one pass gives them all; of the others one at a time.
    """
    opaque, largest = 0, 0
    for block in layout:
        if block.kind == "opaque":
            opaque += block.size
        elif block.kind == "dense":
            nodes = {use.node for use in uses.uses if use.name == block.weight}
            read = sum(math.prod(output_shape(node)) for node in nodes) // batch
            largest = max(largest, block.size if block.size > read else 0)
    return opaque + largest
