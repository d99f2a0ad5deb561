"""The ways in which a network uses a parameter, and the facts about one autograd operation.

Each function here returns a ``Use``: from the gradients at the output of a graph node it gives the Jacobian of the
parameter, sample by sample.

The facts about one autograd operation; ``ops.py`` has the table of all of them.

Everything that walks a graph asks ``operation(node)``. An operation without an entry is not an error: its gradient is
left to autograd, a probe decides which rows belong to which sample, and parameters that it uses go to the fallback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from lapwing.networks.dense_jacobian import DenseJacobian, LookupJacobian
from lapwing.networks.jacobians import BlockJacobian
from lapwing.networks.linear_jacobian import LinearJacobian

Node = Any  # torch.autograd.graph.Node
Shape = tuple[int, ...]
Part = tuple[int, int, int]  # first and last row of the parameter that is used, and how many rows it has
Factor = Callable[[Node], Tensor]


def output_shape(node: Node, number: int = 0) -> Shape:
    """Return the shape of one of a node's outputs; () for a nested tensor, which has none."""
    try:
        return tuple(node._input_metadata[number].shape)
    except RuntimeError:
        return ()


def output_numbers(node: Node, number: int = 0) -> int:
    """Return how many numbers an output of a node has; ragged dimensions, without a size, are left out."""
    return math.prod(n for n in output_shape(node, number) if type(n) is int)


def saved(tensor: Tensor) -> Tensor:
    """Return a tensor that a node saved: part of the graph where gradients are recorded, otherwise detached."""
    return tensor if torch.is_grad_enabled() else tensor.detach()


class Pattern(Protocol):
    """Which rows belong to which sample."""

    @property
    def lengths(self) -> Tensor | None:
        """The number of rows of each sample, (B,); None if all have the same."""
        ...

    def split(self, t: Tensor, dim: int, fill: int = 0) -> Tensor:
        """Split a dimension of rows into (sample, position); samples with fewer rows are filled up."""
        ...


@dataclass(frozen=True)
class Regular:
    """Rows that run over (outer, sample, inner), as many for each sample."""

    outer: int
    samples: int
    inner: int
    lengths: ClassVar[None] = None

    def split(self, t: Tensor, dim: int, fill: int = 0) -> Tensor:
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
        last = t.new_full((*t.shape[:dim], 1, *t.shape[dim + 1 :]), fill)
        return torch.cat([t, last], dim).index_select(dim, self.index.flatten()).unflatten(dim, self.index.shape)


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
    whole: bool = True  # whether all of the parameter is used
    patch_size: int = 0  # the size of the unfolded input, where it is unfolded
    own_rows: bool = False  # whether every output of the node belongs to one position, as in a product with a matrix
    table: int = 0  # rows of the table, where it is looked up
    remark: str = ""  # on how its Jacobian is kept, for reports

    @property
    def linear(self) -> bool:
        """Whether the parameter is used as a linear map."""
        return self.kind != "dense"


def matmul(node: Node, name: str, kind: str, rows: Factor, bias: str | None = None, part: Part | None = None) -> Use:
    """Return the use of W in rows @ W.T (kind "rows") or rows @ W (kind "columns").

    ``rows`` reads the rows that the node saved; ``part`` says which outputs are used, if not all are.
    """

    def jacobian(g: Tensor, pattern: Pattern, with_bias: bool) -> BlockJacobian:
        a, g = saved(rows(node)), pattern.split(g, 1)
        if part is not None:
            g = torch.nn.functional.pad(g, (part[0], part[2] - part[1]))
        if with_bias:
            a = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)
        return LinearJacobian(pattern.split(a, 0)[None], g[None], pattern.lengths)

    all_rows = part is None
    return Use(
        node, name, kind, output_shape(node)[0], jacobian, bias, takes_bias=all_rows, whole=all_rows, own_rows=all_rows
    )


