"""How gradients are pulled back through attention, normalisation, and operations that pick, split and join."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lapwing.networks.uses import (
    LEAF,
    Factor,
    Node,
    NormStatistics,
    NoRuleError,
    Sources,
    Use,
    UseRule,
    elementwise,
    output_shape,
    signed,
)
from lapwing.runtime.memory import chunks, concat_chunks


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
    dim = signed(node._saved_dim) % result.ndim + 1
    weighted = grad * result
    return weighted.sub_(result * weighted.sum(dim, keepdim=True))


def batched_product(node: Node, grads: Sequence[Tensor | None], operands: Sequence[int]) -> list[Tensor]:
    """Return the gradients in both factors of a batched product of matrices."""
    grad = _only(grads, node)
    left, right = node._saved_self, node._saved_mat2
    return [grad @ right.mT if operand == 0 else left.mT @ grad for operand in operands]


def masked_fill(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient where nothing was filled in."""
    if operand != 0:
        raise NoRuleError(node.name())
    return grad.masked_fill(node._saved_mask, 0.0)


def pull_scaled(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient of a product with a number."""
    return grad * node._saved_other


def _only(grads: Sequence[Tensor | None], node: Node) -> Tensor:
    if len(grads) != 1 or grads[0] is None:
        raise NoRuleError(node.name())
    return grads[0]


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


def pull_batch_norm(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the data of a BatchNorm in evaluation mode."""
    if operand != 0 or node._saved_training:
        raise NoRuleError(node.name())
    scale = batch_norm_scale(node)
    if node._saved_weight is not None:
        scale = scale * node._saved_weight
    return grad * scale.to(grad).view(-1, *(1,) * (grad.ndim - 3))


def pull_layer_norm(node: Node, grad: Tensor, operand: int) -> Tensor:
    """Return the gradient in the data of a LayerNorm."""
    if operand != 0:
        raise NoRuleError(node.name())
    x, rstd = node._saved_input, node._saved_result2
    dims = tuple(range(-len(node._saved_normalized_shape), 0))
    unit = (x - node._saved_result1) * rstd
    scaled = grad * (rstd if node._saved_weight is None else rstd * node._saved_weight)
    # Few reads and writes of all seeds: they take longer than the arithmetic.
    width = math.prod(node._saved_normalized_shape)
    along = torch.einsum("knd,nd->kn", scaled.reshape(len(grad), -1, width), unit.reshape(-1, width)) / width
    mean = scaled.mean(dims, keepdim=True)
    return scaled.sub_(mean).addcmul_(unit, along.view(mean.shape), value=-1)


def scale_and_shift(factor: Factor, channel: bool = True) -> UseRule:
    """Return the rule for the parameters of a norm; ``factor`` reads from its node what the scale is multiplied with.

    ``channel`` says that they lie along dimension 1 and not along the trailing dimensions.
    """

    def rule(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
        for operand, (name, parameter, moves, _) in sources.items():
            if operand in (1, 2) and not moves:
                shape = tuple(parameter.shape)
                yield operand, elementwise(node, name, shape, factor if operand == 1 else None, channel)

    return rule


def use_batch_norm(node: Node, sources: Sources) -> Iterator[tuple[int, Use]]:
    """Yield the uses of scale and shift of a BatchNorm in evaluation mode."""
    if not node._saved_training:
        yield from scale_and_shift(_batch_normalised)(node, sources)


def batch_norm_statistics(node: Node) -> NormStatistics | None:
    """Return the running statistics, if there are some."""
    mean, variance = node._saved_running_mean, node._saved_running_var
    if mean is None:
        return None
    inverse = float((1 / variance.clamp_min(1e-12)).mean())
    return NormStatistics(node._saved_input.detach(), inverse, batch_norm_eps(node), (mean, variance))


def own_statistics(node: Node) -> NormStatistics | None:
    """Return the statistics of a norm that divides by the variance of its own input."""
    return NormStatistics(node._saved_input.detach(), float(node._saved_result2.detach().square().mean()))


def batch_norm_eps(node: Node) -> float:
    """Return the eps that a BatchNorm adds to the variance; the node of cuDNN has another name for it."""
    eps: float = node._saved_epsilon if hasattr(node, "_saved_epsilon") else node._saved_eps
    return eps


def batch_norm_scale(node: Node) -> Tensor:
    """Return one over the standard deviation that a BatchNorm in evaluation mode divides by, (C,)."""
    scale: Tensor = (node._saved_running_var + batch_norm_eps(node)).rsqrt()
    return scale


# The input after normalisation and before the scale, in the shape of the input.


def _batch_normalised(node: Node) -> Tensor:
    x, mean, variance = node._saved_input, node._saved_running_mean, node._saved_running_var
    return torch.batch_norm(x, None, None, mean, variance, False, 0.0, batch_norm_eps(node), False)


def group_normalised(node: Node) -> Tensor:
    """Return the input of a GroupNorm, normalised."""
    x = node._saved_input
    grouped = x.reshape(x.shape[0], node._saved_group, -1)
    unit = _unit(grouped, node._saved_result1[..., None], node._saved_result2[..., None], (-1,))
    return unit.reshape(x.shape).to(x.dtype)


def layer_normalised(node: Node) -> Tensor:
    """Return the input of a LayerNorm, normalised."""
    x = node._saved_input
    dims = tuple(range(-len(node._saved_normalized_shape), 0))
    return _unit(x, node._saved_result1, node._saved_result2, dims).to(x.dtype)


def _unit(x: Tensor, mean: Tensor, scale: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return (x - mean) scale.

    Where gradients are recorded, mean and scale are computed again: those that a norm saves are detached from its
    input.
    """
    if not torch.is_grad_enabled():
        return (x - mean) * scale
    variance = x.var(dims, unbiased=False, keepdim=True)
    eps = scale.detach().square().reciprocal() - variance.detach()
    return (x - x.mean(dims, keepdim=True)) * (variance + eps).rsqrt()
