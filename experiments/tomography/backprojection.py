"""Filtered back-projection of sinograms of parallel and fan beams."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from experiments.tomography.geometry import Geometry, pixel_centres, require_geometry
from lapwing.errors import DataError
from lapwing.runtime.settings import describe, one_of

WINDOWS = ("none", "hann")


def fbp(geometry: Geometry, sinogram: Tensor, window: str = "none") -> Tensor:
    r"""Reconstruct images by filtered back-projection, which is linear in the sinogram.

    $$ f(p) = \sum_\varphi w_\varphi \, q_\varphi(p \cdot \theta_\varphi), \qquad q = \text{ramp} * y $$

    Each angle counts as much as half of the distance to its neighbours on both sides, so that angles may be uneven. A
    fan beam takes the formula for a flat detector: measurements weighted by the cosine of their ray, and values by the
    inverse square of the distance from the source. It needs angles from the whole circle; on a part of it the result
    is an approximation.

    Args:
        geometry: which rays were measured.
        sinogram: (..., angles * bins) float32 or float64, as the ray transform returns it.
        window: "none" for the plain ramp filter, or "hann" to damp high frequencies.

    Returns:
        The images (..., size, size).

    >>> from experiments.tomography.geometry import ParallelBeam
    >>> fbp(ParallelBeam(size=4, angles=3), torch.zeros(2, 21)).shape
    torch.Size([2, 4, 4])
    """
    require_geometry(geometry)
    one_of(WINDOWS).check("window", window)
    y = _checked(geometry, sinogram)
    offsets = geometry.offsets / geometry.magnification  # on a detector through the centre of the image
    spacing, source = _spacing(offsets), geometry.source_distance
    cosine = (1 + (offsets / source).square()).rsqrt()
    filtered = _filtered(y * cosine.to(y), spacing, window)
    x, up = (part.reshape(-1).to(y) for part in pixel_centres(geometry.size))
    image = y.new_zeros(*y.shape[:-2], len(x))
    for row, angle, share in zip(filtered.unbind(-2), geometry.radians, _shares(geometry), strict=True):
        across, along = x * math.cos(angle) + up * math.sin(angle), up * math.cos(angle) - x * math.sin(angle)
        scale = 1 / (1 + along / source)
        image += share * scale.square() * _interpolated(row, across * scale / spacing)
    return image.reshape(*y.shape[:-2], geometry.size, geometry.size)


def _spacing(offsets: Tensor) -> float:
    if len(offsets) < 2:
        raise DataError("the detector has 1 bin; expected at least 2 for filtered back-projection.")
    return float(offsets[1] - offsets[0])


def _shares(geometry: Geometry) -> list[float]:
    """Return the weight of each angle: half of the distance to its neighbours on the circle of angles.

    They add up to π: a fan measures every line twice in a whole turn, so each measurement counts half.
    """
    angles = torch.tensor(geometry.radians, dtype=torch.float64) % geometry.period
    ordered, order = angles.sort()
    gaps = torch.cat([ordered[1:], ordered[:1] + geometry.period]) - ordered
    shares = torch.empty_like(angles)
    shares[order] = (gaps + gaps.roll(1)) / 2 * (math.pi / geometry.period)
    return [float(share) for share in shares]


def _filtered(y: Tensor, spacing: float, window: str) -> Tensor:
    """Return the rows (..., bins), zero outside, convolved with the ramp filter of this spacing.

    The filter is that of an image without frequencies above those of the bins, sampled in space: sampling the ramp in
    frequency instead would give every reconstruction a wrong mean.
    """
    bins = y.shape[-1]
    length = 2 ** math.ceil(math.log2(2 * bins))
    number = torch.fft.fftfreq(length, 1 / length, dtype=torch.float64, device=y.device)
    odd = number % 2 == 1
    kernel = torch.where(odd, -1 / (math.pi * torch.where(odd, number, 1.0)).square(), 0.0)
    kernel[0] = 0.25
    response = torch.fft.rfft(kernel).real / spacing
    if window == "hann":
        frequency = torch.fft.rfftfreq(length, dtype=torch.float64, device=y.device)
        response = response * (0.5 + 0.5 * torch.cos(2 * math.pi * frequency))
    product: Tensor = torch.fft.irfft(torch.fft.rfft(y, length) * response.to(y), length)
    return product[..., :bins]


def _interpolated(values: Tensor, position: Tensor) -> Tensor:
    """Return values (..., bins) at positions (pixels,), in bins from the middle; linear in between, zero outside."""
    bins = values.shape[-1]
    place = position + (bins - 1) / 2
    left = place.floor()
    share = place - left
    total = torch.zeros_like(position)
    for index, part in ((left, 1 - share), (left + 1, share)):
        inside = (index >= 0) & (index < bins)
        total = total + values[..., index.clamp(0, bins - 1).long()] * (part * inside)
    return total


def _checked(geometry: Geometry, sinogram: Any) -> Tensor:
    """Return the sinogram as (..., angles, bins); raise if it has another width or type, or is not finite."""
    angles, bins = geometry.shape
    good = isinstance(sinogram, Tensor) and sinogram.dtype in (torch.float32, torch.float64) and sinogram.ndim
    if not good or sinogram.shape[-1] != angles * bins:
        raise DataError(
            f"sinogram is {describe(sinogram)}; expected float32 or float64 numbers of shape (..., {angles * bins}), "
            "for "
            f"{angles} angles and {bins} bins."
        )
    if not bool(sinogram.isfinite().all()):
        raise DataError("sinogram has numbers that are not finite; expected finite ones.")
    return sinogram.unflatten(-1, (angles, bins))