def convolution(node: Node, name: str, weight: Shape, bias: str | None) -> Use:
    """Return the use of the weight of a convolution: positions are output pixels, inputs are the patches below them."""
    shape, groups = output_shape(node), node._saved_groups

    def jacobian(g: Tensor, pattern: Pattern, with_bias: bool) -> BlockJacobian:
        x = saved(node._saved_input)
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
        return _merged(a.permute(0, 2, 3, 1), g, pattern)

    patch_size = math.prod(shape) // shape[1] * math.prod(weight[1:]) * groups
    return Use(node, name, "rows", shape[0], jacobian, bias, groups, patch_size=patch_size, own_rows=True)


def transposed_convolution(node: Node, name: str, weight: Shape) -> Use:
    """Return the use of the weight of a transposed convolution.

    Positions are input pixels, outputs are the patches above them.
    """
    groups = node._saved_groups

    def jacobian(g: Tensor, pattern: Pattern, with_bias: bool) -> BlockJacobian:
        x = saved(node._saved_input)
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
        return _merged(a, above, pattern)

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
            g = g * saved(factor(node))
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
    return Use(node, name, "dense", n_rows, jacobian, whole=part is None)


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


def _merged(a: Tensor, g: Tensor, pattern: Pattern) -> LinearJacobian:
    """Return the Jacobian from factors over (images, positions): those of one sample stand side by side."""
    lengths = None if pattern.lengths is None else pattern.lengths * a.shape[2]
    return LinearJacobian(pattern.split(a, 1).flatten(2, 3), pattern.split(g, 2).flatten(3, 4), lengths)


LEAF = "torch::autograd::AccumulateGrad"  # the name of a node that stands for a tensor, not for an operation
Keeps = Callable[[int, Node, int], bool]  # (operand, its node, which output of that node) -> rows are in the same order
Rows = Callable[[Node, Shape], Keeps | None]  # (node, output shape) -> which operands keep the order of the rows
Pull = Callable[[Node, Tensor, int], Tensor]  # (node, gradient (K, *output), operand) -> gradient (K, *operand)
# (node, gradients (K, *output) of its outputs, operands) -> gradients (K, *operand), which nobody else holds
JointPull = Callable[[Node, Sequence[Tensor | None], Sequence[int]], list[Tensor]]


class ParameterOperand(NamedTuple):
    """A parameter among the operands of a node."""

    name: str
    parameter: Tensor
    moves: tuple[Node, ...]  # the nodes on the way to it that only move entries, nearest first
    edge: tuple[Node, int]  # the edge of the graph by which the node takes it


Sources = Mapping[int, ParameterOperand]  # the number of the operand -> the parameter
UseRule = Callable[[Node, Sources], Iterator[tuple[int, Use]]]


class Gradient(Protocol):
    """A way to pull the gradients of K seeds back through a node."""

    def pull(self, node: Node, grad: Tensor, operand: int, owned: bool) -> tuple[Tensor, bool]:
        """Return the gradient (K, *operand) for ``grad`` (K, *output), and whether nobody else holds that tensor.

        ``owned`` says the same of ``grad``: an owned gradient may be changed in place.
        """
        ...


@dataclass(frozen=True, eq=False)
class NormStatistics:
    """The statistics by which a normalisation divides: those of its input, or running ones."""

    input: Tensor
    inverse_variance: float  # mean of one over the variance
    eps: float = 0.0  # where the node says it
    running: tuple[Tensor, Tensor] | None = None  # running mean and variance, if it divides by those


