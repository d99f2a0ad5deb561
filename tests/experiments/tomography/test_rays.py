"""Lengths of rays in pixels, against each pixel cut by each ray in turn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.tomography.geometry import FanBeam, Geometry, ParallelBeam, pixel_centres
from experiments.tomography.rays import _lengths, angle_operators, ray_transform
from lapwing.errors import DataError
from tests.tolerances import assert_close, assert_near

D = torch.float64
GEOMETRIES: dict[str, Geometry] = {
    "parallel, even": ParallelBeam(6, angles=5, bins=8),  # no ray along an edge
    "parallel, odd": ParallelBeam(7, angles=4, bins=12),  # rays through corners at 45 degrees
    "parallel, any angles": ParallelBeam(5, angles=(0.1, 3.3, -1.2, 1e-7)),
    "fan": FanBeam(6, angles=7, bins=10, source_distance=9.0, detector_distance=14.0),
    "narrow fan": FanBeam(7, angles=4, bins=4, source_distance=6.0, detector_distance=6.0, detector_width=5.0),
}


def cut(low: float, high: float, start: float, step: float) -> tuple[float, float]:
    """Return the part of a ray between two parallel lines, as shares of its way."""
    if abs(step) < 1e-13:
        return (-math.inf, math.inf) if low < start < high else (math.inf, -math.inf)
    ends = (low - start) / step, (high - start) / step
    return min(ends), max(ends)


def reference(geometry: Geometry) -> Tensor:
    """Return the matrix: the length of each ray between the four sides of each pixel."""
    n = geometry.size
    start, end = (part.reshape(-1, 2).tolist() for part in geometry.rays())
    matrix = torch.zeros(len(start), n * n, dtype=D)
    for ray, ((x, y), (x_end, y_end)) in enumerate(zip(start, end)):
        for i in range(n):
            for j in range(n):
                across = cut(j - n / 2, j + 1 - n / 2, x, x_end - x)
                down = cut(n / 2 - i - 1, n / 2 - i, y, y_end - y)
                share = min(across[1], down[1]) - max(across[0], down[0])
                matrix[ray, i * n + j] = max(share, 0.0) * math.hypot(x_end - x, y_end - y)
    return matrix


@pytest.mark.parametrize("name", GEOMETRIES)
def test_lengths_are_those_of_each_ray_in_each_pixel(name: str) -> None:
    operator = ray_transform(GEOMETRIES[name])
    assert operator.rows == math.prod(GEOMETRIES[name].shape)
    assert_near(operator.dense(), reference(GEOMETRIES[name]), 1e-10)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_lengths_of_a_ray_add_up_to_its_chord(name: str) -> None:
    """The image as a single pixel."""
    geometry = GEOMETRIES[name]
    n = geometry.size
    chords = []
    for (x, y), (x_end, y_end) in zip(*(part.reshape(-1, 2).tolist() for part in geometry.rays())):
        across, down = cut(-n / 2, n / 2, x, x_end - x), cut(-n / 2, n / 2, y, y_end - y)
        chords.append(max(min(across[1], down[1]) - max(across[0], down[0]), 0.0) * math.hypot(x_end - x, y_end - y))
    total = ray_transform(geometry).forward(torch.ones(n * n, dtype=D))
    assert_near(total, torch.tensor(chords, dtype=D), 1e-10)
    assert float(total.max()) > n


@pytest.mark.parametrize("angle", [0.0, math.pi / 2, math.pi, 1.5 * math.pi, -math.pi / 2])
def test_a_ray_along_an_edge_counts_half_on_both_sides(angle: float) -> None:
    """The middle bin of an odd detector, in an even image."""
    columns = ray_transform(ParallelBeam(4, (angle,), bins=5)).dense()
    image = columns[2].reshape(4, 4)
    sideways = bool(abs(math.sin(angle)) > 0.5)
    lines = image if sideways else image.T
    assert_near(lines, torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=D)[:, None].expand(4, 4), 1e-12)
    assert float(columns[2].sum()) == pytest.approx(4, rel=1e-12)
    fan = FanBeam(4, (angle,), bins=3, source_distance=5.0, detector_distance=6.0)
    assert_near(ray_transform(fan).dense()[1], columns[2], 1e-12)


def test_a_ray_along_the_border_counts_half() -> None:
    """The first ray runs along the border, the second beside the image, and the third through the outer pixels."""
    start = torch.tensor([[2.0, -9.0], [2.1, -9.0], [1.9, -9.0]], dtype=D)
    row, column, length = _lengths(start, start * torch.tensor([1.0, -1.0], dtype=D), size=4, first=5)
    assert_near(length, torch.tensor([0.5] * 4 + [1.0] * 4, dtype=D), 1e-12)
    assert row.tolist() == [5] * 4 + [7] * 4
    assert sorted(column.tolist()) == [3, 3, 7, 7, 11, 11, 15, 15]


@pytest.mark.parametrize("make", [lambda a: ParallelBeam(6, a), lambda a: FanBeam(6, a, 9, 8.0, 10.0)])
def test_turning_image_and_scanner_by_90_degrees_changes_nothing(make: Any, generator: torch.Generator) -> None:
    """Rays along edges are among them: the middle bin of an odd detector, an even image, angle zero."""
    angles = (0.0, 0.3, math.pi / 4, 1.1)
    image = torch.rand(6, 6, generator=generator, dtype=D)
    upright = ray_transform(make(angles)).forward(image.reshape(-1))
    for turns in (1, 2, 3):
        turned = ray_transform(make(tuple(a + turns * math.pi / 2 for a in angles)))
        assert_near(turned.forward(image.rot90(turns).reshape(-1)), upright, 1e-10)


def test_a_distant_source_is_a_parallel_beam(generator: torch.Generator) -> None:
    """Rays of a fan from a distance r differ in their slope by offset / r."""
    distance = 1e6
    beam = ParallelBeam(6, angles=(0.2, 0.9, 2.0), bins=7)
    fan = FanBeam(6, beam.radians, 7, distance, 10.0, detector_width=6 * math.sqrt(2))
    image = torch.rand(36, generator=generator, dtype=D)
    assert_near(ray_transform(fan).forward(image), ray_transform(beam).forward(image), 40 * 6 / distance)


def test_projections_of_a_disc_have_its_chord_lengths() -> None:
    """A disc of radius 20 in pixels that know only whether their centre is inside: errors of about a pixel."""
    size, radius = 64, 20.0
    x, y = pixel_centres(size)
    beam = ParallelBeam(size, angles=7)
    sinogram = ray_transform(beam).forward((x.hypot(y) < radius).to(D).reshape(-1)).reshape(beam.shape)
    chords = 2 * (radius**2 - beam.offsets.square()).clamp_min(0).sqrt()
    inner = beam.offsets.abs() < 0.8 * radius
    assert_near(sinogram[:, inner], chords[inner].expand(7, -1), 3.5)
    assert_near(sinogram[:, inner].mean(0), chords[inner], 1.2)
    width = float(beam.offsets[1] - beam.offsets[0])
    mass = sinogram.sum(1) * width
    assert_near(mass / (math.pi * radius**2), torch.ones(7, dtype=D), 0.02)


def test_one_operator_for_each_angle() -> None:
    beam = ParallelBeam(5, angles=3)
    each = angle_operators(beam)
    assert_close(torch.cat([one.dense() for one in each]), ray_transform(beam).dense())


def test_float32_is_float64_rounded() -> None:
    beam = ParallelBeam(5, angles=3)
    operator = ray_transform(beam, torch.float32)
    assert operator.like.dtype == torch.float32
    assert_close(operator.dense(), ray_transform(beam).dense())


def test_other_arguments_are_refused() -> None:
    with pytest.raises(DataError, match="geometry is None; expected a ParallelBeam or a FanBeam"):
        ray_transform(None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"dtype is torch.float16; expected torch.float32 or torch.float64"):
        ray_transform(ParallelBeam(), torch.float16)
