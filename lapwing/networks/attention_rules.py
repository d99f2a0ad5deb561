"""How gradients are pulled back through attention: in one kernel, or made of products and a softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lapwing.core.memory import gathered, runs
from lapwing.networks.operation import NoRuleError, signed
from lapwing.networks.uses import Node


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
    pieces = runs(len(grad), each, grad.device)
    parts = [_at_run(grad[run], weights, factors, operands) for run in pieces]
    return [gathered(iter(some), len(grad)) for some in zip(*parts, strict=True)]


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
