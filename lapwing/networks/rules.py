"""Rules for the use of parameters: from gradients at a node to the Jacobian of the parameter, sample by sample.

A rule ``use_...`` looks at a node and its parameters and yields a ``Use`` for each that it understands. Parameters
without a use take the fallback. ``ops.py`` has the table that says which operation has which rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.networks.jacobians import BlockJacobian, DenseJacobian, LookupJacobian
from lapwing.networks.linear_jacobian import LinearJacobian

if TYPE_CHECKING:
    from lapwing.networks.ops import Operation


Node = Any  # torch.autograd.graph.Node
Shape = tuple[int, ...]
Part = tuple[int, int, int]  # first and last row of the parameter that is used, and how many rows it has
Factor = Callable[[Node], Tensor]
LEAF = "torch::autograd::AccumulateGrad"  # the name of a node that stands for a tensor, not for an operation


def output_shape(node: Node, number: int = 0) -> Shape:
    """Return the shape of one of a node's outputs; () for a nested tensor, which has none."""
    try:
        return tuple(node._input_metadata[number].shape)
    except RuntimeError:
        return ()


def output_numbers(node: Node, number: int = 0) -> int:
    """Return how many numbers an output of a node has; ragged dimensions, without a size, are left out."""
    return math.prod(n for n in output_shape(node, number) if type(n) is int)


def read_saved(tensor: Tensor) -> Tensor:
    """Return a tensor that a node saved: part of the graph where gradients are recorded, otherwise detached."""
    return tensor if torch.is_grad_enabled() else tensor.detach()


def as_signed(value: int) -> int:
    """Return a dimension as a signed number: autograd saves negative ones as unsigned 64-bit numbers.

    >>> as_signed(2**64 - 1), as_signed(3)
    (-1, 3)
    """
    return value - 2**64 if value >= 2**63 else value


@dataclass(frozen=True)
class Regular:
    """Rows that run over (outer, sample, inner), as many for each sample."""

    outer: int
    samples: int
    inner: int
    lengths: ClassVar[None] = None  # the number of rows of each sample, (B,); None: all have the same

    def split(self, t: Tensor, dim: int, fill: int = 0) -> Tensor:
        """Split a dimension of rows into (sample, position)."""
        if self.outer == 1:
            return t.unflatten(dim, (self.samples, self.inner))
        shape = (self.outer, self.samples, self.inner)
        return t.unflatten(dim, shape).movedim(dim + 1, dim).flatten(dim + 1, dim + 2)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows in any order and number: nodes of graphs, sequences of several lengths, samples that an expert gets."""

    index: Tensor  # (B, T): the rows of each sample, and the number of all rows where it has fewer
    lengths: Tensor

    @classmethod
    def of(cls, owner: Tensor, batch: int) -> Ragged:
        """Return the pattern of rows with these owners; a row without one (-1) goes with the row before it."""
        rows = torch.arange(len(owner), device=owner.device)
        before = torch.where(owner < 0, -1, rows).cummax(0).values
        owner = torch.where(before < 0, 0, owner[before])
        order, lengths = owner.argsort(stable=True), torch.bincount(owner, minlength=batch)
        place = rows - (lengths.cumsum(0) - lengths)[owner[order]]
        index = owner.new_full((batch, max(1, int(lengths.max()))), len(owner))
        index[owner[order], place] = order
        return cls(index, lengths)

    def split(self, t: Tensor, dim: int, fill: int = 0) -> Tensor:
        """Split a dimension of rows into (sample, position); samples with fewer rows are filled up."""
        last = t.new_full((*t.shape[:dim], 1, *t.shape[dim + 1 :]), fill)
        return torch.cat([t, last], dim).index_select(dim, self.index.flatten()).unflatten(dim, self.index.shape)


Pattern = Regular | Ragged  # which rows belong to which sample


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a parameter: the node where it happens, and how the Jacobian follows from the gradients there."""

    node: Node
    name: str
    kind: str  # the kind of block that it needs: "rows", "columns", or "dense" where Jacobians are kept whole
    n_rows: int  # at the node
    # (gradients g (K, *output), pattern of the rows, whether a column for a bias is added) -> the Jacobian
    jacobian: Callable[[Tensor, Pattern, bool], BlockJacobian]
    bias: str | None = None  # the parameter that is added at this very node, to the same rows
    groups: int = 1
    takes_bias: bool = False  # whether a bias that is added right after it may join its block
    uses_all: bool = True  # whether all of the parameter is used
    patch_size: int = 0  # the size of the unfolded input, where it is unfolded
    own_rows: bool = False  # whether every output of the node belongs to one position, as in a product with a matrix
    table: int = 0  # rows of the table, where it is looked up
    remark: str = ""  # on how its Jacobian is kept, for reports

    @property
    def linear(self) -> bool:
        """Whether the parameter is used as a linear map."""
        return self.kind != "dense"


