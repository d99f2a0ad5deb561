"""Gradients of pooling in two dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.networks.nodes import Node

aten = torch.ops.aten


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
