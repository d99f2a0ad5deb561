"""The backward pass: how the gradients of K seeds are pulled back through the operations, all seeds together.

Nothing here is needed to understand the numbers: they are those of autograd, which computes the gradients of a graph
that has an operation without a rule. Autograd takes one seed at a time, and ``vmap`` over it loops inside convolutions
and norms. Here the seeds are folded into the batch, so that K seeds cost one large operation for each node.
A rule takes a gradient (K, *output) and returns that of an operand, (K, *operand).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.networks.rules import LEAF, Node, Shape, as_signed, batch_norm_scale, output_numbers, output_shape
from lapwing.runtime.memory import chunks, concat_chunks
from lapwing.runtime.threads import quiet

if TYPE_CHECKING:
    from lapwing.networks.graph import Graph
    from lapwing.networks.ops import Operation

aten = torch.ops.aten
Pull = Callable[[Node, Tensor, int], Tensor]  # (node, gradient (K, *output), operand) -> gradient (K, *operand)
# (node, gradients (K, *output) of its outputs, operands) -> gradients (K, *operand), which nobody else holds
JointPull = Callable[[Node, Sequence[Tensor | None], Sequence[int]], list[Tensor]]


class NoRuleError(Exception):
    """A node that must be left to autograd."""


class Gradient:
    """A way to pull the gradients of K seeds back through a node."""

    def pull(self, node: Node, grad: Tensor, operand: int, owned: bool) -> tuple[Tensor, bool]:
        """Return the gradient (K, *operand) for ``grad`` (K, *output), and whether nobody else holds that tensor.

        ``owned`` says the same of ``grad``: an owned gradient may be changed in place.
        """
        raise NotImplementedError


# Four leaves of ``Gradient``. They differ in who holds the tensor that they return. A gradient that nobody else holds
# is multiplied in place: at these sizes a new tensor costs more than the product.


@dataclass(frozen=True)
class Slope(Gradient):
    """An operation on each entry: its slope, shaped like the output and the same for every seed."""

    slope: Callable[[Node], Tensor]

    def pull(self, node: Node, grad: Tensor, operand: int, owned: bool) -> tuple[Tensor, bool]:
        slope = self.slope(node)
        return (grad.mul_(slope) if owned else grad * slope), True


@dataclass(frozen=True)
class New(Gradient):
    """A function that returns a new tensor. ``only`` is the operand that it has a rule for; None: all of them."""

    function: Pull
    only: int | None = None

    def pull(self, node: Node, grad: Tensor, operand: int, owned: bool) -> tuple[Tensor, bool]:
        if self.only not in (None, operand):
            raise NoRuleError(node.name())
        return self.function(node, grad, operand), True


@dataclass(frozen=True)
class View(Gradient):
    """A function that may return the tensor it was given, or a view of it."""

    function: Pull

    def pull(self, node: Node, grad: Tensor, operand: int, owned: bool) -> tuple[Tensor, bool]:
        return self.function(node, grad, operand), owned and len(node.next_functions) == 1


@dataclass(frozen=True)
class Expanded(Gradient):
    """A function that returns a view in which several entries share memory: never to be changed in place."""

    function: Pull

    def pull(self, node: Node, grad: Tensor, operand: int, owned: bool) -> tuple[Tensor, bool]:
        return self.function(node, grad, operand), False


# Products and convolutions.


def pull_addmm(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the rows of a product with a bias."""
    if node._saved_alpha != 1:
        raise NoRuleError(node.name())
    return grad @ node._saved_mat2.mT