@dataclass(frozen=True)
class Operation:
    """The facts about one autograd operation. Every field but the name is optional.

    Args:
        name: the name of its node, such as ``"TanhBackward0"``.
        reshapes: it keeps all entries in their order; only the shape or the dtype changes.
        moves: it only moves entries, so a parameter that passes through it is still that parameter.
        transposes: it swaps the two dimensions of a matrix.
        casts: it changes the dtype alone.
        adds: it adds its two operands.
        expands: it repeats its operand along further dimensions, without a copy.
        looks_up: it picks rows of a table.
        data_operand: the only operand whose rows belong to samples (the input of a product with a weight).
        rows: which operands have their rows in the order of the output's rows, such as ``row_wise``.
        gradient: how the gradients of K seeds are pulled back: ``Slope``, ``New``, ``View`` or ``Expanded``.
        joint_gradient: the same for an operation with several outputs, or whose operands share work.
        uses: how it uses the parameters among its operands.
        norm: the statistics of a normalisation.
        seed_by_seed: whether autograd must take one seed at a time here, given the node and whether it is on a CPU.
        not_derivative: why its gradient is not its derivative, or "".
        forward_differs: whether forward mode disagrees with the gradient.
    """

    name: str
    reshapes: bool = False
    moves: bool = False
    transposes: bool = False
    casts: bool = False
    adds: bool = False
    expands: bool = False
    looks_up: bool = False
    data_operand: int | None = None
    rows: Rows | None = None
    gradient: Gradient | None = None
    joint_gradient: JointPull | None = None
    uses: UseRule | None = None
    norm: Callable[[Node], NormStatistics | None] = lambda node: None
    seed_by_seed: Callable[[Node, bool], bool] = lambda node, on_cpu: False
    not_derivative: Callable[[Node], str] = lambda node: ""
    forward_differs: Callable[[Node], bool] = lambda node: False

    @cached_property
    def carries_parameter(self) -> bool:
        """Whether a parameter may pass through it and still be that parameter."""
        return self.reshapes or self.moves

    @cached_property
    def has_gradient(self) -> bool:
        """Whether the gradients of several seeds can be pulled back through it together."""
        return self.gradient is not None or self.joint_gradient is not None

    @cached_property
    def follows_shapes(self) -> bool:
        """Whether shapes alone decide where rows go, so that one probe for each shape is enough."""
        return self.reshapes or self.data_operand is not None or self.rows is not None

    def keeps(self, node: Node, shape: Shape, batch: int) -> Keeps | None:
        """Return which operands are batch-major if the output, of ``shape``, is; None if none is known to be."""
        if self.reshapes:
            return lambda operand, child, number: True
        if not shape or shape[0] % batch:
            return None
        if self.data_operand is not None:
            return lambda operand, child, number: operand == self.data_operand and n_rows(child, number) == shape[0]
        return None if self.rows is None else self.rows(node, shape)


def n_rows(node: Node, number: int) -> int:
    """Return the first dimension of a node's output, or -1 for a parameter or a single number."""
    if node.name() == LEAF:
        return -1
    shape = output_shape(node, number)
    return shape[0] if shape else -1


_UNKNOWN = Operation("unknown")
_TABLE: dict[str, Operation] = {}


def operation(node: Node) -> Operation:
    """Return the facts about a node's operation; without an entry, an operation of which nothing is known."""
    return _TABLE.get(node.name(), _UNKNOWN)


def register(*operations: Operation) -> None:
    """Add operations to the table; an entry of the same name is replaced.

    Args:
        operations: the facts about each operation.

    Names are those of nodes in the graph, ``output.grad_fn.name()``. Without an entry a network gives the same numbers,
    only slower. An entry is not checked: compare it with autograd.

    >>> import torch
    >>> from lapwing.networks.ops import Operation, Slope, operation, register, row_wise
    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> torch.sinh(x).grad_fn.name()
    'SinhBackward0'
    >>> register(Operation("SinhBackward0", rows=row_wise, gradient=Slope(lambda node: node._saved_self.cosh())))
    >>> operation(torch.sinh(x).grad_fn).rows is row_wise
    True
    """
    _TABLE.update({entry.name: entry for entry in operations})


def entries() -> Mapping[str, Operation]:
    """Return all entries by name."""
    return dict(_TABLE)


