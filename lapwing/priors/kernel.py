"""The kernel that the prior over the weights makes between outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lapwing.networks.block_jacobian import BlockJacobian
from lapwing.networks.blocks import Block
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.selection import Selection
from lapwing.priors.gaussian import BlockPrior, Prior


def prior_kernel(jacobians: LayerJacobians, prior: Prior, other: LayerJacobians | None = None) -> Tensor:
    r"""K = J A⁻¹ J'ᵀ between all inputs and seeds of two batches, (B K, B' K'); of one with itself where no other is.

    Layer by layer and without the Jacobian where the layers allow; a layer with one precision is divided by it last.
    Differentiable in the precisions, and in the inputs where the Jacobians are.
    """
    selection = jacobians.selection
    total: Tensor | None = None
    for block, part, against in pairs(jacobians, other):
        own = prior.on(block)
        value, weights = own.value.to(jacobians.dtype), None
        if own.scale is not None or selection.index is not None or value.ndim:
            weights = _inverse(own, block, selection, jacobians.dtype)
        found = part.between(against, weights)
        found = found / value if value.ndim == 0 else found
        total = found if total is None else total + found
    assert total is not None
    return total


def pairs(one: LayerJacobians, other: LayerJacobians | None) -> Iterator[tuple[Block, BlockJacobian, BlockJacobian]]:
    """The blocks of two batches side by side; a batch with itself is formed once."""
    if other is None or other is one:
        yield from ((block, part, part) for block, part in one)
        return
    for (block, part), (_, against) in zip(one, other, strict=True):
        yield block, part, against


def _inverse(own: BlockPrior, block: Block, selection: Selection, dtype: torch.dtype) -> Tensor:
    """One over the precision in the block's form, but for a value that all its weights share; nought where single
    weights are not selected."""
    ones = torch.ones(selection.size, dtype=dtype, device=own.value.device)
    inverse = block.arrange(selection.split(ones))
    if own.scale is not None:
        inverse = inverse / own.scale.to(inverse).clamp_min(torch.finfo(dtype).tiny)
    if own.value.ndim == 0:
        return inverse
    each = torch.where(inverse > 0, own.value.to(inverse), 1)  # no precision where single weights are not selected
    return inverse / each
