"""Which parameters form a block together."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lapwing.networks.blocks import Block
from lapwing.networks.forms import Elementwise, Matmul, Pattern
from lapwing.networks.graph import RESHAPES, Graph, Node, output_shape
from lapwing.networks.rules import Use, Uses


def arranged(
    graph: Graph,
    uses: Uses,
    patterns: Mapping[Node, Pattern | None],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[Block, ...]:
    """Which parameters form a block together, and of which kind."""
    by_name: dict[str, list[Use]] = {name: [] for name in shapes}
    for use in uses.uses:
        by_name[use.name].append(use)
    orphans = dict(uses.unclaimed)
    for use in uses.uses:
        if patterns[use.node] is None:
            orphans.setdefault(use.name, "rows shared by the whole batch")
    joined = _joined_biases(graph, by_name, orphans, shapes)
    blocks = []
    for name, mine in by_name.items():
        if name in joined.values():
            continue
        kinds = {use.form.kind for use in mine}
        shape = shapes[name]
        if name in orphans:
            blocks.append(Block("opaque", name, shape, why=f"no rule for {orphans[name]}"))
        elif not mine:
            blocks.append(Block("dense", name, shape, why="not used by the network"))
        elif len(kinds) > 1:
            blocks.append(Block("dense", name, shape, why="used in both orientations"))
        elif kinds == {"dense"}:
            blocks.append(Block("dense", name, shape, why="no linear map"))
        else:
            blocks.append(Block(kinds.pop(), name, shape, joined.get(name), mine[0].groups))
    return tuple(blocks)


def _joined_biases(
    graph: Graph,
    by_name: Mapping[str, list[Use]],
    orphans: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, str]:
    """Weight -> bias, where every use of either is a use of both on the same rows."""
    parents: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for child, _ in node.next_functions:
            parents.setdefault(child, []).append(node)
    dense = {use.node: use for uses in by_name.values() for use in uses if use.form.kind == "dense"}
    pairs = {}
    for name, mine in by_name.items():
        found = set()
        for use in mine:
            follower = None
            if isinstance(use.form, Matmul) and use.bias is None and use.form.part is None:
                follower = _following_bias(graph, use, dense, parents)
            found.add(follower.name if follower is not None else use.bias)
        bias = found.pop() if len(found) == 1 else None
        usable = bias in by_name and bias not in orphans and name not in orphans
        if bias is not None and usable and len(by_name[bias]) == len(mine):
            width = shapes[name][1] if mine[0].form.kind == "columns" else shapes[name][0]
            if shapes[bias] == (width,):
                pairs[name] = bias
    return pairs


def _following_bias(
    graph: Graph, use: Use, others: Mapping[Node, Use], parents: Mapping[Node, list[Node]]
) -> Use | None:
    """The bias that is added right after a product and to nothing else, if there is one."""
    node = use.node
    while graph.consumers.get(node, 0) == 1:
        (parent,) = parents[node]
        if parent.name() in RESHAPES:
            node = parent
            continue
        follower = others.get(parent)
        same = (
            follower is not None
            and isinstance(follower.form, Elementwise)
            and parent.name() == "AddBackward0"
            and output_shape(parent)[-1:] == output_shape(use.node)[-1:]
            and math.prod(output_shape(parent)) == math.prod(output_shape(use.node))  # nothing was broadcast
        )
        return follower if same else None
    return None
