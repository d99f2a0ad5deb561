"""Where the entries of a block sit in the flat vector of weights, from the definition of a block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def places(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """For each parameter the positions of its entries in theta, in the parameter's own shape."""
    found, start = {}, 0
    for name, shape in zip(names, shapes, strict=True):
        size = torch.Size(shape).numel()
        found[name] = torch.arange(start, start + size).reshape(shape)
        start += size
    return found


def order(block: Any, where: dict[str, Tensor]) -> Tensor:
    """Positions in theta of a block's entries, in the order (group, output, input, bias last)."""
    weight = where[block.weight]
    if block.kind in ("dense", "opaque"):
        return weight.reshape(-1)
    if block.kind == "rows":  # (groups x outputs, inputs...)
        matrix = weight.reshape(block.groups, weight.shape[0] // block.groups, -1)
    else:  # (groups x inputs, outputs...)
        matrix = weight.reshape(block.groups, weight.shape[0] // block.groups, -1).transpose(1, 2)
    if block.bias is not None:
        matrix = torch.cat([matrix, where[block.bias].reshape(*matrix.shape[:2], 1)], 2)
    return matrix.reshape(-1)


def assembled(curvature: Any) -> Tensor:
    """The (P, P) matrix that a blockwise curvature stands for, from each block's own dense matrix."""
    selection = curvature.selection
    where = places(selection.names, selection.shapes)
    size = sum(p.numel() for p in where.values())
    total = torch.zeros(size, size, dtype=curvature.blocks[0].dense().dtype)
    for structure, block in zip(curvature.blocks, curvature.layout, strict=True):
        index = order(block, where)
        total[index[:, None], index[None, :]] = structure.dense()
    return total
