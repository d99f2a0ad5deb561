"""Gradients of operations that change shapes, and of sums and means."""

from __future__ import annotations

import math

from torch import Tensor

from lapwing.networks.nodes import Node, output_shape, signed


def view(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the shape of the operand."""
    return grad.reshape(grad.shape[0], *node._saved_self_sym_sizes)


def same(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient as it is."""
    return grad


def unsqueeze(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient without the added dimension."""
    return grad.squeeze(signed(node._saved_dim) % (grad.ndim - 1) + 1)


def transpose(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient with the two dimensions swapped back."""
    ndim = grad.ndim - 1
    return grad.transpose(signed(node._saved_dim0) % ndim + 1, signed(node._saved_dim1) % ndim + 1)


def permute(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient with its dimensions in their old order."""
    ndim = grad.ndim - 1
    dims = [signed(d) % ndim for d in node._saved_dims]
    inverse = [dims.index(i) + 1 for i in range(ndim)]
    return grad.permute(0, *inverse)


def total(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of a sum, expanded over the dimensions that were summed."""
    shape = tuple(node._saved_self_sym_sizes)
    if not node._saved_keepdim:
        dims = sorted(signed(d) % len(shape) for d in node._saved_dim)
        for dim in dims:
            grad = grad.unsqueeze(dim + 1)
    return grad.expand(grad.shape[0], *shape)


def mean(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of a mean."""
    shape = tuple(node._saved_self_sym_sizes)
    return total(node, grad, operand) / (math.prod(shape) / max(1, math.prod(output_shape(node))))
