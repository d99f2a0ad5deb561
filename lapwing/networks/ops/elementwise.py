"""Activations, sums and products of two tensors: their gradients, and how they use a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter

import torch
from torch import Tensor

from lapwing.networks.forms import Elementwise, Node, Use
from lapwing.networks.ops.linear import broadcast_form
from lapwing.networks.ops.operation import Sources

aten = torch.ops.aten


def relu(node: Node) -> Tensor:
    """Return where the output is positive."""
    return node._saved_result > 0


def tanh(node: Node) -> Tensor:
    """Return the slope of tanh."""
    return 1 - node._saved_result.square()


def sigmoid(node: Node) -> Tensor:
    """Return the slope of the logistic function."""
    return node._saved_result * (1 - node._saved_result)


def gelu(node: Node) -> Tensor:
    """Return the slope of GELU, exact or approximate as the node has it."""
    return aten.gelu_backward(_ones(node), node._saved_self, approximate=node._saved_approximate)


def silu(node: Node) -> Tensor:
    """Return the slope of SiLU."""
    return aten.silu_backward(_ones(node), node._saved_self)


def leaky_relu(node: Node) -> Tensor:
    """Return the slope of a leaky ReLU."""
    return aten.leaky_relu_backward(_ones(node), node._saved_self, node._saved_negative_slope, False)


def _ones(node: Node) -> Tensor:
    """Return ones: the slope of an activation is its gradient for them."""
    return torch.ones_like(node._saved_self)


def pull_add(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of a sum."""
    return grad if operand == 0 or node._saved_alpha == 1 else grad * node._saved_alpha


def pull_mul(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient times the other factor."""
    return grad * (node._saved_other if operand == 0 else node._saved_self)


def use_add(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    """Yield the use of a parameter that is added to every row."""
    if node._saved_alpha != 1 or len(sources) > 1:
        return
    for operand in sources:
        form = broadcast_form(operand, node, sources, tensors)
        if form is not None:
            yield operand, Use(node, sources[operand][0], form)


def use_mul(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    """Yield the use of a parameter that is multiplied with every row."""
    if len(sources) > 1:
        return
    for operand in sources:
        other = attrgetter("_saved_other" if operand == 0 else "_saved_self")
        form = broadcast_form(operand, node, sources, tensors, other) if other(node) is not None else None
        if form is not None:
            yield operand, Use(node, sources[operand][0], form)


def use_fused_cell(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    """Yield the biases that a recurrent cell on a GPU adds to the gates itself: their gradient is that of the gates."""
    for operand in (3, 4):
        gates, number = node.next_functions[operand - 3]
        if operand in sources and not sources[operand][1] and gates is not None and number == 0:
            name = sources[operand][0]
            yield operand, Use(gates, name, Elementwise(tuple(tensors[name].shape)))
