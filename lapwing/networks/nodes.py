"""Reading one node of an autograd graph: its shape, what it saved, and whether it is a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Node = Any  # torch.autograd.graph.Node
Shape = tuple[int, ...]
LEAF = "torch::autograd::AccumulateGrad"  # the name of a node that stands for a tensor, not for an operation


def output_shape(node: Node, number: int = 0) -> Shape:
    """Return the shape of one of a node's outputs."""
    return tuple(node._input_metadata[number].shape)


def leaf_name(node: Node, parameters: Mapping[int, str]) -> str | None:
    """Return the name of the parameter that this node stands for, or None. ``parameters`` maps ``id`` to name."""
    return parameters.get(id(node.variable)) if node.name() == LEAF else None


def saved(node: Node, name: str) -> Tensor:
    """Return a tensor that a node saved: part of the graph where gradients are recorded, otherwise detached."""
    tensor: Tensor = getattr(node, name)
    return tensor if torch.is_grad_enabled() else tensor.detach()


def signed(value: int) -> int:
    """Return a dimension as a signed number: autograd saves negative ones as unsigned 64-bit numbers.

    >>> signed(2**64 - 1), signed(3)
    (-1, 3)
    """
    return value - 2**64 if value >= 2**63 else value
