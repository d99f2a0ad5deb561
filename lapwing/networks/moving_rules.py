"""How gradients are pulled back through operations that pick, split and join tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lapwing.networks.operation import LEAF, NoRuleError, signed
from lapwing.networks.uses import Node, output_shape


def select(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient at the one entry along a dimension that was picked, and zeros elsewhere."""
    sizes = tuple(node._saved_self_sym_sizes)
    whole = grad.new_zeros(len(grad), *sizes)
    whole.select(signed(node._saved_dim) % len(sizes) + 1, signed(node._saved_index)).copy_(grad)
    return whole


def part(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient at the entries along a dimension that were picked, and zeros elsewhere."""
    sizes = tuple(node._saved_self_sym_sizes)
    dim = signed(node._saved_dim) % len(sizes)
    places = range(sizes[dim])[slice(signed(node._saved_start), signed(node._saved_end), node._saved_step)]
    if len(places) == sizes[dim]:
        return grad
    whole = grad.new_zeros(len(grad), *sizes)
    index = torch.arange(places.start, places.stop, places.step, device=grad.device)
    return whole.index_copy_(dim + 1, index, grad)


def split(node: Node, grads: Sequence[Tensor | None], operands: Sequence[int]) -> list[Tensor]:
    """Return the gradients of all parts, joined again; zeros for a part that nothing was made of."""
    ndim = len(output_shape(node))
    return [torch.cat(_filled(node, grads), signed(node._saved_dim) % ndim + 1)]


def unbind(node: Node, grads: Sequence[Tensor | None], operands: Sequence[int]) -> list[Tensor]:
    """Return the gradients of all entries along a dimension, stacked again."""
    ndim = len(output_shape(node)) + 1
    return [torch.stack(_filled(node, grads), signed(node._saved_dim) % ndim + 1)]


def _filled(node: Node, grads: Sequence[Tensor | None]) -> list[Tensor]:
    like = next(grad for grad in grads if grad is not None)
    pairs = enumerate(grads)
    return [like.new_zeros(len(like), *output_shape(node, i)) if grad is None else grad for i, grad in pairs]


def cat(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the part of the gradient that belongs to one of the joined tensors."""
    dim = signed(node._saved_dim) % (grad.ndim - 1)
    sizes = [_size(child, number, dim) for child, number in node.next_functions]
    unknown = [i for i, size in enumerate(sizes) if size < 0]  # constants, of which the graph says nothing
    if len(unknown) > 1:
        raise NoRuleError(node.name())
    if unknown:
        sizes[unknown[0]] = grad.shape[dim + 1] - sum(size for size in sizes if size >= 0)
    return grad.narrow(dim + 1, sum(sizes[:operand]), sizes[operand])


def stack(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the part of the gradient that belongs to one of the stacked tensors."""
    return grad.select(signed(node._saved_dim) % (grad.ndim - 1) + 1, operand)


def _size(node: Node | None, number: int, dim: int) -> int:
    """Return the size of an operand along a dimension; -1 if the graph does not know it."""
    if node is None:
        return -1
    shape = tuple(node.variable.shape) if node.name() == LEAF else output_shape(node, number)
    return shape[dim]


def upsample_nearest(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of an enlarged image, added up over the copies of each pixel, seeds folded into the batch."""
    sizes = list(node._saved_self_sym_sizes)
    back = torch.ops.aten.upsample_nearest2d_backward(
        grad.flatten(0, 1), node._saved_output_size, [math.prod(grad.shape[:2]), *sizes[1:]],
        node._saved_scales_h, node._saved_scales_w,
    )  # fmt: skip
    return back.unflatten(0, grad.shape[:2])
