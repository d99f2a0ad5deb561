"""How each operation uses a parameter: one small rule for each.

A rule looks at a graph node and says which of its operands are parameters and in which form they are used. Operations
without a rule leave their parameters to the fallback.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.networks.forms import (
    Convolution,
    Elementwise,
    Factor,
    Form,
    Lookup,
    Matmul,
    TransposedConvolution,
    normalised,
)
from lapwing.networks.graph import RESHAPES, Graph, Node, output_shape


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a parameter: the node where it happens and the form it takes."""

    node: Node
    name: str
    form: Form
    bias: str | None = None  # added at this very node, to the same rows
    groups: int = 1


@dataclass(frozen=True, eq=False)
class Uses:
    """All uses in a graph, and the parameters of which some use has no rule."""

    uses: tuple[Use, ...]
    unclaimed: Mapping[str, str] = field(default_factory=dict)
    strangers: Mapping[Node, tuple[str, ...]] = field(default_factory=dict)  # nodes of the uses without a rule


def find(graph: Graph, parameters: Mapping[int, str], tensors: Mapping[str, Tensor]) -> Uses:
    """Every use of a parameter in the graph."""
    found: list[Use] = []
    unclaimed: dict[str, str] = {}
    strangers: dict[Node, tuple[str, ...]] = {}
    for node in graph.nodes:
        name = node.name()
        if name == "torch::autograd::AccumulateGrad" or _on_the_way(graph, node, parameters):
            continue
        sources = {}
        for place, edge in enumerate(node.next_functions):
            source = graph.source(edge, parameters) if edge[0] is not None else None
            if source is not None:
                sources[place] = (*source, edge)
        if not sources:
            continue
        rule = RULES.get(name)
        claimed = dict(rule(node, sources, tensors)) if rule is not None else {}
        found.extend(claimed.values())
        for place, (parameter, _, _) in sources.items():
            if place not in claimed:
                unclaimed.setdefault(parameter, name)
                strangers[node] = (*strangers.get(node, ()), parameter)
    return Uses(tuple(found), unclaimed, strangers)


Sources = dict[int, tuple[str, tuple[Node, ...], Any]]


