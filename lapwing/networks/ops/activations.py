"""Slopes of activations."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.networks.nodes import Node

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