class ParameterOperand(NamedTuple):
    """A parameter among the operands of a node."""

    name: str
    parameter: Tensor
    moves: tuple[tuple[Node, Operation], ...]  # the nodes on the way to it that only move entries, nearest first
    edge: tuple[Node, int]  # the edge of the graph by which the node takes it


Sources = Mapping[int, ParameterOperand]  # the number of the operand -> the parameter
UseRule = Callable[[Node, Sources], Iterator[tuple[int, Use]]]


# The ways in which a node uses a parameter.


def matmul(node: Node, name: str, kind: str, rows: Factor, bias: str | None = None, part: Part | None = None) -> Use:
    """Return the use of W in rows @ W.T (kind "rows") or rows @ W (kind "columns").

    ``rows`` reads the rows that the node saved; ``part`` says which outputs are used, if not all are.
    """

    def jacobian(g: Tensor, pattern: Pattern, with_bias: bool) -> BlockJacobian:
        a, g = read_saved(rows(node)), pattern.split(g, 1)
        if part is not None:
            g = torch.nn.functional.pad(g, (part[0], part[2] - part[1]))
        if with_bias:
            a = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)
        return LinearJacobian(pattern.split(a, 0)[None], g[None], pattern.lengths)

    all_rows = part is None
    return Use(
        node, name, kind, output_shape(node)[0], jacobian, bias, takes_bias=all_rows, uses_all=all_rows,
        own_rows=all_rows,
    )  # fmt: skip


def convolution(node: Node, name: str, weight: Shape, bias: str | None) -> Use:
    """Return the use of the weight of a convolution: positions are output pixels, inputs are the patches below them."""
    shape, groups = output_shape(node), node._saved_groups

    def jacobian(g: Tensor, pattern: Pattern, with_bias: bool) -> BlockJacobian:
        x = read_saved(node._saved_input)
        patches = windows(x, weight[2:], node._saved_stride, node._saved_padding, node._saved_dilation)
        images, spatial = x.shape[0], g.shape[3:]
        count, dims = math.prod(spatial), len(spatial)
        # Inputs lie in memory as (G, Cin/G * k, N, T): one copy along rows of pixels, the bias's ones included, and
        # a Gram matrix over all positions needs no further one.
        width = math.prod(weight[1:])
        a = x.new_empty(groups, width + with_bias, images, count)
        patches = patches.unflatten(1, (groups, -1)).permute(
            1, 2, *range(3 + dims, 3 + 2 * dims), 0, *range(3, 3 + dims)
        )
        a[:, :width].view(groups, *weight[1:], images, *spatial).copy_(patches)
        if with_bias:
            a[:, width] = 1
        g = g.reshape(g.shape[0], images, groups, -1, count).permute(2, 0, 1, 4, 3)
        return _merge_positions(a.permute(0, 2, 3, 1), g, pattern)

    patch_size = math.prod(shape) // shape[1] * math.prod(weight[1:]) * groups
    return Use(node, name, "rows", shape[0], jacobian, bias, groups, patch_size=patch_size, own_rows=True)


def transposed_convolution(node: Node, name: str, weight: Shape) -> Use:
    """Return the use of the weight of a transposed convolution.

    Positions are input pixels, outputs are the patches above them.
    """
    groups = node._saved_groups

    def jacobian(g: Tensor, pattern: Pattern, with_bias: bool) -> BlockJacobian:
        x = read_saved(node._saved_input)
        images, spatial = x.shape[0], x.shape[2:]
        count, dims = math.prod(spatial), len(spatial)
        seeds = g.shape[0]
        above = windows(g.flatten(0, 1), weight[2:], node._saved_stride, node._saved_padding, node._saved_dilation)
        for dim, extent in enumerate(spatial):  # output_padding may add windows beyond the input
            above = above.narrow(2 + dim, 0, extent)
        above = above.unflatten(0, (seeds, images)).unflatten(2, (groups, -1))
        above = above.permute(2, 0, 1, *range(4, 4 + dims), 3, *range(4 + dims, 4 + 2 * dims))
        above = above.reshape(groups, seeds, images, count, -1)
        a = x.reshape(images, groups, -1, count).permute(1, 0, 3, 2)
        return _merge_positions(a, above, pattern)

    return Use(node, name, "columns", output_shape(node)[0], jacobian, groups=groups)


