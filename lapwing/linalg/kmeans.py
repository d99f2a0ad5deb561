"""Centres of a cloud of points."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.core.random import uniform

CHUNK = 2**22  # distances held at once


def kmeans(points: Tensor, count: int, generator: torch.Generator | None = None, steps: int = 25) -> Tensor:
    """Centres (count, D) of points (N, D): k-means++ seeds, then Lloyd's steps until none moves.

    Distances are formed in chunks, so memory does not grow with N times ``count``. An empty centre stays where it is.

    >>> points = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    >>> kmeans(points, 2, torch.Generator().manual_seed(0)).sort(0).values.tolist()
    [[0.5], [10.5]]
    """
    centres = _seeds(points, count, generator)
    for _ in range(steps):
        nearest = _nearest(points, centres)
        sums = torch.zeros_like(centres, dtype=torch.float64).index_add_(0, nearest, points.double())
        sizes = torch.bincount(nearest, minlength=len(centres)).to(sums)
        moved = torch.where(sizes[:, None] > 0, (sums / sizes[:, None].clamp_min(1)).to(centres), centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres


def _seeds(points: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Each drawn with a probability that grows with the squared distance to those before it."""
    draws = uniform((count,), generator, points.double())
    chosen = [int(draws[0] * len(points))]
    gap = (points - points[chosen[0]]).square().sum(1).double()
    for draw in draws[1:]:
        steps = gap.cumsum(0)
        last = float(steps[-1])
        place = int(torch.searchsorted(steps, draw * last)) if last > 0 else int(draw * len(points))
        chosen.append(min(place, len(points) - 1))
        gap = torch.minimum(gap, (points - points[chosen[-1]]).square().sum(1).double())
    return points[chosen].clone()


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Measured from the middle of the centres: squares of what all have in common would drown their differences."""
    step = max(1, CHUNK // len(centres))
    middle = centres.double().mean(0).to(centres)
    about = centres - middle
    half = 0.5 * about.square().sum(1)
    return torch.cat([((part - middle) @ about.mT - half).argmax(1) for part in points.split(step)])
