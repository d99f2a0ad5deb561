"""Rules of operations: how gradients are pulled back through them, and how they use parameters.

Here are products, convolutions, embeddings, activations, sums, reshapes and pooling; the others are in ``pull.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from operator import attrgetter

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.networks import uses
from lapwing.networks.uses import (
    Factor,
    Node,
    NoRuleError,
    ParameterOperand,
    Part,
    Sources,
    Use,
    operation,
    output_shape,
    signed,
)

aten = torch.ops.aten

# Products with a weight.


def pull_addmm(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the rows of a product with a bias."""
    if operand != 1 or node._saved_alpha != 1:
        raise NoRuleError(node.name())
    return grad @ node._saved_mat2.mT


def pull_mm(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the rows of a product."""
    if operand != 0:
        raise NoRuleError(node.name())
    return grad @ node._saved_mat2.mT


def use_addmm(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the uses of bias and weight in bias + rows @ weight."""
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return
    bias = None
    if 0 in sources and sources[0].parameter.ndim == 1:
        added = broadcast(node, sources[0])
        if added is not None:
            yield 0, added
            bias = added.name if added.whole else None
    if 2 in sources and 1 not in sources:
        yield from _use_weight(node, sources, 2, attrgetter("_saved_mat1"), bias)


def use_mm(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the use of the weight in rows @ weight."""
    if 1 in sources and 0 not in sources:
        yield from _use_weight(node, sources, 1, attrgetter("_saved_self"), None)


def _use_weight(
    node: Node, sources: Sources, operand: int, rows: Factor, bias: str | None
) -> Iterator[tuple[int, Use]]:
    name, parameter, moves, edge = sources[operand]
    if parameter.ndim != 2:
        return
    changes = [move for move in map(operation, moves) if not move.casts]
    if not changes:
        yield operand, uses.matmul(node, name, "columns", rows, bias)
    elif len(changes) == 1 and changes[0].transposes:
        yield operand, uses.matmul(node, name, "rows", rows, bias)
    else:
        part = used_rows(edge, parameter, output_shape(node)[1], transposed=True)
        if part is not None:
            yield operand, uses.matmul(node, name, "rows", rows, part=part)


def pull_convolution(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the images, all seeds folded into the batch."""
    if operand != 0:
        raise NoRuleError(node.name())
    weight, x = node._saved_weight, node._saved_input
    folded = grad.flatten(0, 1)
    if folded.is_cpu and folded.dtype in (torch.bfloat16, torch.float16):  # 16-bit kernels crash some processes
        folded, weight = folded.float(), weight.float()
    blank = folded.new_empty(1).expand(folded.shape[0], *x.shape[1:])  # only its shape is read
    back = aten.convolution_backward(
        folded, blank, weight, None, node._saved_stride, node._saved_padding, node._saved_dilation,
        node._saved_transposed, node._saved_output_padding, node._saved_groups, (True, False, False),
    )[0]  # fmt: skip
    return back.to(grad.dtype).unflatten(0, grad.shape[:2])


def use_convolution(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the uses of bias and weight in a convolution, transposed or not."""
    bias = None
    if 2 in sources and not sources[2].moves:
        bias = sources[2].name
        yield 2, uses.elementwise(node, bias, tuple(sources[2].parameter.shape), channel=True)
    if 1 in sources and not sources[1].moves:
        name, shape = sources[1].name, tuple(sources[1].parameter.shape)
        if node._saved_transposed:
            yield 1, uses.transposed_convolution(node, name, shape)
        else:
            yield 1, uses.convolution(node, name, shape, bias)


def use_embedding(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the use of the table of an embedding."""
    if not sources[0].moves and not node._saved_sparse:
        yield 0, uses.lookup(node, sources[0].name, len(sources[0].parameter))


def embedding_not_derivative(node: Node) -> str:
    """Return why the gradient is not the derivative, or ""."""
    if not node._saved_scale_grad_by_freq:
        return ""
    return (
        "an embedding has scale_grad_by_freq=True, which divides its gradient by counts; expected the derivative. "
        "Set scale_grad_by_freq to False: the network stays the same."
    )


def checkpoint_hides(node: Node) -> str:
    """Say that the operations inside a checkpoint cannot be read."""
    return (
        "a part of the model runs under reentrant gradient checkpointing, which hides its operations; expected all of "
        "them in the graph. Switch it off, or use torch.utils.checkpoint.checkpoint, which Lapwing runs without."
    )


def embedding_forward_differs(node: Node) -> bool:
    """Return whether there is a padding row: its gradient is zero, but forward mode does not skip it."""
    return 0 <= node._saved_padding_idx < 2**63


# How a parameter reaches an operation: whole, reshaped, or some of its rows.


def broadcast(node: Node, source: ParameterOperand, factor: Factor | None = None) -> Use | None:
    """Return the use of a parameter that is broadcast against the rows of the output; None if it spans the batch.

    ``factor`` reads from the node what the parameter is multiplied with.
    """
    name, parameter, moves, edge = source
    out = output_shape(node)
    moves = tuple(move for move in moves if not operation(move).casts)
    shape = tuple(parameter.shape)
    if moves and all(operation(move).reshapes for move in moves):
        shape = output_shape(moves[0], edge[1])
    elif moves:
        if parameter.ndim != 1 or factor is not None:
            return None
        part = used_rows(edge, parameter, out[-1], transposed=False)
        return None if part is None else uses.elementwise(node, name, (out[-1],), part=part)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return None if len(shape) >= len(out) else uses.elementwise(node, name, shape, factor)


def used_rows(edge: tuple[Node, int], parameter: Tensor, width: int, transposed: bool) -> Part | None:
    """Return which consecutive rows of the parameter a moved copy of it holds, or None if it holds anything else.

    Moves only carry entries, so the backward pass through them, given positions in digits of base 128 (exact in every
    dtype), shows where each entry of the parameter went.
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


# Activations, sums and products of two tensors.


def relu(node: Node) -> Tensor:
    """Return the slope of ReLU: whether the output is positive."""
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
    """Return ones in the shape of the input: the gradient of an activation for ones is its slope."""
    return torch.ones_like(node._saved_self)


def pull_add(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of a sum."""
    return grad if operand == 0 or node._saved_alpha == 1 else grad * node._saved_alpha


def pull_mul(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient times the other factor."""
    return grad * (node._saved_other if operand == 0 else node._saved_self)


def use_add(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the use of a parameter that is added to every row."""
    if node._saved_alpha != 1 or len(sources) > 1:
        return
    for operand, source in sources.items():
        use = broadcast(node, source)
        if use is not None:
            yield operand, use


def use_expand(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the use of a parameter that every sample gets a copy of, such as the token of a class."""
    use = broadcast(node, sources[0])
    if use is not None:
        yield 0, use


def broadcast_lookup(node: Node, operand: int, consumers: Mapping[Node, int]) -> Node | None:
    """Return the embedding whose rows a sum or an expansion broadcasts over leading dimensions; None if there is none.

    Nothing but changes of shape may lie between them, and nobody else may take the rows.
    """
    facts, out = operation(node), output_shape(node)
    if not ((facts.adds and node._saved_alpha == 1) or facts.expands):
        return None
    child, number = node.next_functions[operand]
    if child is None:
        return None
    shape = output_shape(child, number)
    while shape and shape[0] == 1:
        shape = shape[1:]
    if len(shape) < 1 or len(shape) >= len(out) or out[len(out) - len(shape) :] != shape:
        return None
    while operation(child).reshapes and not operation(child).casts and consumers[child] == 1:
        child = child.next_functions[0][0]
    return child if operation(child).looks_up and consumers[child] == 1 else None


def use_mul(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the use of a parameter that is multiplied with every row."""
    if len(sources) > 1:
        return
    for operand, source in sources.items():
        other = attrgetter("_saved_other" if operand == 0 else "_saved_self")
        use = broadcast(node, source, other) if other(node) is not None else None
        if use is not None:
            yield operand, use


def use_fused_cell(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the biases that a recurrent cell on a GPU adds to the gates itself: their gradient is that of the gates."""
    for operand in (3, 4):
        gates, number = node.next_functions[operand - 3]
        if operand in sources and not sources[operand].moves and gates is not None and number == 0:
            yield operand, uses.elementwise(gates, sources[operand].name, tuple(sources[operand].parameter.shape))


# Changes of shape, sums, means and pooling.


def view(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the shape of the operand."""
    return grad.reshape(grad.shape[0], *node._saved_self_sym_sizes)


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
