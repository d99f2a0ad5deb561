"""The facts about one autograd operation; ``ops.py`` has the table of all of them.

Everything that walks a graph asks ``operation(node)``. An operation without an entry is not an error: its gradient is
left to autograd, a probe decides which rows belong to which sample, and parameters that it uses go to the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor

from lapwing.networks.uses import Node, Shape, Use, output_shape

LEAF = "torch::autograd::AccumulateGrad"  # the name of a node that stands for a tensor, not for an operation
Keeps = Callable[[int, Node, int], bool]  # (operand, its node, which output of that node) -> rows are in the same order
Rows = Callable[[Node, Shape], Keeps | None]  # (node, output shape) -> which operands keep the order of the rows
Pull = Callable[[Node, Tensor, int], Tensor]  # (node, gradient (K, *output), operand) -> gradient (K, *operand)
# (node, gradients (K, *output) of its outputs, operands) -> gradients (K, *operand), which nobody else holds
JointPull = Callable[[Node, Sequence[Tensor | None], Sequence[int]], list[Tensor]]


class Source(NamedTuple):
    """A parameter among the operands of a node."""

    name: str
    parameter: Tensor
    moves: tuple[Node, ...]  # the nodes on the way to it that only move entries, nearest first
    edge: tuple[Node, int]  # the edge of the graph by which the node takes it


Sources = Mapping[int, Source]  # the number of the operand -> the parameter
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
