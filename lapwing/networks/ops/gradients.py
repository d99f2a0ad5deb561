"""Ways to pull the gradients of K seeds back through a node: four leaves of ``Gradient``.

They differ in who holds the tensor that they return. A gradient that nobody else holds is multiplied in place: at these
sizes a new tensor costs more than the product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lapwing.networks.nodes import Node

Pull = Callable[[Node, Tensor, int], Tensor]  # (node, gradient (K, *output), operand) -> gradient (K, *operand)


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