# How the rows of samples pass through an operation. A node's output is batch-major where sample b owns the b-th
# contiguous share of its rows. Each rule takes a node with a batch-major output and says which of its operands are
# batch-major too; None means that none is known to be, and that a probe must decide. A rule that says less than is true
# costs a probe and never gives a wrong number.


def row_wise(node: Node, shape: Shape) -> Keeps | None:
    """Keep operands with as many rows and dimensions: each entry, or each row, is handled without the others.

    An operand with fewer dimensions was broadcast over the batch.
    """
    return lambda operand, child, number: (
        n_rows(child, number) == shape[0] and len(output_shape(child, number)) == len(shape)
    )


def along(*fields: str) -> Rows:
    """Return the rule of an operation that works along the dimensions that a node saved in these fields."""

    def rule(node: Node, shape: Shape) -> Keeps | None:
        if 0 in _dimensions(node, fields, len(shape)):
            return None
        return lambda operand, child, number: n_rows(child, number) == shape[0]

    return rule


def permuted(node: Node, shape: Shape) -> Keeps | None:
    """Keep the operand if the first dimension stays the first."""
    return (lambda operand, child, number: True) if signed(node._saved_dims[0]) in (0, -len(shape)) else None


def normalised_rows(node: Node, shape: Shape) -> Keeps | None:
    """Keep the data of a LayerNorm that does not normalise over the first dimension."""
    data_alone = len(node._saved_normalized_shape) < len(shape)
    return (lambda operand, child, number: operand == 0) if data_alone else None


def reordered(node: Node, shape: Shape) -> Keeps | None:
    """Keep nothing: rows are moved, but in a way that depends on shapes and not on numbers."""
    return None


def _dimensions(node: Node, fields: tuple[str, ...], ndim: int) -> set[int]:
    dimensions: set[int] = set()
    for field in fields:
        value = getattr(node, "_saved_" + field)
        for unsigned in value if isinstance(value, tuple | list) else (value,):
            dim = signed(unsigned)
            # A dimension that the node removes counts from the larger shape, so a negative one is read against both.
            dimensions |= {dim} if dim >= 0 else {dim + ndim, dim + ndim + 1}
    return dimensions


def signed(value: int) -> int:
    """Return a dimension as a signed number: autograd saves negative ones as unsigned 64-bit numbers.

    >>> signed(2**64 - 1), signed(3)
    (-1, 3)
    """
    return value - 2**64 if value >= 2**63 else value


# Ways to pull the gradients of K seeds back through a node: four leaves of ``Gradient``. They differ in who holds the
# tensor that they return. A gradient that nobody else holds is multiplied in place: at these sizes a new tensor costs
# more than the product.


class NoRuleError(Exception):
    """A node that must be left to autograd."""


@dataclass(frozen=True)
class Slope:
    """An operation on each entry: its slope, shaped like the output and the same for every seed."""

    slope: Callable[[Node], Tensor]

    def pull(self, node: Node, grad: Tensor, operand: int, owned: bool) -> tuple[Tensor, bool]:
        slope = self.slope(node)
        return (grad.mul_(slope) if owned else grad * slope), True


@dataclass(frozen=True)
class New:
    """A function that returns a new tensor."""

    function: Pull

    def pull(self, node: Node, grad: Tensor, operand: int, owned: bool) -> tuple[Tensor, bool]:
        return self.function(node, grad, operand), True


@dataclass(frozen=True)
class View:
    """A function that may return the tensor it was given, or a view of it."""

    function: Pull

    def pull(self, node: Node, grad: Tensor, operand: int, owned: bool) -> tuple[Tensor, bool]:
        return self.function(node, grad, operand), owned and len(node.next_functions) == 1


@dataclass(frozen=True)
class Expanded:
    """A function that returns a view in which several entries share memory: never to be changed in place."""

    function: Pull

    def pull(self, node: Node, grad: Tensor, operand: int, owned: bool) -> tuple[Tensor, bool]:
        return self.function(node, grad, operand), False
