"""How the rows of samples pass through an operation.

A node's output is batch-major where sample b owns the b-th contiguous share of its rows. Each rule here takes a node
with a batch-major output and says which of its operands are batch-major too; None means that none is known to be, and
that a probe must decide. Calling an operand mixed that is not costs a probe and never gives a wrong number.
"""

from __future__ import annotations

from lapwing.networks.nodes import Node, Shape, output_shape, signed
from lapwing.networks.ops.entry import Keeps, Rows, n_rows


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
    return _any_operand if signed(node._saved_dims[0]) in (0, -len(shape)) else None


def normalised_rows(node: Node, shape: Shape) -> Keeps | None:
    """Keep the data of a LayerNorm that does not normalise over the first dimension."""
    return _first_operand if len(node._saved_normalized_shape) < len(shape) else None


def reordered(node: Node, shape: Shape) -> Keeps | None:
    """Keep nothing: rows are moved, but in a way that depends on shapes and not on numbers."""
    return None


def _any_operand(operand: int, child: Node, number: int) -> bool:
    return True


def _first_operand(operand: int, child: Node, number: int) -> bool:
    return operand == 0


def _dimensions(node: Node, fields: tuple[str, ...], ndim: int) -> set[int]:
    dimensions: set[int] = set()
    for field in fields:
        value = getattr(node, "_saved_" + field)
        for unsigned in value if isinstance(value, tuple | list) else (value,):
            dim = signed(unsigned)
            # A dimension that the node removes counts from the larger shape, so a negative one is read against both.
            dimensions |= {dim} if dim >= 0 else {dim + ndim, dim + ndim + 1}
    return dimensions
