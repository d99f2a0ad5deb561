"""Gradients of operations that change shapes, of sums and means, and of pooling in two dimensions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.networks.forms import Node, output_shape
from lapwing.networks.ops.operation import signed

aten = torch.ops.aten


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


def max_pool(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient, added up where windows share a maximum."""
    x, index = node._saved_self, node._saved_result1
    flat = grad.new_zeros(grad.shape[0], *x.shape[:-2], x.shape[-2] * x.shape[-1])
    flat.scatter_add_(-1, index.flatten(-2).expand(grad.shape[0], *index.shape[:-2], -1), grad.flatten(-2))
    return flat.unflatten(-1, x.shape[-2:])


def adaptive_pool(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of an adaptive average."""
    x = node._saved_self
    blank = grad.new_empty(1).expand(grad.shape[0] * x.shape[0], *x.shape[1:])
    return aten._adaptive_avg_pool2d_backward(grad.flatten(0, 1), blank).unflatten(0, grad.shape[:2])


def average_pool(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of an average over windows."""
    x = node._saved_self
    blank = grad.new_empty(1).expand(grad.shape[0] * x.shape[0], *x.shape[1:])
    back = aten.avg_pool2d_backward(
        grad.flatten(0, 1).contiguous(), blank.contiguous(), node._saved_kernel_size, node._saved_stride,
        node._saved_padding, node._saved_ceil_mode, node._saved_count_include_pad, node._saved_divisor_override,
    )  # fmt: skip
    return back.unflatten(0, grad.shape[:2])
