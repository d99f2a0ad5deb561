"""Scanner geometries: which rays are measured at which angles.

An image of n x n pixels covers the square [-n/2, n/2]², so that a pixel has side one. Columns run along x; rows run
downwards, against y. At angle φ the central ray runs in the direction (-sin φ, cos φ), and the detector along
(cos φ, sin φ): at angle zero, a parallel beam sums the columns of the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from lapwing.errors import DataError
from lapwing.runtime.settings import NONE, POSITIVE, HasSettings, Rule, integer, is_integer, is_real, required, setting

ANGLES = Rule(
    "the number of angles, an integer of at least 1, or a tuple of angles in radians, at least one and all finite",
    lambda v: v >= 1 if is_integer(v) else _are_angles(v),
    DataError,
)


class Geometry(Protocol):
    """Rays through a square image, ``bins`` of them at each of several angles."""

    period: ClassVar[float]  # the range of angles in which every line is measured; they repeat after it

    @property
    def size(self) -> int:
        """The number of pixels along one side of the image."""
        ...

    @property
    def radians(self) -> tuple[float, ...]:
        """The angles."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of angles and of detector bins: the shape of a sinogram."""
        ...

    @property
    def source_distance(self) -> float:
        """The distance from the source to the centre of the image; infinite for parallel rays."""
        ...

    @property
    def magnification(self) -> float:
        """How much larger the shadow on the detector is than what is at the centre of the image."""
        ...

    @property
    def offsets(self) -> Tensor:
        """The centres of the bins on the detector (bins,), float64."""
        ...

    def rays(self) -> tuple[Tensor, Tensor]:
        """Return where the rays start and end, both (angles, bins, 2) and outside the image, float64."""
        ...

    def with_angles(self, radians: Sequence[float]) -> Geometry:
        """Return the geometry with other angles."""
        ...


@dataclass(frozen=True)
class ParallelBeam(HasSettings):
    """Parallel rays at each angle, on a detector that covers the diagonal of the image.

    Args:
        size: the number of pixels along one side of the image.
        angles: their number n, for the angles i π / n from zero on, or the angles themselves, in radians.
        bins: the number of detector bins; by default 2 ⌈n/2 √2⌉ + 1 for an image of n x n pixels.

    >>> ParallelBeam(28, angles=10).shape
    (10, 41)
    """

    size: int = setting(28, integer())
    angles: int | tuple[float, ...] = setting(10, ANGLES)
    bins: int | None = setting(None, integer() | NONE)
    period: ClassVar[float] = math.pi
    source_distance: ClassVar[float] = math.inf
    magnification: ClassVar[float] = 1.0

    @property
    def radians(self) -> tuple[float, ...]:
        return _radians(self.angles, self.period)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.radians), self.bins or 2 * math.ceil(self.size / 2 * math.sqrt(2)) + 1

    @property
    def offsets(self) -> Tensor:
        return _centres(self.shape[1], self.size * math.sqrt(2))

    def rays(self) -> tuple[Tensor, Tensor]:
        across, along = _axes(self.radians)
        middle = self.offsets[:, None] * across[:, None]
        reach = self.size * along[:, None]  # beyond the half diagonal of the image
        return middle - reach, middle + reach

    def with_angles(self, radians: Sequence[float]) -> ParallelBeam:
        return replace(self, angles=tuple(radians))


@dataclass(frozen=True)
class FanBeam(HasSettings):
    """Rays from a point source to a flat detector, which turn around the image together. Distances are in pixels.

    Args:
        size: the number of pixels along one side of the image.
        angles: their number n, for the angles 2 i π / n from zero on, or the angles themselves, in radians.
        bins: the number of detector bins.
        source_distance: from the source to the centre of the image.
        detector_distance: from the centre of the image to the detector.
        detector_width: by default as wide as the shadow of the circle around the image.

    >>> FanBeam(501, angles=60, bins=128, source_distance=660.0, detector_distance=1330.0).shape
    (60, 128)
    """

    size: int = required(integer())
    angles: int | tuple[float, ...] = required(ANGLES)
    bins: int = required(integer())
    source_distance: float = required(POSITIVE)
    detector_distance: float = required(POSITIVE)
    detector_width: float | None = setting(None, POSITIVE | NONE)
    period: ClassVar[float] = 2 * math.pi

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("source_distance", "detector_distance"):
            if getattr(self, name) <= self._radius:
                raise DataError(
                    f"{name} is {getattr(self, name):g}; expected more than {self._radius:g}, half the diagonal of "
                    "the image, so that it turns outside the image."
                )

    @property
    def radians(self) -> tuple[float, ...]:
        return _radians(self.angles, self.period)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.radians), self.bins

    @property
    def magnification(self) -> float:
        return 1 + self.detector_distance / self.source_distance

    @property
    def width(self) -> float:
        """The width of the detector."""
        slope = self._radius / math.sqrt(self.source_distance**2 - self._radius**2)
        return self.detector_width or 2 * (self.source_distance + self.detector_distance) * slope

    @property
    def offsets(self) -> Tensor:
        return _centres(self.bins, self.width)

    def rays(self) -> tuple[Tensor, Tensor]:
        across, along = _axes(self.radians)
        end = self.detector_distance * along[:, None] + self.offsets[:, None] * across[:, None]
        return (-self.source_distance * along[:, None]).expand_as(end), end

    def with_angles(self, radians: Sequence[float]) -> FanBeam:
        return replace(self, angles=tuple(radians))

    @property
    def _radius(self) -> float:
        return self.size / math.sqrt(2)


def pixel_centres(size: int) -> tuple[Tensor, Tensor]:
    """Return x and y of the pixels, each (size, size), float64.

    >>> pixel_centres(2)[1]
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]], dtype=torch.float64)
    """
    x = _centres(size, size)
    return x.expand(size, size), -x[:, None].expand(size, size)


def require_geometry(geometry: Any) -> None:
    """Raise unless this is a geometry of this module."""
    Rule("a ParallelBeam or a FanBeam", lambda v: isinstance(v, ParallelBeam | FanBeam), DataError).check(
        "geometry", geometry
    )


def _are_angles(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(is_real(a) and math.isfinite(a) for a in value)


def _radians(angles: int | tuple[float, ...], period: float) -> tuple[float, ...]:
    if isinstance(angles, tuple):
        return angles
    return tuple(i * period / angles for i in range(angles))


def _centres(count: int, width: float) -> Tensor:
    """Return the centres of equal cells that cover an interval around zero, in order."""
    return (torch.arange(count, dtype=torch.float64) - (count - 1) / 2) * (width / count)


def _axes(radians: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return the directions across and along the rays at each angle, both (angles, 2)."""
    angle = torch.tensor(radians, dtype=torch.float64)
    across = torch.stack([angle.cos(), angle.sin()], 1)
    return across, torch.stack([-across[:, 1], across[:, 0]], 1)
