"""How each operation uses a parameter: one small rule for each.

A rule turns a graph node and the gradient at its output into the Jacobian of the parameter, sample by sample.
Operations without a rule leave their parameters to the fallback.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.networks.blocks import BlockJacobian, DenseJacobian, LinearJacobian, LookupJacobian
from lapwing.networks.graph import RESHAPES, Graph, Node, output_shape

Pattern = tuple[int, int, int]  # rows run over (outer, sample, inner)


class Form(Protocol):
    """What a use looks like. ``kind`` is the block's; "dense" forms give whole Jacobians."""

    @property
    def kind(self) -> str: ...

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian: ...


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


def per_sample(t: Tensor, dim: int, pattern: Pattern) -> Tensor:
    """Split a dimension of rows into (sample, position) under the pattern."""
    outer, _, inner = pattern
    if outer == 1:
        return t.unflatten(dim, (pattern[1], inner))
    return t.unflatten(dim, pattern).movedim(dim + 1, dim).flatten(dim + 1, dim + 2)


@dataclass(frozen=True)
class Matmul:
    """rows @ W.T (kind "rows") or rows @ W (kind "columns"); ``part`` when only some outputs are used."""

    kind: str
    saved: str
    part: tuple[int, int, int] | None = None  # first, last, of how many outputs

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian:
        a = per_sample(getattr(node, self.saved).detach(), 0, pattern)
        g = per_sample(g, 1, pattern)
        if self.part is not None:
            first, last, total = self.part
            g = torch.nn.functional.pad(g, (first, total - last))
        return LinearJacobian(with_ones(a, bias)[None], g[None])


@dataclass(frozen=True)
class Convolution:
    """A convolution: positions are output pixels, inputs are the patches below them."""

    kind: str = "rows"

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian:
        x, weight, groups = node._saved_input.detach(), node._saved_weight, node._saved_groups
        patches = windows(x, weight.shape[2:], node._saved_stride, node._saved_padding, node._saved_dilation)
        images, spatial = x.shape[0], g.shape[3:]
        count, dims = _numel(spatial), len(spatial)
        # Inputs lie in memory as (G, Cin/G * k, N, T): one copy along rows of pixels, the bias's ones included, and
        # a Gram matrix over all positions needs no further one.
        kernel = tuple(weight.shape[2:])
        width = weight[0].numel()
        a = x.new_empty(groups, width + bias, images, count)
        patches = patches.unflatten(1, (groups, -1)).permute(
            1, 2, *range(3 + dims, 3 + 2 * dims), 0, *range(3, 3 + dims)
        )
        a[:, :width].view(groups, weight.shape[1], *kernel, images, *spatial).copy_(patches)
        if bias:
            a[:, width] = 1
        g = g.reshape(g.shape[0], images, groups, -1, count).permute(2, 0, 1, 4, 3)
        return LinearJacobian(_merge(a.permute(0, 2, 3, 1), 1, pattern), _merge(g, 2, pattern))


@dataclass(frozen=True)
class TransposedConvolution:
    """A transposed convolution: positions are input pixels, outputs are the patches above them."""

    kind: str = "columns"

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian:
        x, weight, groups = node._saved_input.detach(), node._saved_weight, node._saved_groups
        images, spatial = x.shape[0], x.shape[2:]
        count, dims = _numel(spatial), len(spatial)
        seeds = g.shape[0]
        above = windows(
            g.flatten(0, 1), weight.shape[2:], node._saved_stride, node._saved_padding, node._saved_dilation
        )
        for dim, extent in enumerate(spatial):  # output_padding may add windows beyond the input
            above = above.narrow(2 + dim, 0, extent)
        above = above.unflatten(0, (seeds, images)).unflatten(2, (groups, -1))
        above = above.permute(2, 0, 1, *range(4, 4 + dims), 3, *range(4 + dims, 4 + 2 * dims))
        a = x.reshape(images, groups, -1, count).permute(1, 0, 3, 2)
        return LinearJacobian(
            _merge(a, 1, pattern), _merge(above.reshape(groups, seeds, images, count, -1), 2, pattern)
        )


@dataclass(frozen=True)
class Lookup:
    """An embedding."""

    table: int
    kind: str = "columns"

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian:
        indices = node._saved_indices.reshape(-1)
        g = per_sample(g.reshape(g.shape[0], len(indices), -1), 1, pattern)
        rows = per_sample(indices, 0, pattern)
        real = rows != node._saved_padding_idx  # autograd gives the padding row no gradient
        return LookupJacobian.build(rows, g, real, self.table)


