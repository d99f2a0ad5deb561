"""The kernel between outputs that a prior over the weights implies."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lapwing.networks.jacobians import Block, BlockJacobian, LayerJacobians
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BlockPrior, BoundPrior


def prior_kernel(jacobians: LayerJacobians, prior: BoundPrior, other: LayerJacobians | None = None) -> Tensor:
    r"""Return K = J A⁻¹ J'ᵀ between all inputs and seeds of two batches, (B K, B' K'), or of one batch with itself.

    Computed layer by layer, without forming the Jacobian if the layers allow it. A layer with one precision is divided
    by it at the end. Differentiable in the precisions, and in the inputs if the Jacobians are.
    """
    selection = jacobians.selection
    total: Tensor | None = None
    for block, part, other_part in block_pairs(jacobians, other):
        block_prior = prior.on(block)
        value, weights = block_prior.value.to(jacobians.dtype), None
        if block_prior.scale is not None or selection.index is not None or value.ndim:
            weights = _inverse(block_prior, block, selection, jacobians.dtype)
        kernel = part.between(other_part, weights)
        kernel = kernel / value if value.ndim == 0 else kernel
        total = kernel if total is None else total + kernel
    assert total is not None
    return total


def block_pairs(
    one: LayerJacobians, other: LayerJacobians | None
) -> Iterator[tuple[Block, BlockJacobian, BlockJacobian]]:
    """Iterate over the blocks of two batches together; for one batch each block is formed once."""
    if other is None or other is one:
        yield from ((block, part, part) for block, part in one)
        return
    for (block, part), (_, other_part) in zip(one, other, strict=True):
        yield block, part, other_part


def _inverse(prior: BlockPrior, block: Block, selection: Selection, dtype: torch.dtype) -> Tensor:
    """Return one over the precision in the block's form, zero for entries that are not selected.

    A scalar ``prior.value`` is left out; the caller divides by it.
    """
    ones = torch.ones(selection.size, dtype=dtype, device=prior.value.device)
    inverse = block.arrange(selection.split(ones))
    if prior.scale is not None:
        inverse = inverse / prior.scale.to(inverse).clamp_min(torch.finfo(dtype).tiny)
    if prior.value.ndim == 0:
        return inverse
    each = torch.where(inverse > 0, prior.value.to(inverse), 1)  # entries that are not selected have no precision
    return inverse / each
