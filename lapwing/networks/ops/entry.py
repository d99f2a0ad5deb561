"""The facts about one autograd operation, and the table of all of them.

Everything that walks a graph asks ``operation(node)``. An operation without an entry is not an error: its gradient is
left to autograd, a probe decides which rows belong to which sample, and parameters that it uses go to the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from lapwing.networks.forms import Use
from lapwing.networks.nodes import LEAF, Node, Shape, output_shape

Keeps = Callable[[int, Node, int], bool]  # (operand, its node, which output of that node) -> rows are in the same order
Rows = Callable[[Node, Shape], Keeps | None]  # (node, output shape) -> which operands keep the order of the rows
# Operands that are parameters: number of the operand -> (name, nodes on the way to it, edge of the graph)
Sources = Mapping[int, tuple[str, tuple[Node, ...], tuple[Node, int]]]
UseRule = Callable[[Node, Sources, Mapping[str, Tensor]], Iterator[tuple[int, Use]]]


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
        data_operand: the only operand whose rows belong to samples (the input of a product with a weight).
        rows: which operands have their rows in the order of the output's rows; see ``rows.py``.
        gradient: how the gradients of K seeds are pulled back; see ``gradients.py``.
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
    data_operand: int | None = None
    rows: Rows | None = None
    gradient: Gradient | None = None
    uses: UseRule | None = None
    norm: Callable[[Node], NormStatistics | None] | None = None
    seed_by_seed: Callable[[Node, bool], bool] | None = None
    not_derivative: Callable[[Node], str] | None = None
    forward_differs: Callable[[Node], bool] | None = None

    @cached_property
    def carries_parameter(self) -> bool:
        """Whether a parameter may pass through it and still be that parameter."""
        return self.reshapes or self.moves

    @cached_property
    def follows_shapes(self) -> bool:
        """Whether shapes alone decide where rows go, so that one probe for each shape is enough."""
        return self.reshapes or self.data_operand is not None or self.rows is not None

    def keeps(self, node: Node, shape: Shape, batch: int) -> Keeps | None:
        """Return which operands are batch-major if the output, of ``shape``, is; None if none is known to be."""
        if self.reshapes:
            return _always
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


def operation_named(name: str) -> Operation:
    """Return the facts about the operation of this name, where the name of a node is at hand."""
    return _TABLE.get(name, _UNKNOWN)


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


def _always(operand: int, node: Node, number: int) -> bool:
    return True