def pull_mm(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the rows of a product."""
    return grad @ node._saved_mat2.mT


def batched_product(node: Node, grads: Sequence[Tensor | None], operands: Sequence[int]) -> list[Tensor]:
    """Return the gradients in both factors of a batched product of matrices."""
    grad = _only(grads, node)
    left, right = node._saved_self, node._saved_mat2
    return [grad @ right.mT if operand == 0 else left.mT @ grad for operand in operands]


def pull_convolution(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the images, all seeds folded into the batch."""
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


# Attention and softmax.


def attention(node: Node, grads: Sequence[Tensor | None], operands: Sequence[int]) -> list[Tensor]:
    """Return the gradients in queries, keys and values of attention in one kernel, all seeds together.

    Autograd calls the kernel once for each seed, which computes the weights of the attention anew. Here they are
    computed once, (..., T, S). Memory: as much for each seed of a run, in runs that fit the byte budget.
    """
    query, key, value = node._saved_query, node._saved_key, node._saved_value
    grad = grads[0]
    if grad is None or max(operands) > 2 or any(other is not None for other in grads[1:]):
        raise NoRuleError(node.name())
    if query.ndim != 4 or query.shape[:2] != key.shape[:2] or key.shape[:2] != value.shape[:2]:  # shared heads
        raise NoRuleError(node.name())
    if getattr(node, "_saved_dropout_p", 0.0) or _heads_padded(node, grad, value):
        raise NoRuleError(node.name())
    scale = getattr(node, "_saved_scale", None)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    weights = _weights(node, query, key, scale)
    factors = query * scale, key * scale, value, weights @ value
    each = 2 * weights.numel() * weights.element_size()
    pieces = chunks(len(grad), each, grad.device)
    parts = [_at_run(grad[run], weights, factors, operands) for run in pieces]
    return [concat_chunks(iter(some), len(grad)) for some in zip(*parts, strict=True)]


def _heads_padded(node: Node, grad: Tensor, value: Tensor) -> bool:
    """Return whether the kernel gave other outputs than one for each query and entry of a value."""
    return grad.shape[1:] != (*node._saved_query.shape[:-1], value.shape[-1])


def _weights(node: Node, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return how much each query takes of each value, (..., T, S)."""
    scores = (query * scale) @ key.mT
    mask = getattr(node, "_saved_attn_mask", None)
    mask = getattr(node, "_saved_attn_bias", None) if mask is None else mask
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if node._saved_is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill_(later, -math.inf)
    weights: Tensor = torch.ops.aten._safe_softmax(scores, -1)  # a query without any key takes nothing
    return weights


def _at_run(
    grad: Tensor, weights: Tensor, factors: tuple[Tensor, Tensor, Tensor, Tensor], operands: Sequence[int]
) -> list[Tensor]:
    """Return the gradients in some of queries, keys and values for a run of seeds, (K, ..., T, d).

    ``factors`` are the scaled queries and keys, the values, and the output.
    """
    query, key, value, output = factors
    results: dict[int, Tensor] = {}
    if 2 in operands:  # seeds beside the entries: a product would copy the weights for each seed
        rows = weights.mT @ grad.movedim(0, -2).flatten(-2)
        results[2] = rows.unflatten(-1, (len(grad), -1)).movedim(-2, 0)
    if 0 in operands or 1 in operands:
        slopes = grad @ value.mT
        slopes -= (grad * output).sum(-1, keepdim=True)
        slopes *= weights
        if 0 in operands:
            results[0] = slopes @ key
        if 1 in operands:
            results[1] = slopes.mT @ query
    return [results[operand] for operand in operands]


def softmax(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of a softmax."""
    result = node._saved_result
    dim = as_signed(node._saved_dim) % result.ndim + 1
    weighted = grad * result
    return weighted.sub_(result * weighted.sum(dim, keepdim=True))


# Slopes of activations.


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


# Sums and products of each entry.


def pull_add(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of a sum."""
    return grad if operand == 0 or node._saved_alpha == 1 else grad * node._saved_alpha


def pull_mul(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient times the other factor, a tensor or a number."""
    return grad * (node._saved_other if operand == 0 else node._saved_self)


def masked_fill(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient where nothing was filled in."""
    return grad.masked_fill(node._saved_mask, 0.0)


# Normalisations.


def pull_batch_norm(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the data of a BatchNorm in evaluation mode."""
    if node._saved_training:
        raise NoRuleError(node.name())
    scale = batch_norm_scale(node)
    if node._saved_weight is not None:
        scale = scale * node._saved_weight
    return grad * scale.to(grad).view(-1, *(1,) * (grad.ndim - 3))


def pull_layer_norm(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the data of a LayerNorm."""
    x, rstd = node._saved_input, node._saved_result2
    dims = tuple(range(-len(node._saved_normalized_shape), 0))
    unit = (x - node._saved_result1) * rstd
    scaled = grad * (rstd if node._saved_weight is None else rstd * node._saved_weight)
    # Few reads and writes of all seeds: they take longer than the arithmetic.
    width = math.prod(node._saved_normalized_shape)
    along = torch.einsum("knd,nd->kn", scaled.reshape(len(grad), -1, width), unit.reshape(-1, width)) / width
    mean = scaled.mean(dims, keepdim=True)
    return scaled.sub_(mean).addcmul_(unit, along.view(mean.shape), value=-1)


# Changes of shape, and operations that pick, split and join.


def view(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the shape of the operand."""
    return grad.reshape(grad.shape[0], *node._saved_self_sym_sizes)


def unsqueeze(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient without the added dimension."""
    return grad.squeeze(as_signed(node._saved_dim) % (grad.ndim - 1) + 1)


def transpose(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient with the two dimensions swapped back."""
    ndim = grad.ndim - 1
    return grad.transpose(as_signed(node._saved_dim0) % ndim + 1, as_signed(node._saved_dim1) % ndim + 1)


def permute(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient with its dimensions in their old order."""
    ndim = grad.ndim - 1
    dims = [as_signed(d) % ndim for d in node._saved_dims]
    inverse = [dims.index(i) + 1 for i in range(ndim)]
    return grad.permute(0, *inverse)


def select(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient at the one entry along a dimension that was picked, and zeros elsewhere."""
    sizes = tuple(node._saved_self_sym_sizes)
    whole = grad.new_zeros(len(grad), *sizes)
    whole.select(as_signed(node._saved_dim) % len(sizes) + 1, as_signed(node._saved_index)).copy_(grad)
    return whole


def part(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient at the entries along a dimension that were picked, and zeros elsewhere."""
    sizes = tuple(node._saved_self_sym_sizes)
    dim = as_signed(node._saved_dim) % len(sizes)
    places = range(sizes[dim])[slice(as_signed(node._saved_start), as_signed(node._saved_end), node._saved_step)]
    if len(places) == sizes[dim]:
        return grad
    whole = grad.new_zeros(len(grad), *sizes)
    index = torch.arange(places.start, places.stop, places.step, device=grad.device)
    return whole.index_copy_(dim + 1, index, grad)


def split(node: Node, grads: Sequence[Tensor | None], operands: Sequence[int]) -> list[Tensor]:
    """Return the gradients of all parts, joined again; zeros for a part that nothing was made of."""
    ndim = len(output_shape(node))
    return [torch.cat(_fill_missing(node, grads), as_signed(node._saved_dim) % ndim + 1)]


def unbind(node: Node, grads: Sequence[Tensor | None], operands: Sequence[int]) -> list[Tensor]:
    """Return the gradients of all entries along a dimension, stacked again."""
    ndim = len(output_shape(node)) + 1
    return [torch.stack(_fill_missing(node, grads), as_signed(node._saved_dim) % ndim + 1)]


def _fill_missing(node: Node, grads: Sequence[Tensor | None]) -> list[Tensor]:
    like = next(grad for grad in grads if grad is not None)
    pairs = enumerate(grads)
    return [like.new_zeros(len(like), *output_shape(node, i)) if grad is None else grad for i, grad in pairs]


def _only(grads: Sequence[Tensor | None], node: Node) -> Tensor:
    if len(grads) != 1 or grads[0] is None:
        raise NoRuleError(node.name())
    return grads[0]


def cat(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the part of the gradient that belongs to one of the joined tensors."""
    dim = as_signed(node._saved_dim) % (grad.ndim - 1)
    sizes = [_size(child, number, dim) for child, number in node.next_functions]
    unknown = [i for i, size in enumerate(sizes) if size < 0]  # constants, about which the graph says nothing
    if len(unknown) > 1:
        raise NoRuleError(node.name())
    if unknown:
        sizes[unknown[0]] = grad.shape[dim + 1] - sum(size for size in sizes if size >= 0)
    return grad.narrow(dim + 1, sum(sizes[:operand]), sizes[operand])


def stack(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the part of the gradient that belongs to one of the stacked tensors."""
    return grad.select(as_signed(node._saved_dim) % (grad.ndim - 1) + 1, operand)


def _size(node: Node | None, number: int, dim: int) -> int:
    """Return the size of an operand along a dimension; -1 if the graph does not know it."""
    if node is None:
        return -1
    shape = tuple(node.variable.shape) if node.name() == LEAF else output_shape(node, number)
    return shape[dim]


# Sums, means, pooling and enlarged images.


def total(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of a sum, expanded over the dimensions that were summed."""
    shape = tuple(node._saved_self_sym_sizes)
    if not node._saved_keepdim:
        dims = sorted(as_signed(d) % len(shape) for d in node._saved_dim)
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


def upsample_nearest(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of an enlarged image, added up over the copies of each pixel, seeds folded into the batch."""
    sizes = list(node._saved_self_sym_sizes)
    back = torch.ops.aten.upsample_nearest2d_backward(
        grad.flatten(0, 1), node._saved_output_size, [math.prod(grad.shape[:2]), *sizes[1:]],
        node._saved_scales_h, node._saved_scales_w,
    )  # fmt: skip
    return back.unflatten(0, grad.shape[:2])


def gradients(
    raw: Tensor, graph: Graph, nodes: list[Node], seeds: Tensor, recurrent: bool, differentiable: bool = False
) -> Iterator[tuple[Node, Tensor]]:
    """Yield the nodes, as the pass reaches them, with the gradient (K, ...) of seeds · raw at their outputs.

    It is zero where there is no path. Whoever drops each before the next needs the memory of a few layers, not of all;
    only a pass by autograd has all at once. ``differentiable`` gradients are part of a graph that leads back to the
    inputs, by autograd and seed by seed.
    """
    leading = None if recurrent or differentiable else _leading_to(graph, nodes, seeds.dtype)
    remaining = dict.fromkeys(nodes)
    if leading is not None:
        walk = _pull_back(graph, frozenset(nodes), leading, seeds)
        try:
            while True:
                with torch.no_grad():  # not while the caller works
                    node, grad = next(walk)
                del remaining[node]
                yield node, grad
                del grad
        except StopIteration:
            for node in remaining:
                yield node, seeds.new_zeros(len(seeds), *output_shape(node))
            return
        except NoRuleError:  # the rest by autograd
            del walk
    looped = differentiable or seed_by_seed(graph, seeds, recurrent)
    rest = list(remaining)
    grads = by_autograd(raw, [GradientEdge(node, 0) for node in rest], seeds, looped, differentiable)
    for node in rest:
        yield node, or_zero(grads.pop(0), seeds, (len(seeds), *output_shape(node)))


def or_zero(grad: Tensor | None, like: Tensor, shape: Shape) -> Tensor:
    return like.new_zeros(shape) if grad is None else grad


def seed_by_seed(graph: Graph, seeds: Tensor, recurrent: bool) -> bool:
    """Return whether autograd must take one seed at a time.

    It cannot batch recurrent, attention or sparse kernels, and batches convolutions on a CPU only slowly.
    """
    return recurrent or any(facts.seed_by_seed(node, seeds.is_cpu) for node, facts in graph.operations.items())


def by_autograd(
    raw: Tensor, targets: Sequence[GradientEdge] | Sequence[Tensor], seeds: Tensor, looped: bool,
    differentiable: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients (K, ...) of seeds · raw at the targets; None where there is no path."""
    options = {"retain_graph": True, "allow_unused": True, "create_graph": differentiable}
    if not looped and len(seeds) > 1:
        with quiet:
            return list(torch.autograd.grad(raw, targets, seeds, is_grads_batched=True, **options))
    each = zip(*(torch.autograd.grad(raw, targets, seed, **options) for seed in seeds), strict=True)
    return [
        None if grads[0] is None else torch.stack([g.to_dense() if g.is_sparse else g for g in grads]) for grads in each
    ]


def _pull_back(
    graph: Graph, targets: Collection[Node], leading: set[Node], seeds: Tensor
) -> Iterator[tuple[Node, Tensor]]:
    """Yield the targets that a path leads to, with the gradients (K, *output) for seeds (K, *output of the root).

    ``leading`` are the nodes that lead to the targets.
    """
    held = _Held(graph.nodes[0], seeds)
    left = len(targets)
    for node in graph.nodes:
        if node not in held:
            continue
        grads, owned = held.pop(node)
        if node in targets:
            if grads[0] is None or (len(grads) > 1 and any(grad is not None for grad in grads[1:])):
                raise NoRuleError(node.name())
            yield node, grads[0]
            left, owned = left - 1, False
        if not left:
            return
        operands = [i for i, (child, _) in enumerate(node.next_functions) if child is not None and child in leading]
        for operand, (part, new) in zip(operands, _pull_operands(graph.operations[node], node, grads, operands, owned)):
            held.add(node.next_functions[operand], part, new)
            del part
        del grads


class _Held:
    """The gradients of a pass that are in memory: those that were reached and not yet pulled further."""

    def __init__(self, root: Node, seeds: Tensor) -> None:
        self._grads: dict[Node, list[Tensor | None]] = {root: [seeds]}
        self._owned: set[Node] = set()  # nobody else holds their gradient, so that it may be changed in place

    def __contains__(self, node: Node) -> bool:
        return node in self._grads

    def pop(self, node: Node) -> tuple[list[Tensor | None], bool]:
        """Return the gradients of all outputs of a node, and whether nobody else holds them; forget them."""
        owned = node in self._owned
        self._owned.discard(node)
        return self._grads.pop(node), owned

    def add(self, edge: tuple[Node, int], part: Tensor, new: bool) -> None:
        """Add a part of the gradient of one output of a node."""
        node, number = edge
        if part.shape[1:] != output_shape(node, number):
            raise NoRuleError(node.name())
        outputs = len(node._input_metadata)
        grads = self._grads.setdefault(node, [None] * outputs)
        before = grads[number]
        grads[number] = part if before is None else before + part
        if outputs == 1 and (new or before is not None):  # a sum is new
            self._owned.add(node)


def _pull_operands(
    facts: Operation, node: Node, grads: list[Tensor | None], operands: list[int], owned: bool
) -> Iterator[tuple[Tensor, bool]]:
    """Yield the gradients of the operands, and whether nobody else holds them."""
    if not operands:
        return
    if facts.joint_gradient is not None:
        yield from ((part, True) for part in facts.joint_gradient(node, grads, operands))
        return
    if facts.gradient is None or len(grads) != 1 or grads[0] is None:
        raise NoRuleError(node.name())
    for operand in operands:
        yield facts.gradient.pull(node, grads[0], operand, owned)


def _leading_to(graph: Graph, targets: Collection[Node], dtype: torch.dtype) -> set[Node] | None:
    """Return the targets and every node from which one of them is reached.

    None if one on the way has no rule or another dtype; casts are left to autograd.
    """
    leading = set(targets)
    for node in reversed(graph.nodes):  # producers before consumers
        if any(child in leading for child, _ in node.next_functions):
            if not graph.operations[node].has_gradient or node._input_metadata[0].dtype != dtype:
                return None
            leading.add(node)
    return leading


def numbers_at_once(graph: Graph, targets: Collection[Node], dtype: torch.dtype) -> int | None:
    """Return how many numbers the gradients of a pass to the targets have that are in memory at once, for each seed.

    None if the pass is left to autograd, which holds those of all targets.
    """
    leading = _leading_to(graph, targets, dtype)
    if leading is None:
        return None
    held, most = {graph.nodes[0]: output_numbers(graph.nodes[0])}, 0
    for node in graph.nodes:
        if node not in held:
            continue
        own = held.pop(node)
        edges = {edge for edge in node.next_functions if edge[0] is not None and edge[0] in leading}
        new = sum(output_numbers(*edge) for edge in edges if edge[0] not in held)
        in_place = graph.operations[node].carries_parameter  # a view of the gradient of its output
        most = max(most, sum(held.values()) + max(own, new) + (0 if in_place else min(own, new)))
        for child, number in edges:
            held[child] = held.get(child, 0) + (0 if child in held else output_numbers(child, number))
    return most
