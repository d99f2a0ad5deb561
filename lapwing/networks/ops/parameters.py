"""Reading how a parameter reaches an operation: whole, reshaped, or some of its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.networks.forms import Elementwise, Factor, Part
from lapwing.networks.nodes import Node, output_shape
from lapwing.networks.ops.entry import Sources, operation


def elementwise(
    operand: int, node: Node, sources: Sources, tensors: Mapping[str, Tensor], factor: Factor | None = None
) -> Elementwise | None:
    """Return the form of a parameter that is broadcast against the rows of the output; None if it spans the batch.

    ``factor`` reads from the node what the parameter is multiplied with.
    """
    name, moves, edge = sources[operand]
    out = output_shape(node)
    moves = tuple(move for move in moves if not operation(move).casts)
    if moves and all(operation(move).reshapes for move in moves):
        shape = output_shape(moves[0], edge[1])
    elif moves:
        if tensors[name].ndim != 1 or factor is not None:
            return None
        part = used_rows(edge, tensors[name], out[-1], transposed=False)
        return None if part is None else Elementwise((out[-1],), part=part)
    else:
        shape = tuple(tensors[name].shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return None if len(shape) >= len(out) else Elementwise(shape, factor=factor)


def used_rows(edge: tuple[Node, int], parameter: Tensor, width: int, transposed: bool) -> Part | None:
    """Return which consecutive rows of the parameter a moved copy of it holds, or None if it holds anything else.

    The moves are linear and only carry entries. So their own backward pass, given positions written in base 128
    (exact in every dtype), says where each entry of the parameter went.
    """
    node, number = edge
    shape = output_shape(node, number)
    size = math.prod(shape)
    places = torch.zeros(parameter.shape, dtype=torch.long, device=parameter.device)
    base = 1
    positions = torch.arange(1, size + 1, device=parameter.device)
    while base <= size:
        digit = ((positions // base) % 128).to(node._input_metadata[number].dtype).view(shape)
        (back,) = torch.autograd.grad(
            [GradientEdge(node, number)], [parameter], [digit], retain_graph=True, allow_unused=True
        )
        places += back.long() * base
        base *= 128
    used = (places.flatten(1) if places.ndim > 1 else places[:, None]).ne(0).any(1).nonzero()[:, 0]
    if len(used) != width:
        return None
    first, last = int(used[0]), int(used[-1]) + 1
    expected = positions.view(shape).T if transposed else positions.view(shape)
    if last - first != width or not torch.equal(places[first:last], expected):
        return None
    return first, last, parameter.shape[0]
