"""The ray transform: the exact length of every ray in every pixel, as a sparse operator (Siddon's method)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from experiments.tomography.geometry import Geometry, require_geometry
from lapwing.errors import DataError
from lapwing.linalg.operators import SparseOperator
from lapwing.runtime.settings import Rule

STRAIGHT = 1e-12  # a smaller slope is that of a ray parallel to an axis: cos(π/2) is 6e-17
ON_EDGE = 1e-9  # pixels; a ray parallel to an axis that is nearer to an edge runs along it
SHORTEST = 1e-12  # pixels; shorter pieces are rounding errors of rays through corners
DTYPE = Rule("torch.float32 or torch.float64", lambda v: v in (torch.float32, torch.float64), DataError)

Entries = tuple[Tensor, Tensor, Tensor]  # rows, columns and values, each (entries,)


def ray_transform(
    geometry: Geometry, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
) -> SparseOperator:
    """Return the operator that maps an image, flattened row by row, to its line integrals, flattened angle by angle.

    A ray that runs along an edge between two pixels counts half in each of them, and half in the image if it runs along
    the border. The lengths are computed in float64, one angle after another.

    Args:
        geometry: which rays are measured.
        dtype: float32 or float64.
        device: where the operator lies; by default on the CPU.

    Returns:
        The operator, of shape (angles * bins, size * size).

    >>> from experiments.tomography.geometry import ParallelBeam
    >>> operator = ray_transform(ParallelBeam(size=3, angles=2, bins=3))
    >>> operator.forward(torch.ones(9, dtype=torch.float64)).reshape(2, 3)
    tensor([[3., 3., 3.],
            [3., 3., 3.]], dtype=torch.float64)
    """
    require_geometry(geometry)
    DTYPE.check("dtype", dtype)
    bins = geometry.shape[1]
    parts = [
        _lengths(start, end, geometry.size, first=number * bins)
        for number, (start, end) in enumerate(zip(*geometry.rays(), strict=True))
    ]
    row, column, value = (torch.cat(part) for part in zip(*parts, strict=True))
    shape = math.prod(geometry.shape), geometry.size**2
    return SparseOperator.from_entries(row, column, value, shape).to(device, dtype)


def angle_operators(geometry: Geometry, **options: Any) -> tuple[SparseOperator, ...]:
    """Return one ray transform for each angle of the geometry; the options are those of ``ray_transform``."""
    require_geometry(geometry)
    return tuple(ray_transform(geometry.with_angles((angle,)), **options) for angle in geometry.radians)


def _lengths(start: Tensor, end: Tensor, size: int, first: int) -> Entries:
    """Return the lengths of rays (bins, 2) in the pixels; the number of the first ray is given."""
    ray, begin, step, weight = _placed(start, end, size)
    t = _crossings(begin, step, size)
    length = t.diff() * step.norm(dim=1)[:, None]
    middle = begin[:, None] + step[:, None] * ((t[:, 1:] + t[:, :-1]) / 2)[..., None]
    pixel = middle.floor().clamp(0, size - 1).long()
    kept = length > SHORTEST
    number = (ray[:, None] + first).expand_as(kept)[kept]
    column = (pixel[..., 1] * size + pixel[..., 0])[kept]
    return number, column, (length * weight[:, None])[kept]


def _placed(start: Tensor, end: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the number, start, direction and weight of each ray, in coordinates (column, row) of the pixels.

    Rays that are nearly parallel to an axis become exactly so. One that runs along an edge becomes two of half the
    weight, through the middle of the pixels on both sides.
    """
    flip = start.new_tensor([1.0, -1.0])
    begin, step = start * flip + size / 2, (end - start) * flip
    straight = step.abs() <= STRAIGHT * step.norm(dim=1, keepdim=True)
    begin = torch.where(straight, begin + step / 2, begin)
    step = torch.where(straight, 0.0, step)
    edge = straight & ((begin - begin.round()).abs() <= ON_EDGE)
    shift, on_edge = 0.5 * edge, edge.any(1)
    ray = torch.arange(len(begin), device=begin.device)
    weight = torch.where(on_edge, 0.5, 1.0).to(begin)
    return (
        torch.cat([ray, ray[on_edge]]),
        torch.cat([begin - shift, (begin + shift)[on_edge]]),
        torch.cat([step, step[on_edge]]),
        torch.cat([weight, weight[on_edge]]),
    )


def _crossings(begin: Tensor, step: Tensor, size: int) -> Tensor:
    """Return where each ray crosses the lines of the grid inside the image (rays, 2 size + 4), in order.

    They are shares of the way from start to end. Crossings outside the image are moved to where the ray enters or
    leaves it; a ray that misses the image has all of its crossings at one point.
    """
    lines = torch.arange(size + 1, dtype=begin.dtype, device=begin.device)
    straight = step == 0
    t = (lines - begin[..., None]) / torch.where(straight, 1.0, step)[..., None]  # (rays, 2, size + 1)
    first, last = t[..., [0, -1]].amin(-1), t[..., [0, -1]].amax(-1)
    beside = straight & ((begin < 0) | (begin > size))
    enter = torch.where(straight, 0.0, first).amax(1).clamp_min(0)
    leave = torch.where(straight, 1.0, last).amin(1).clamp_max(1)
    leave = torch.where(beside.any(1), enter, torch.maximum(enter, leave))
    t = torch.where(straight[..., None], enter[:, None, None], t).flatten(1)
    ends = torch.stack([enter, leave], 1)
    return torch.cat([torch.minimum(torch.maximum(t, ends[:, :1]), ends[:, 1:]), ends], 1).sort(1).values