@dataclass(frozen=True, eq=False)
class Elementwise:
    """A parameter added to, or multiplied with, every row: biases and norm scales.

    ``factor`` (shaped like the output) is what the parameter is multiplied with, None for a sum. ``channel``
    says that the parameter lies along dimension 1 and not along the trailing ones.
    """

    shape: tuple[int, ...]
    channel: bool = False
    factor: Tensor | None = None
    part: tuple[int, int, int] | None = None
    kind: str = "dense"

    def jacobian(self, node: Node, g: Tensor, pattern: Pattern, bias: bool) -> BlockJacobian:
        if self.factor is not None:
            g = g * self.factor
        if self.channel:
            g = g.flatten(3).sum(-1) if g.ndim > 3 else g
            extents: tuple[int, ...] = (self.shape[0],)
        else:
            extents = tuple(g.shape[g.ndim - len(self.shape) :])
        total = per_sample(g.reshape(g.shape[0], -1, *extents), 1, pattern).sum(2)  # (K, B, *extents)
        narrow = [i + 2 for i, (have, want) in enumerate(zip(extents, self.shape, strict=True)) if have != want]
        if narrow and not self.part:
            total = total.sum(narrow)
        flat = total.flatten(2) if total.ndim > 2 else total.unsqueeze(-1)
        if self.part is not None:
            first, last, size = self.part
            flat = torch.nn.functional.pad(flat, (first, size - last))
        return DenseJacobian(flat.transpose(0, 1))


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
        claimed = dict(_claims(graph, node, name, sources, tensors))
        found.extend(claimed.values())
        for place, (parameter, _, _) in sources.items():
            if place not in claimed:
                unclaimed.setdefault(parameter, name)
                strangers[node] = (*strangers.get(node, ()), parameter)
    return Uses(tuple(found), unclaimed, strangers)


Sources = dict[int, tuple[str, tuple[Node, ...], Any]]


def _claims(
    graph: Graph, node: Node, name: str, sources: Sources, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[int, Use]]:
    """The operand places of this node for which there is a rule, with the use each stands for."""
    rule = RULES.get(name)
    if rule is not None:
        yield from rule(node, sources, tensors)


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
    if not moves and not node._saved_scale_grad_by_freq and not node._saved_sparse:
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
        other = node._saved_other if place == 0 else node._saved_self
        if other is not None:
            use = _elementwise(place, node, sources, tensors, other.detach())
            if use is not None:
                yield place, use


def _norm(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    x = node._saved_input.detach()
    kind = node.name()
    if "BatchNorm" in kind:
        if node._saved_training:
            return
        eps = node._saved_epsilon if kind.startswith("Cudnn") else node._saved_eps
        shape = (1, -1) + (1,) * (x.ndim - 2)
        mean = node._saved_running_mean.to(x.dtype).view(shape)
        rstd = (node._saved_running_var + eps).rsqrt().to(x.dtype).view(shape)
        unit = (x - mean) * rstd
    elif kind == "NativeGroupNormBackward0":
        grouped = x.reshape(x.shape[0], node._saved_group, -1)
        unit = ((grouped - node._saved_result1[..., None]) * node._saved_result2[..., None]).reshape(x.shape)
    else:
        unit = (x - node._saved_result1) * node._saved_result2
    channel = kind != "NativeLayerNormBackward0"
    for place, (name, moves, _) in sources.items():
        if place in (1, 2) and not moves:
            factor = unit.to(x.dtype) if place == 1 else None
            yield place, Use(node, name, Elementwise(tuple(tensors[name].shape), channel, factor))


def _fused_cell(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    """A recurrent cell on the GPU adds its biases to the gates itself: their gradient is the gates'."""
    for place in (3, 4):
        gates, nr = node.next_functions[place - 3]
        if place in sources and not sources[place][1] and gates is not None and nr == 0:
            name = sources[place][0]
            yield place, Use(gates, name, Elementwise(tuple(tensors[name].shape)))


def _elementwise(
    place: int, node: Node, sources: Sources, tensors: Mapping[str, Tensor], factor: Tensor | None = None
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
    size = _numel(shape)
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


def joined_bias(graph: Graph, use: Use, others: Mapping[Node, Use], parents: Mapping[Node, list[Node]]) -> Use | None:
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
            and _numel(output_shape(parent)) == _numel(output_shape(use.node))  # nothing was broadcast
        )
        return follower if same else None
    return None


def windows(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """Sliding windows (N, C, *out, *kernel) of x (N, C, *spatial), as a view of the padded input."""
    if any(padding):
        x = torch.nn.functional.pad(x, [p for extent in reversed(padding) for p in (extent, extent)])
    elif not x.is_contiguous():
        x = x.contiguous()
    spatial, steps = x.shape[2:], x.stride()[2:]
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(spatial, kernel, stride, dilation, strict=True)]
    return x.as_strided(
        (*x.shape[:2], *out, *kernel),
        (
            *x.stride()[:2],
            *(step * s for step, s in zip(steps, stride, strict=True)),
            *(step * d for step, d in zip(steps, dilation, strict=True)),
        ),
        x.storage_offset(),
    )


def with_ones(a: Tensor, bias: bool) -> Tensor:
    """The input with the column of ones that carries a bias."""
    return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1) if bias else a


def _merge(t: Tensor, dim: int, pattern: Pattern) -> Tensor:
    """(..., images, positions, d) -> (..., sample, images of it x positions, d)."""
    if pattern[0] == pattern[2] == 1:
        return t
    return per_sample(t, dim, pattern).flatten(dim + 1, dim + 2)


def _numel(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
