"""The kernel that the prior over the weights makes between outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.networks.jacobians import LayerJacobians
from lapwing.priors.gaussian import Prior


def prior_kernel(jacobians: LayerJacobians, prior: Prior) -> Tensor:
    r"""K = J A⁻¹ Jᵀ between all inputs and seeds, (B K, B K), differentiable in the precisions.

    Layer by layer and without the Jacobian where the layers allow; a layer with one precision is divided by it last.
    """
    selection = jacobians.selection
    ones = selection.split(torch.ones(selection.size, dtype=jacobians.dtype, device=prior.values.device))
    total: Tensor | None = None
    for block, part in jacobians:
        own = prior.on(block)
        inverse = block.arrange(ones)  # nought where single weights are not selected
        if own.scale is not None:
            inverse = inverse / own.scale.to(inverse).clamp_min(torch.finfo(inverse.dtype).tiny)
        value = own.value.to(inverse)
        each = torch.where(inverse > 0, value, 1)  # there is no precision where single weights are not selected
        found = part.cross(inverse) / value if value.ndim == 0 else part.cross(inverse / each)
        total = found if total is None else total + found
    assert total is not None
    return total


def seeded(root: Tensor) -> Tensor:
    """R (B, C, K) -> (K, B, C); R (B, T, C, K) -> (T K, B, T, C), one token alive in each."""
    if root.ndim == 3:
        return root.permute(2, 0, 1)
    batch, tokens, classes, columns = root.shape
    seeds = root.new_zeros(tokens, columns, batch, tokens, classes)
    index = torch.arange(tokens, device=root.device)
    seeds[index, :, :, index] = root.permute(1, 3, 0, 2)
    return seeds.reshape(tokens * columns, batch, tokens, classes)
