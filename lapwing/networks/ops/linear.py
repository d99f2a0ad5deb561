"""Matrix products, convolutions and embeddings: their gradients, and how they use a weight and a bias."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.networks.forms import (
    Convolution,
    Elementwise,
    Factor,
    Form,
    Lookup,
    Matmul,
    Node,
    Part,
    TransposedConvolution,
    Use,
    output_shape,
)
from lapwing.networks.ops.operation import NoRuleError, Sources, operation


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
    form = broadcast_form(0, node, sources, tensors) if 0 in sources else None
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


def pull_convolution(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the images, all seeds folded into the batch."""
    if operand != 0:
        raise NoRuleError("ConvolutionBackward0")
    weight, x = node._saved_weight, node._saved_input
    folded = grad.flatten(0, 1)
    if folded.is_cpu and folded.dtype in (torch.bfloat16, torch.float16):  # 16-bit kernels crash some processes
        folded, weight = folded.float(), weight.float()
    blank = folded.new_empty(1).expand(folded.shape[0], *x.shape[1:])  # only its shape is read
    back = torch.ops.aten.convolution_backward(
        folded, blank, weight, None, node._saved_stride, node._saved_padding, node._saved_dilation,
        node._saved_transposed, node._saved_output_padding, node._saved_groups, (True, False, False),
    )[0]  # fmt: skip
    return back.to(grad.dtype).unflatten(0, grad.shape[:2])


def use_convolution(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    """Yield the uses of bias and weight in a convolution, transposed or not."""
    transposed = node._saved_transposed
    bias = None
    if 2 in sources and not sources[2][1]:
        bias = sources[2][0]
        yield 2, Use(node, bias, Elementwise(tuple(tensors[bias].shape), channel=True))
    if 1 in sources and not sources[1][1]:
        form: Form = TransposedConvolution() if transposed else Convolution()
        yield 1, Use(node, sources[1][0], form, None if transposed else bias, node._saved_groups)


def convolution_seed_by_seed(node: Node, on_cpu: bool) -> bool:
    """Return whether autograd is faster one seed at a time: batched convolutions are slow on a CPU."""
    return on_cpu


def use_embedding(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    """Yield the use of the table of an embedding."""
    name, moves, _ = sources[0]
    if not moves and not node._saved_sparse:
        yield 0, Use(node, name, Lookup(tensors[name].shape[0]))


def embedding_seed_by_seed(node: Node, on_cpu: bool) -> bool:
    """Return whether the gradient is sparse, which autograd cannot batch."""
    return bool(node._saved_sparse)


def embedding_not_derivative(node: Node) -> str:
    """Return why the gradient is not the derivative, or ""."""
    if not node._saved_scale_grad_by_freq:
        return ""
    return (
        "an embedding has scale_grad_by_freq=True, which divides its gradient by counts; expected the derivative. "
        "Set scale_grad_by_freq to False: the network stays the same."
    )


def embedding_forward_differs(node: Node) -> bool:
    """Return whether there is a padding row: its gradient is zero, but forward mode does not skip it."""
    return 0 <= node._saved_padding_idx < 2**63


# How a parameter reaches an operation: whole, reshaped, or some of its rows.


def broadcast_form(
    operand: int, node: Node, sources: Sources, tensors: Mapping[str, Tensor], factor: Factor | None = None
) -> Elementwise | None:
    """Return the form of a parameter that is broadcast against the rows of the output; None if it spans the batch.

    ``factor`` reads from the node what the parameter is multiplied with.
    """
    name, moves, edge = sources[operand]
    out = output_shape(node)
    moves = tuple(move for move in moves if not operation(move).casts)
    if moves and all(operation(move).reshapes for move in moves):
        shape = output_shape(moves[0], edge[1])
    elif moves:
        if tensors[name].ndim != 1 or factor is not None:
            return None
        part = used_rows(edge, tensors[name], out[-1], transposed=False)
        return None if part is None else Elementwise((out[-1],), part=part)
    else:
        shape = tuple(tensors[name].shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return None if len(shape) >= len(out) else Elementwise(shape, factor=factor)


def used_rows(edge: tuple[Node, int], parameter: Tensor, width: int, transposed: bool) -> Part | None:
    """Return which consecutive rows of the parameter a moved copy of it holds, or None if it holds anything else.

    The moves are linear and only carry entries. So their own backward pass, given positions written in base 128
    (exact in every dtype), says where each entry of the parameter went.
    """
    node, number = edge
    shape = output_shape(node, number)
    size = math.prod(shape)
    places = torch.zeros(parameter.shape, dtype=torch.long, device=parameter.device)
    base = 1
    positions = torch.arange(1, size + 1, device=parameter.device)
    while base <= size:
        digit = ((positions // base) % 128).to(node._input_metadata[number].dtype).view(shape)
        (back,) = torch.autograd.grad(
            [GradientEdge(node, number)], [parameter], [digit], retain_graph=True, allow_unused=True
        )
        places += back.long() * base
        base *= 128
    used = (places.flatten(1) if places.ndim > 1 else places[:, None]).ne(0).any(1).nonzero()[:, 0]
    if len(used) != width:
        return None
    first, last = int(used[0]), int(used[-1]) + 1
    expected = positions.view(shape).T if transposed else positions.view(shape)
    if last - first != width or not torch.equal(places[first:last], expected):
        return None
    return first, last, parameter.shape[0]
