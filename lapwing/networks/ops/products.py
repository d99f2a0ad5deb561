"""Matrix products: their gradients, and how they use a weight and a bias."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from lapwing.networks.forms import Matmul, Use
from lapwing.networks.nodes import Node, output_shape
from lapwing.networks.ops.entry import Sources, operation
from lapwing.networks.ops.gradients import NoRuleError
from lapwing.networks.ops.parameters import elementwise, used_rows


def pull_addmm(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the rows of a product with a bias."""
    if operand != 1 or node._saved_alpha != 1:
        raise NoRuleError("AddmmBackward0")
    return grad @ node._saved_mat2.mT


def pull_mm(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the rows of a product."""
    if operand != 0:
        raise NoRuleError("MmBackward0")
    return grad @ node._saved_mat2.mT


def use_addmm(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    """Yield the uses of bias and weight in bias + rows @ weight."""
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return
    bias = None
    form = elementwise(0, node, sources, tensors) if 0 in sources else None
    if form is not None and tensors[sources[0][0]].ndim == 1:
        yield 0, Use(node, sources[0][0], form)
        bias = sources[0][0] if form.part is None else None
    if 2 in sources and 1 not in sources:
        yield from _use_weight(2, "_saved_mat1", node, sources, tensors, bias)


def use_mm(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    """Yield the use of the weight in rows @ weight."""
    if 1 in sources and 0 not in sources:
        yield from _use_weight(1, "_saved_self", node, sources, tensors, None)


def _use_weight(
    operand: int, saved: str, node: Node, sources: Sources, tensors: Mapping[str, Tensor], bias: str | None
) -> Iterator[tuple[int, Use]]:
    name, moves, edge = sources[operand]
    parameter = tensors[name]
    if parameter.ndim != 2:
        return
    moved = [move for move in map(operation, moves) if not move.casts]
    if not moved:
        yield operand, Use(node, name, Matmul("columns", saved), bias)
    elif len(moved) == 1 and moved[0].transposes:
        yield operand, Use(node, name, Matmul("rows", saved), bias)
    else:
        part = used_rows(edge, parameter, output_shape(node)[1], transposed=True)
        if part is not None:
            yield operand, Use(node, name, Matmul("rows", saved, part))
