"""A backward pass for all seeds at once.

Autograd takes one gradient at a time; ``vmap`` over it loops inside convolutions and norms. Here the seeds are folded
into the batch, so that K seeds cost one large operation for each node. Every rule maps the gradient (K, *output) of a
node to those of its operands. A graph with an operation that has no rule is left to autograd.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.networks.forms import batch_norm_scale
from lapwing.networks.forward import quiet
from lapwing.networks.graph import Graph, Node, output_shape, signed

Rule = Callable[[Node, Tensor, int], Tensor]  # (node, gradient (K, *output), operand) -> gradient (K, *operand)
aten = torch.ops.aten


class NoRuleError(Exception):
    """This graph needs autograd."""


def gradients(raw: Tensor, graph: Graph, nodes: list[Node], seeds: Tensor, recurrent: bool) -> list[Tensor]:
    """Gradients (K, ...) of seeds · raw at the outputs of the nodes; zero where there is no path."""
    found: list[Tensor | None] | None = None
    leading = _leading_to(graph, nodes)
    if not recurrent and _has_rules(graph, leading, seeds.dtype):
        with contextlib.suppress(NoRuleError), torch.no_grad():
            found = _folded(graph, nodes, leading, seeds)
    if found is None:
        found = _by_autograd(raw, nodes, seeds, loops(graph, seeds, recurrent))
    return [
        grad if grad is not None else seeds.new_zeros(seeds.shape[0], *output_shape(node))
        for grad, node in zip(found, nodes, strict=True)
    ]


def differentiable_gradients(raw: Tensor, nodes: list[Node], seeds: Tensor) -> list[Tensor]:
    """The same by autograd, seed by seed, as part of a graph that leads back to the inputs."""
    edges = [GradientEdge(node, 0) for node in nodes]
    each = [torch.autograd.grad(raw, edges, seed, create_graph=True, allow_unused=True) for seed in seeds]
    return [
        seeds.new_zeros(len(seeds), *output_shape(node)) if each[0][i] is None else torch.stack([g[i] for g in each])
        for i, node in enumerate(nodes)
    ]


def loops(graph: Graph, seeds: Tensor, recurrent: bool) -> bool:
    """Whether autograd must take seed by seed: it batches no recurrent, attention or sparse kernel, and convolutions
    on a CPU only slowly."""
    names = {name for name, _ in graph.signature}
    return (
        recurrent
        or any(name.startswith("ScaledDotProduct") for name in names)
        or any(node.name() == "EmbeddingBackward0" and node._saved_sparse for node in graph.nodes)
        or ("ConvolutionBackward0" in names and seeds.is_cpu)
    )


def _by_autograd(raw: Tensor, nodes: list[Node], seeds: Tensor, looped: bool) -> list[Tensor | None]:
    edges = [GradientEdge(node, 0) for node in nodes]
    if looped or seeds.shape[0] == 1:
        each = [torch.autograd.grad(raw, edges, seed, retain_graph=True, allow_unused=True) for seed in seeds]
        return [None if each[0][i] is None else torch.stack([g[i] for g in each]) for i in range(len(nodes))]
    with quiet():
        return list(torch.autograd.grad(raw, edges, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True))


def _folded(graph: Graph, targets: list[Node], wanted: set[Node], seeds: Tensor) -> list[Tensor | None]:
    """Gradients (K, *output) at the targets for seeds (K, *output of the root); None where no path leads.

    ``wanted`` are the nodes that lead to the targets. A gradient that nobody else holds is multiplied in place: at
    these sizes a new tensor costs more than the product.
    """
    grads: dict[Node, Tensor] = {graph.nodes[0]: seeds}
    own: dict[Node, bool] = {}
    found: dict[Node, Tensor] = {}
    remaining = set(targets)
    for node in graph.nodes:
        grad = grads.pop(node, None)
        if grad is None:
            continue
        mine = own.pop(node, False)
        if node in remaining:
            found[node] = grad
            remaining.discard(node)
            mine = False
        if not remaining:
            break
        name = node.name()
        for place, (child, nr) in enumerate(node.next_functions):
            if child is None or child not in wanted:
                continue
            if nr != 0:
                raise NoRuleError(name)
            if name in SLOPES:
                slope = SLOPES[name](node)
                part, fresh = (grad.mul_(slope) if mine else grad * slope), True
            elif name in RULES:
                part = RULES[name](node, grad, place)
                fresh = name not in PASSES or (mine and name != "SumBackward1" and len(node.next_functions) == 1)
            else:
                raise NoRuleError(name)
            if part.shape[1:] != output_shape(child):
                raise NoRuleError(name)
            own[child] = fresh and child not in grads
            grads[child] = grads[child] + part if child in grads else part
    return [found.get(node) for node in targets]


def _has_rules(graph: Graph, wanted: set[Node], dtype: torch.dtype) -> bool:
    """Whether every node on the way to the targets has a rule and one dtype; casts are left to autograd."""
    return all(
        (node.name() in RULES or node.name() in SLOPES) and node._input_metadata[0].dtype == dtype
        for node in graph.nodes
        if node in wanted and any(child in wanted for child, _ in node.next_functions)
    )


def _leading_to(graph: Graph, targets: list[Node]) -> set[Node]:
    """The targets and every node from which one of them is reached."""
    wanted = set(targets)
    for node in reversed(graph.nodes):  # producers before consumers
        if node not in wanted and any(child in wanted for child, _ in node.next_functions):
            wanted.add(node)
    return wanted


def _addmm(node: Node, grad: Tensor, place: int) -> Tensor:
    if place != 1 or node._saved_alpha != 1:
        raise NoRuleError("AddmmBackward0")
    return grad @ node._saved_mat2.mT


def _mm(node: Node, grad: Tensor, place: int) -> Tensor:
    if place != 0:
        raise NoRuleError("MmBackward0")
    return grad @ node._saved_mat2.mT


def _view(node: Node, grad: Tensor, place: int) -> Tensor:
    return grad.reshape(grad.shape[0], *node._saved_self_sym_sizes)


def _same(node: Node, grad: Tensor, place: int) -> Tensor:
    return grad


def _add(node: Node, grad: Tensor, place: int) -> Tensor:
    return grad if place == 0 or node._saved_alpha == 1 else grad * node._saved_alpha


def _mul(node: Node, grad: Tensor, place: int) -> Tensor:
    return grad * (node._saved_other if place == 0 else node._saved_self)


def _mean(node: Node, grad: Tensor, place: int) -> Tensor:
    shape = tuple(node._saved_self_sym_sizes)
    spread = _sum(node, grad, place)
    return spread / (math.prod(shape) / max(1, math.prod(output_shape(node))))


def _sum(node: Node, grad: Tensor, place: int) -> Tensor:
    shape = tuple(node._saved_self_sym_sizes)
    if not node._saved_keepdim:
        dims = sorted(signed(d) % len(shape) for d in node._saved_dim)
        for dim in dims:
            grad = grad.unsqueeze(dim + 1)
    return grad.expand(grad.shape[0], *shape)


def _convolution(node: Node, grad: Tensor, place: int) -> Tensor:
    if place != 0:
        raise NoRuleError("ConvolutionBackward0")
    weight, x = node._saved_weight, node._saved_input
    folded = grad.flatten(0, 1)
    if folded.is_cpu and folded.dtype in (torch.bfloat16, torch.float16):  # narrow kernels end some processes
        folded, weight = folded.float(), weight.float()
    blank = folded.new_empty(1).expand(folded.shape[0], *x.shape[1:])  # only its shape is read
    back = aten.convolution_backward(
        folded, blank, weight, None, node._saved_stride, node._saved_padding, node._saved_dilation,
        node._saved_transposed, node._saved_output_padding, node._saved_groups, (True, False, False),
    )[0]  # fmt: skip
    return back.to(grad.dtype).unflatten(0, grad.shape[:2])


def _batch_norm(node: Node, grad: Tensor, place: int) -> Tensor:
    if place != 0 or node._saved_training:
        raise NoRuleError("BatchNorm")
    scale = batch_norm_scale(node)
    if node._saved_weight is not None:
        scale = scale * node._saved_weight
    return grad * scale.to(grad).view(-1, *(1,) * (grad.ndim - 3))


def _layer_norm(node: Node, grad: Tensor, place: int) -> Tensor:
    if place != 0:
        raise NoRuleError("LayerNorm")
    x, rstd = node._saved_input, node._saved_result2
    dims = tuple(range(-len(node._saved_normalized_shape), 0))
    unit = (x - node._saved_result1) * rstd
    scaled = grad if node._saved_weight is None else grad * node._saved_weight
    shift = scaled.mean(dims, keepdim=True) + unit * (scaled * unit).mean(dims, keepdim=True)
    return (scaled - shift) * rstd


def _max_pool(node: Node, grad: Tensor, place: int) -> Tensor:
    x, index = node._saved_self, node._saved_result1
    flat = grad.new_zeros(grad.shape[0], *x.shape[:-2], x.shape[-2] * x.shape[-1])
    # Windows may share a maximum, so contributions add up.
    flat.scatter_add_(-1, index.flatten(-2).expand(grad.shape[0], *index.shape[:-2], -1), grad.flatten(-2))
    return flat.unflatten(-1, x.shape[-2:])


def _adaptive_pool(node: Node, grad: Tensor, place: int) -> Tensor:
    x = node._saved_self
    blank = grad.new_empty(1).expand(grad.shape[0] * x.shape[0], *x.shape[1:])
    return aten._adaptive_avg_pool2d_backward(grad.flatten(0, 1), blank).unflatten(0, grad.shape[:2])


def _avg_pool(node: Node, grad: Tensor, place: int) -> Tensor:
    x = node._saved_self
    blank = grad.new_empty(1).expand(grad.shape[0] * x.shape[0], *x.shape[1:])
    back = aten.avg_pool2d_backward(
        grad.flatten(0, 1).contiguous(), blank.contiguous(), node._saved_kernel_size, node._saved_stride,
        node._saved_padding, node._saved_ceil_mode, node._saved_count_include_pad, node._saved_divisor_override,
    )  # fmt: skip
    return back.unflatten(0, grad.shape[:2])


def _transpose(node: Node, grad: Tensor, place: int) -> Tensor:
    ndim = grad.ndim - 1
    return grad.transpose(signed(node._saved_dim0) % ndim + 1, signed(node._saved_dim1) % ndim + 1)


def _permute(node: Node, grad: Tensor, place: int) -> Tensor:
    ndim = grad.ndim - 1
    dims = [signed(d) % ndim for d in node._saved_dims]
    inverse = [dims.index(i) + 1 for i in range(ndim)]
    return grad.permute(0, *inverse)


def _unsqueeze(node: Node, grad: Tensor, place: int) -> Tensor:
    return grad.squeeze(signed(node._saved_dim) % (grad.ndim - 1) + 1)


def _squeeze(node: Node, grad: Tensor, place: int) -> Tensor:
    return grad.reshape(grad.shape[0], *node._saved_self_sym_sizes)


RULES: Mapping[str, Rule] = {
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "ViewBackward0": _view,
    "UnsafeViewBackward0": _view,
    "ReshapeAliasBackward0": _view,
    "AliasBackward0": _same,
    "CloneBackward0": _same,
    "AddBackward0": _add,
    "MulBackward0": _mul,
    "MeanBackward1": _mean,
    "SumBackward1": _sum,
    "ConvolutionBackward0": _convolution,
    "NativeBatchNormBackward0": _batch_norm,
    "CudnnBatchNormBackward0": _batch_norm,
    "NativeLayerNormBackward0": _layer_norm,
    "MaxPool2DWithIndicesBackward0": _max_pool,
    "AdaptiveAvgPool2DBackward0": _adaptive_pool,
    "AvgPool2DBackward0": _avg_pool,
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "UnsqueezeBackward0": _unsqueeze,
    "SqueezeBackward1": _squeeze,
}
# These may hand on the tensor they were given.
PASSES = frozenset(
    [
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "AliasBackward0",
        "CloneBackward0",
        "AddBackward0",
        "SumBackward1",
        "TransposeBackward0",
        "PermuteBackward0",
        "UnsqueezeBackward0",
        "SqueezeBackward1",
    ]
)
# Activations: their slope, shaped like the output and the same for every seed.
SLOPES: Mapping[str, Callable[[Node], Tensor]] = {
    "ReluBackward0": lambda node: node._saved_result > 0,
    "TanhBackward0": lambda node: 1 - node._saved_result.square(),
    "SigmoidBackward0": lambda node: node._saved_result * (1 - node._saved_result),
    "GeluBackward0": lambda node: aten.gelu_backward(
        _ones(node), node._saved_self, approximate=node._saved_approximate
    ),
    "SiluBackward0": lambda node: aten.silu_backward(_ones(node), node._saved_self),
    "LeakyReluBackward0": lambda node: aten.leaky_relu_backward(
        _ones(node), node._saved_self, node._saved_negative_slope, False
    ),
}


def _ones(node: Node) -> Tensor:
    """The slope of an activation is its gradient for ones."""
    return torch.ones_like(node._saved_self)
