"""BatchNorm, GroupNorm and LayerNorm: gradients, how they use scale and shift, and their statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lapwing.networks.operation import NormStatistics, NoRuleError, Sources, UseRule
from lapwing.networks.uses import Factor, Node, Use, elementwise


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
