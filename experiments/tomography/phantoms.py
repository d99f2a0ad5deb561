"""Images to scan: the Shepp-Logan head, random rectangles and ellipses, and digits. All values are in [0, 1]."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.data import data_folder
from experiments.tomography.geometry import pixel_centres
from lapwing.errors import DataError
from lapwing.runtime.settings import integer, one_of
from lapwing.runtime.threads import uniform

# Value, half-axes, centre and angle in degrees of the ellipses of the head, in the square [-1, 1]², with the larger
# contrasts of Toft (1996).
HEAD = (
    (1.0, 0.69, 0.92, 0.0, 0.0, 0.0),
    (-0.8, 0.6624, 0.874, 0.0, -0.0184, 0.0),
    (-0.2, 0.11, 0.31, 0.22, 0.0, -18.0),
    (-0.2, 0.16, 0.41, -0.22, 0.0, 18.0),
    (0.1, 0.21, 0.25, 0.0, 0.35, 0.0),
    (0.1, 0.046, 0.046, 0.0, 0.1, 0.0),
    (0.1, 0.046, 0.046, 0.0, -0.1, 0.0),
    (0.1, 0.046, 0.023, -0.08, -0.605, 0.0),
    (0.1, 0.023, 0.023, 0.0, -0.606, 0.0),
    (0.1, 0.023, 0.046, 0.06, -0.605, 0.0),
)


def shepp_logan(size: int) -> Tensor:
    """Return the Shepp-Logan head phantom (size, size), float64, with contrasts that the eye can see.

    >>> shepp_logan(28).shape
    torch.Size([28, 28])
    """
    integer().check("size", size)
    image = torch.zeros(size, size, dtype=torch.float64)
    for value, a, b, x, y, degrees in HEAD:
        u, v = _turned(size, x, y, math.radians(degrees))
        image[(u / a).square() + (v / b).square() <= 1] += value
    return image.clamp(0, 1)  # sums of tenths are not exact


def rectangles(size: int, generator: torch.Generator | None, count: int = 3, spread: float = 0.05) -> Tensor:
    """Return random rectangles (size, size), float64, the largest value one.

    Their edges have nearly the same two directions, so some angles of a scan are worth more than others. Where
    rectangles overlap, their values add up.

    Args:
        size: the number of pixels along one side.
        generator: the source of randomness.
        count: the number of rectangles.
        spread: half the range of their angles around the common one, in radians.

    >>> rectangles(16, torch.Generator().manual_seed(0)).max()
    tensor(1., dtype=torch.float64)
    """
    _check_made(size, count)
    if not 0 <= spread < math.inf:
        raise DataError(f"spread is {spread}; expected a number of radians that is not negative.")
    draws = _draws(count + 1, generator)
    common = math.pi / 2 * draws[-1][0]
    image = torch.zeros(size, size, dtype=torch.float64)
    for place, side, other, turn, value in _shapes(draws[:-1]):
        u, v = _turned(size, *place, common + spread * (2 * turn - 1))
        image[(u.abs() <= side) & (v.abs() <= other)] += value
    return _scaled(image)


def ellipses(size: int, generator: torch.Generator | None, count: int = 8) -> Tensor:
    """Return random ellipses (size, size) in all directions, float64, the largest value one.

    Where ellipses overlap, their values add up.

    >>> ellipses(16, torch.Generator().manual_seed(0)).max()
    tensor(1., dtype=torch.float64)
    """
    _check_made(size, count)
    image = torch.zeros(size, size, dtype=torch.float64)
    for place, side, other, turn, value in _shapes(_draws(count, generator)):
        u, v = _turned(size, *place, math.pi * turn)
        image[(u / side).square() + (v / other).square() <= 1] += value
    return _scaled(image)


def digits(data_dir: str | Path | None, count: int, part: str = "test", name: str = "mnist") -> Tensor:
    """Return the first images (count, 28, 28) of NAME.npz, float64.

    Args:
        data_dir: the folder of the file; if None, the one that LAPWING_DATA names.
        count: the number of images.
        part: "test" or "train".
        name: that of the file, without its ending; it has grey images from 0 to 255 in ``x_test`` and ``x_train``.

    Raises:
        DataError: if there is no such folder or file, or it has fewer images.
    """
    integer().check("count", count)
    one_of(("test", "train")).check("part", part)
    path = data_folder(data_dir) / f"{name}.npz"
    if not path.exists():
        raise DataError(f"{path.name} is not in the data folder; expected it there, with the keys x_train and x_test.")
    with np.load(path, allow_pickle=False) as file:
        images = torch.from_numpy(file[f"x_{part}"][:count])
    if len(images) < count:
        raise DataError(f"count is {count}; expected at most {len(images)}, the number of images in {path.name}.")
    return images.double() / 255


def _check_made(size: Any, count: Any) -> None:
    integer().check("size", size)
    integer().check("count", count)


def _draws(count: int, generator: torch.Generator | None) -> list[list[float]]:
    like = torch.empty(0, dtype=torch.float64)
    return [[float(u) for u in row] for row in uniform((count, 6), generator, like)]


def _shapes(draws: list[list[float]]) -> list[tuple[tuple[float, float], float, float, float, float]]:
    """Return centre, two half-axes, share of a turn and value of each shape, in the square [-1, 1]²."""
    return [
        ((1.2 * (a - 0.5), 1.2 * (b - 0.5)), 0.08 + 0.4 * c, 0.08 + 0.4 * d, e, 0.2 + 0.8 * f)
        for a, b, c, d, e, f in draws
    ]


def _turned(size: int, x: float, y: float, angle: float) -> tuple[Tensor, Tensor]:
    """Return the pixels' coordinates along the axes of a shape at (x, y), turned by the angle against the clock."""
    across, up = (2 / size * part for part in pixel_centres(size))
    u, v = across - x, up - y
    return math.cos(angle) * u + math.sin(angle) * v, math.cos(angle) * v - math.sin(angle) * u


def _scaled(image: Tensor) -> Tensor:
    """Return the image with largest value one. The centre of a shape may fall between pixels that are too coarse."""
    return image / image.max() if bool(image.any()) else image
