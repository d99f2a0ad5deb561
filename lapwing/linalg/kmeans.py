"""K-means clustering."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.core.random import uniform

CHUNK = 2**22  # distances in memory at once


def kmeans(points: Tensor, count: int, generator: torch.Generator | None = None, steps: int = 25) -> Tensor:
    """Return centres (count, D) of points (N, D), by k-means++ and then Lloyd's steps until no centre changes.

    Distances are formed in chunks, so memory does not grow with N times ``count``. A centre without points stays.

    >>> points = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    >>> kmeans(points, 2, torch.Generator().manual_seed(0)).sort(0).values.tolist()
    [[0.5], [10.5]]
    """
    centres = _initial_centres(points, count, generator)
    for _ in range(steps):
        nearest = _nearest(points, centres)
        sums = torch.zeros_like(centres, dtype=torch.float64).index_add_(0, nearest, points.double())
        sizes = torch.bincount(nearest, minlength=len(centres)).to(sums)
        means = torch.where(sizes[:, None] > 0, (sums / sizes[:, None].clamp_min(1)).to(centres), centres)
        if torch.equal(means, centres):
            break
        centres = means
    return centres


def centres_by_class(rows: Tensor, labels: Tensor | None, numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Return one centre for each of the sorted class numbers (M,), (M, D): k-means of the rows (N, D) of its class.

    A class without rows, and every class if ``labels`` (N,) are None, takes all rows.
    """
    centres = []
    for number, count in zip(*(t.tolist() for t in numbers.unique_consecutive(return_counts=True)), strict=True):
        members = rows if labels is None else rows[labels == number]
        centres.append(kmeans(members if len(members) else rows, count, generator))
    return torch.cat(centres)


def _initial_centres(points: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw centres among the points, with probability proportional to the squared distance to those drawn before."""
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
    """Return the number of the nearest centre (N,) of every point.

    Coordinates are relative to the mean of the centres, so that squares of a common offset do not cause rounding.
    """
    step = max(1, CHUNK // len(centres))
    middle = centres.double().mean(0).to(centres)
    about = centres - middle
    half = 0.5 * about.square().sum(1)
    return torch.cat([((part - middle) @ about.mT - half).argmax(1) for part in points.split(step)])