def _addmm(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return
    width = output_shape(node)[1]
    bias = _elementwise(0, node, sources, tensors) if 0 in sources else None
    if bias is not None and tensors[bias.name].ndim == 1:
        yield 0, bias
    else:
        bias = None
    if 2 in sources and 1 not in sources:
        yield from _matmul(2, "_saved_mat1", node, width, sources, tensors, bias)


def _mm(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    if 1 in sources and 0 not in sources:
        yield from _matmul(1, "_saved_self", node, output_shape(node)[1], sources, tensors, None)


def _matmul(
    place: int, saved: str, node: Node, width: int, sources: Sources, tensors: Mapping[str, Tensor], bias: Use | None
) -> Iterator[tuple[int, Use]]:
    name, moves, edge = sources[place]
    parameter = tensors[name]
    if parameter.ndim != 2:
        return
    joint = bias.name if bias is not None and not getattr(bias.form, "part", None) else None
    kinds = [move.name() for move in moves if move.name() != "ToCopyBackward0"]
    if kinds == ["TBackward0"]:
        yield place, Use(node, name, Matmul("rows", saved), joint)
    elif not kinds:
        yield place, Use(node, name, Matmul("columns", saved), joint)
    else:
        part = _row_part(edge, parameter, width, transposed=True)
        if part is not None:
            yield place, Use(node, name, Matmul("rows", saved, part))


def _convolution(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    transposed = node._saved_transposed
    bias = None
    if 2 in sources and not sources[2][1]:
        name = sources[2][0]
        bias = Use(node, name, Elementwise(tuple(tensors[name].shape), channel=True))
        yield 2, bias
    if 1 in sources and not sources[1][1]:
        form: Form = TransposedConvolution() if transposed else Convolution()
        joint = None if transposed or bias is None else bias.name
        yield 1, Use(node, sources[1][0], form, joint, node._saved_groups)


def _embedding(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    name, moves, _ = sources[0]
    if not moves and not node._saved_sparse:
        yield 0, Use(node, name, Lookup(tensors[name].shape[0]))


def _add(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    if node._saved_alpha != 1 or len(sources) > 1:
        return
    for place in sources:
        use = _elementwise(place, node, sources, tensors)
        if use is not None:
            yield place, use


def _mul(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    if len(sources) > 1:
        return
    for place in sources:
        other = "_saved_other" if place == 0 else "_saved_self"
        use = (
            _elementwise(place, node, sources, tensors, attrgetter(other)) if getattr(node, other) is not None else None
        )
        if use is not None:
            yield place, use


def _norm(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    if "BatchNorm" in node.name() and node._saved_training:
        return
    channel = node.name() != "NativeLayerNormBackward0"
    for place, (name, moves, _) in sources.items():
        if place in (1, 2) and not moves:
            factor = normalised if place == 1 else None
            yield place, Use(node, name, Elementwise(tuple(tensors[name].shape), channel, factor))


def _fused_cell(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    """A recurrent cell on the GPU adds its biases to the gates itself: their gradient is the gates'."""
    for place in (3, 4):
        gates, nr = node.next_functions[place - 3]
        if place in sources and not sources[place][1] and gates is not None and nr == 0:
            name = sources[place][0]
            yield place, Use(gates, name, Elementwise(tuple(tensors[name].shape)))


def _elementwise(
    place: int, node: Node, sources: Sources, tensors: Mapping[str, Tensor], factor: Factor | None = None
) -> Use | None:
    """A parameter broadcast against the rows of the node's output, or None if it reaches over the batch."""
    name, moves, edge = sources[place]
    out = output_shape(node)
    moves = tuple(move for move in moves if move.name() != "ToCopyBackward0")
    if moves and all(move.name() in RESHAPES for move in moves):
        shape = output_shape(moves[0], edge[1])
    elif moves:
        if tensors[name].ndim != 1 or factor is not None:
            return None
        part = _row_part(edge, tensors[name], out[-1], transposed=False)
        return None if part is None else Use(node, name, Elementwise((out[-1],), part=part))
    else:
        shape = tuple(tensors[name].shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    if len(shape) >= len(out):
        return None
    return Use(node, name, Elementwise(shape, factor=factor))


RULES = {
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
    "AddBackward0": _add,
    "MulBackward0": _mul,
    "NativeLayerNormBackward0": _norm,
    "NativeGroupNormBackward0": _norm,
    "NativeBatchNormBackward0": _norm,
    "CudnnBatchNormBackward0": _norm,
    "ThnnFusedLstmCellBackward0": _fused_cell,
    "ThnnFusedGruCellBackward0": _fused_cell,
}


def _on_the_way(graph: Graph, node: Node, parameters: Mapping[int, str]) -> bool:
    return len(node.next_functions) == 1 and graph.source((node, 0), parameters) is not None


def _row_part(edge: Any, parameter: Tensor, width: int, transposed: bool) -> tuple[int, int, int] | None:
    """Which run of the parameter's rows a moved copy of it holds, or None if it is no such run.

    The moves are linear and only carry entries, so their own backward pass, fed with positions written in
    base 128 (exact in every dtype), says where each entry of the parameter went.
    """
    node, nr = edge
    shape = output_shape(node, nr)
    size = math.prod(shape)
    place = torch.zeros(parameter.shape, dtype=torch.long, device=parameter.device)
    base = 1
    numbers = torch.arange(1, size + 1, device=parameter.device)
    while base <= size:
        digit = ((numbers // base) % 128).to(node._input_metadata[nr].dtype).view(shape)
        (back,) = torch.autograd.grad(
            [GradientEdge(node, nr)], [parameter], [digit], retain_graph=True, allow_unused=True
        )
        place += back.long() * base
        base *= 128
    used = (place.flatten(1) if place.ndim > 1 else place[:, None]).ne(0).any(1).nonzero()[:, 0]
    if len(used) != width:
        return None
    first, last = int(used[0]), int(used[-1]) + 1
    want = numbers.view(shape).T if transposed else numbers.view(shape)
    if last - first != width or not torch.equal(place[first:last], want):
        return None
    return first, last, parameter.shape[0]