def lookup(node: Node, name: str, table: int, after: Node | None = None) -> Use:
    """Return the use of an embedding: positions pick rows of a table.

    If all samples share the rows that ``node`` picks, as positions of a text do, ``after`` is the node that broadcasts
    them over the samples: the gradients there belong to one sample each.
    """
    above = node if after is None else after

    def jacobian(g: Tensor, pattern: Pattern, with_bias: bool) -> BlockJacobian:
        indices = node._saved_indices.reshape(-1)
        g = g.reshape(g.shape[0], -1, g.shape[-1])
        g = pattern.split(g, 1)
        rows = pattern.split(indices.repeat(total // len(indices)), 0, fill=-1)
        real = (rows >= 0) & (rows != node._saved_padding_idx)  # autograd gives the padding row no gradient
        return LookupJacobian.build(rows, g, real, table)

    total = math.prod(output_shape(above)[:-1])
    return Use(above, name, "columns", total, jacobian, table=table, remark="embedding: indices, never one-hot")


def elementwise(
    node: Node, name: str, shape: Shape, factor: Factor | None = None, channel: bool = False, part: Part | None = None
) -> Use:
    """Return the use of a parameter that is added to or multiplied with every row: biases and scales of norms.

    ``factor`` reads from the node what the parameter is multiplied with; None for a sum. ``channel`` says that the
    parameter lies along dimension 1 and not along the trailing dimensions.
    """
    outputs = output_shape(node)

    def jacobian(g: Tensor, pattern: Pattern, with_bias: bool) -> BlockJacobian:
        if factor is not None:
            g = g * read_saved(factor(node))
        if channel:
            g = g.flatten(3).sum(-1) if g.ndim > 3 else g
            extents = shape[:1]
        else:
            extents = tuple(g.shape[g.ndim - len(shape) :])
        rows = math.prod(g.shape[1:]) // math.prod(extents)
        by_sample = pattern.split(g.reshape(g.shape[0], rows, *extents), 1)
        total = by_sample.sum(2) if by_sample.shape[2] != 1 else by_sample.squeeze(2)  # (K, B, *extents)
        broadcast = [i + 2 for i, (have, want) in enumerate(zip(extents, shape, strict=True)) if have != want]
        if broadcast and part is None:
            total = total.sum(broadcast)
        flat = total.flatten(2) if total.ndim > 2 else total.unsqueeze(-1)
        if part is not None:
            flat = torch.nn.functional.pad(flat, (part[0], part[2] - part[1]))
        return DenseJacobian(flat.transpose(0, 1))

    n_rows = outputs[0] if channel else math.prod(outputs[: len(outputs) - len(shape)])
    return Use(node, name, "dense", n_rows, jacobian, uses_all=part is None)


def windows(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """Return sliding windows (N, C, *out, *kernel) of x (N, C, *spatial), as a view of the padded input."""
    if any(padding):
        x = torch.nn.functional.pad(x, [p for extent in reversed(padding) for p in (extent, extent)])
    elif not x.is_contiguous():
        x = x.contiguous()
    spatial, steps = x.shape[2:], x.stride()[2:]
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(spatial, kernel, stride, dilation, strict=True)]
    between = (step * s for step, s in zip(steps, stride, strict=True))
    within = (step * d for step, d in zip(steps, dilation, strict=True))
    return x.as_strided((*x.shape[:2], *out, *kernel), (*x.stride()[:2], *between, *within), x.storage_offset())


def _merge_positions(a: Tensor, g: Tensor, pattern: Pattern) -> LinearJacobian:
    """Return the Jacobian from factors over (images, positions): those of one sample stand side by side."""
    lengths = None if pattern.lengths is None else pattern.lengths * a.shape[2]
    return LinearJacobian(pattern.split(a, 1).flatten(2, 3), pattern.split(g, 2).flatten(3, 4), lengths)


# Products with a weight.


def use_addmm(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the uses of bias and weight in bias + rows @ weight."""
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return
    bias = None
    if 0 in sources and sources[0].parameter.ndim == 1:
        added = broadcast(node, sources[0])
        if added is not None:
            yield 0, added
            bias = added.name if added.uses_all else None
    if 2 in sources and 1 not in sources:
        yield from _use_weight(node, sources, 2, attrgetter("_saved_mat1"), bias)


def use_mm(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the use of the weight in rows @ weight."""
    if 1 in sources and 0 not in sources:
        yield from _use_weight(node, sources, 1, attrgetter("_saved_self"), None)


def _use_weight(
    node: Node, sources: Sources, operand: int, rows: Factor, bias: str | None
) -> Iterator[tuple[int, Use]]:
    name, parameter, moves, edge = sources[operand]
    if parameter.ndim != 2:
        return
    changes = [facts for _, facts in moves if not facts.casts]
    if not changes:
        yield operand, matmul(node, name, "columns", rows, bias)
    elif len(changes) == 1 and changes[0].transposes:
        yield operand, matmul(node, name, "rows", rows, bias)
    else:
        part = used_rows(edge, parameter, output_shape(node)[1], transposed=True)
        if part is not None:
            yield operand, matmul(node, name, "rows", rows, part=part)


def use_convolution(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the uses of bias and weight in a convolution, transposed or not."""
    bias = None
    if 2 in sources and not sources[2].moves:
        bias = sources[2].name
        yield 2, elementwise(node, bias, tuple(sources[2].parameter.shape), channel=True)
    if 1 in sources and not sources[1].moves:
        name, shape = sources[1].name, tuple(sources[1].parameter.shape)
        if node._saved_transposed:
            yield 1, transposed_convolution(node, name, shape)
        else:
            yield 1, convolution(node, name, shape, bias)


def use_embedding(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the use of the table of an embedding."""
    if not sources[0].moves and not node._saved_sparse:
        yield 0, lookup(node, sources[0].name, len(sources[0].parameter))


# Sums, products, expansions and recurrent cells.


def use_add(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the use of a parameter that is added to every row."""
    if node._saved_alpha == 1 and len(sources) == 1:
        yield from use_expand(node, sources)


def use_expand(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the use of a parameter that every sample gets a copy of, such as the token of a class."""
    for operand, source in sources.items():
        use = broadcast(node, source)
        if use is not None:
            yield operand, use


def use_mul(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the use of a parameter that is multiplied with every row."""
    if len(sources) > 1:
        return
    for operand, source in sources.items():
        other = attrgetter("_saved_other" if operand == 0 else "_saved_self")
        use = broadcast(node, source, other) if other(node) is not None else None
        if use is not None:
            yield operand, use


def use_fused_cell(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the biases that a recurrent cell on a GPU adds to the gates itself: their gradient is that of the gates."""
    for operand in (3, 4):
        gates, number = node.next_functions[operand - 3]
        if operand in sources and not sources[operand].moves and gates is not None and number == 0:
            yield operand, elementwise(gates, sources[operand].name, tuple(sources[operand].parameter.shape))


# How a parameter reaches an operation: whole, reshaped, or some of its rows.


def broadcast(node: Node, source: ParameterOperand, factor: Factor | None = None) -> Use | None:
    """Return the use of a parameter that is broadcast against the rows of the output; None if it spans the batch.

    ``factor`` reads from the node what the parameter is multiplied with.
    """
    name, parameter, moves, edge = source
    out = output_shape(node)
    moves = tuple((move, facts) for move, facts in moves if not facts.casts)
    shape = tuple(parameter.shape)
    if moves and all(facts.reshapes for _, facts in moves):
        shape = output_shape(moves[0][0], edge[1])
    elif moves:
        if parameter.ndim != 1 or factor is not None:
            return None
        part = used_rows(edge, parameter, out[-1], transposed=False)
        return None if part is None else elementwise(node, name, (out[-1],), part=part)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return None if len(shape) >= len(out) else elementwise(node, name, shape, factor)


def used_rows(edge: tuple[Node, int], parameter: Tensor, width: int, transposed: bool) -> Part | None:
    """Return which consecutive rows of the parameter a moved copy of it holds, or None if it holds anything else.

    Moves only carry entries, so the backward pass through them, given positions in digits of base 128 (exact in every
    dtype), shows where each entry of the parameter went.
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


# Normalisations: their parameters, and the statistics by which they divide.


@dataclass(frozen=True, eq=False)
class NormStatistics:
    """The statistics by which a normalisation divides: those of its input, or running ones."""

    input: Tensor
    inverse_variance: float  # mean of one over the variance
    eps: float = 0.0  # where the node says it
    running: tuple[Tensor, Tensor] | None = None  # running mean and variance, if it divides by those


def scale_and_shift(factor: Factor, channel: bool = True) -> UseRule:
    """Return the rule for the parameters of a norm; ``factor`` reads from its node what the scale is multiplied with.

    ``channel`` says that they lie along dimension 1 and not along the trailing dimensions.
    """

    def rule(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
        for operand, (name, parameter, moves, _) in sources.items():
            if operand in (1, 2) and not moves:
                shape = tuple(parameter.shape)
                yield operand, elementwise(node, name, shape, factor if operand == 1 else None, channel)

    return rule


def use_batch_norm(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the uses of scale and shift of a BatchNorm in evaluation mode."""
    if not node._saved_training:
        yield from scale_and_shift(_normalise_batch)(node, sources)


def batch_norm_statistics(node: Node) -> NormStatistics | None:
    """Return the running statistics, if there are some."""
    mean, variance = node._saved_running_mean, node._saved_running_var
    if mean is None:
        return None
    inverse = float((1 / variance.clamp_min(1e-12)).mean())
    return NormStatistics(node._saved_input.detach(), inverse, batch_norm_eps(node), (mean, variance))


def own_statistics(node: Node) -> NormStatistics | None:
    """Return the statistics of a norm that divides by the variance of its own input."""
    return NormStatistics(node._saved_input.detach(), float(node._saved_result2.detach().square().mean()))


def batch_norm_eps(node: Node) -> float:
    """Return the eps that a BatchNorm adds to the variance; the node of cuDNN has another name for it."""
    eps: float = node._saved_epsilon if hasattr(node, "_saved_epsilon") else node._saved_eps
    return eps


def batch_norm_scale(node: Node) -> Tensor:
    """Return one over the standard deviation that a BatchNorm in evaluation mode divides by, (C,)."""
    scale: Tensor = (node._saved_running_var + batch_norm_eps(node)).rsqrt()
    return scale


# The input after normalisation and before the scale, in the shape of the input.


def _normalise_batch(node: Node) -> Tensor:
    x, mean, variance = node._saved_input, node._saved_running_mean, node._saved_running_var
    return torch.batch_norm(x, None, None, mean, variance, False, 0.0, batch_norm_eps(node), False)


def group_normalised(node: Node) -> Tensor:
    """Return the input of a GroupNorm, normalised."""
    x = node._saved_input
    grouped = x.reshape(x.shape[0], node._saved_group, -1)
    unit = _unit(grouped, node._saved_result1[..., None], node._saved_result2[..., None], (-1,))
    return unit.reshape(x.shape).to(x.dtype)


def layer_normalised(node: Node) -> Tensor:
    """Return the input of a LayerNorm, normalised."""
    x = node._saved_input
    dims = tuple(range(-len(node._saved_normalized_shape), 0))
    return _unit(x, node._saved_result1, node._saved_result2, dims).to(x.dtype)


def _unit(x: Tensor, mean: Tensor, scale: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return (x - mean) scale.

    Where gradients are recorded, mean and scale are computed again: those that a norm saves are detached from its
    input.
    """
    if not torch.is_grad_enabled():
        return (x - mean) * scale
    variance = x.var(dims, unbiased=False, keepdim=True)
    eps = scale.detach().square().reciprocal() - variance.detach()
    return (x - x.mean(dims, keepdim=True)) * (variance + eps).rsqrt()


# Operations that Lapwing refuses, or that forward mode sees in another way.


def embedding_not_derivative(node: Node) -> str:
    """Return why the gradient is not the derivative, or ""."""
    if not node._saved_scale_grad_by_freq:
        return ""
    return (
        "an embedding has scale_grad_by_freq=True, which divides its gradient by counts; expected the derivative. "
        "Set scale_grad_by_freq to False: the network stays the same."
    )


def checkpoint_hides(node: Node) -> str:
    """Say that the operations inside a checkpoint cannot be read."""
    return (
        "a part of the model runs under reentrant gradient checkpointing, which hides its operations; expected all of "
        "them in the graph. Switch it off, or use torch.utils.checkpoint.checkpoint, which Lapwing runs without."
    )


def embedding_forward_differs(node: Node) -> bool:
    """Return whether there is a padding row: its gradient is zero, but forward mode does not skip it."""
    return 0 <= node._saved_padding_idx < 2**63
