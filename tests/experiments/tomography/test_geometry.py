"""Where the rays of the geometries run, and settings that make no sense."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from experiments.tomography.geometry import FanBeam, Geometry, ParallelBeam, pixel_centres, require_geometry
from lapwing.errors import DataError, LapwingError
from tests.tolerances import assert_close

FAN = FanBeam(size=6, angles=5, bins=7, source_distance=11.0, detector_distance=13.0)


def test_the_default_detector_covers_the_diagonal() -> None:
    beam = ParallelBeam(28, angles=5)
    assert beam.shape == (5, 41)
    offsets = beam.offsets
    width = float(offsets[1] - offsets[0])
    assert float(offsets[-1]) + width / 2 == pytest.approx(14 * math.sqrt(2), rel=1e-14)
    assert float(offsets[20]) == 0
    assert beam.radians == pytest.approx([0, math.pi / 5, 2 * math.pi / 5, 3 * math.pi / 5, 4 * math.pi / 5])
    assert ParallelBeam(9, angles=2, bins=4).shape == (2, 4)


def test_parallel_rays_are_at_the_offsets_and_cross_the_image() -> None:
    beam = ParallelBeam(6, angles=(0.3, 1.9, -0.4), bins=5)
    start, end = beam.rays()
    assert start.shape == end.shape == (3, 5, 2)
    for angle, a, b in zip(beam.radians, start, end):
        across = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        along = torch.tensor([-math.sin(angle), math.cos(angle)], dtype=torch.float64)
        assert_close(a @ across, beam.offsets)
        assert_close(b @ across, beam.offsets)
        assert bool((a @ along < -3 * math.sqrt(2)).all())
        assert bool((b @ along > 3 * math.sqrt(2)).all())


def test_a_fan_goes_from_the_source_to_the_detector() -> None:
    start, end = FAN.rays()
    assert FAN.radians == pytest.approx([0.4 * math.pi * i for i in range(5)])
    assert_close(start.norm(dim=2), torch.full((5, 7), 11.0, dtype=torch.float64))
    assert bool((start == start[:, :1]).all())
    for angle, a, b in zip(FAN.radians, start, end):
        along = torch.tensor([-math.sin(angle), math.cos(angle)], dtype=torch.float64)
        assert_close((b - a) @ along, torch.full((7,), 24.0, dtype=torch.float64))
        assert_close((b[1:] - b[:-1]).norm(dim=1), torch.full((6,), FAN.width / 7, dtype=torch.float64))


def test_the_default_fan_touches_the_circle_around_the_image() -> None:
    source, edge = (0.0, -11.0), (FAN.width / 2, 13.0)
    dx, dy = edge[0] - source[0], edge[1] - source[1]
    distance = abs(dx * source[1] - dy * source[0]) / math.hypot(dx, dy)
    assert distance == pytest.approx(3 * math.sqrt(2), rel=1e-12)
    assert FanBeam(6, 5, 7, 11.0, 13.0, detector_width=8.0).width == 8.0


@pytest.mark.parametrize("geometry", [ParallelBeam(6, 4, 5), FAN])
def test_other_angles(geometry: Geometry) -> None:
    other = geometry.with_angles([0.5, 0.25])
    assert other.radians == (0.5, 0.25)
    assert other.shape == (2, geometry.shape[1])
    with pytest.raises(DataError, match="angles is "):
        geometry.with_angles(())


def test_pixels_lie_as_in_a_picture() -> None:
    x, y = pixel_centres(4)
    assert x[2].tolist() == [-1.5, -0.5, 0.5, 1.5]
    assert y[:, 1].tolist() == [1.5, 0.5, -0.5, -1.5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size is 0; expected an integer of at least 1"),
        ({"size": 28.0}, "size is 28.0"),
        ({"angles": 0}, "angles is 0; expected the number of angles"),
        ({"angles": ()}, r"angles is \(\); expected the number of angles"),
        ({"angles": (0.1, math.nan)}, "all finite"),
        ({"angles": [0.1]}, r"angles is \[0.1\]"),
        ({"angles": ("a",)}, "in radians"),
        ({"angles": True}, "angles is True"),
        ({"bins": 0}, "bins is 0"),
    ],
)
def test_other_parallel_beams_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LapwingError, match=message):
        ParallelBeam(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source_distance": 4.0}, "source_distance is 4; expected more than 4.24264, half the diagonal"),
        ({"detector_distance": 2.0}, "detector_distance is 2; expected more than 4.24264"),
        ({"source_distance": -11.0}, "source_distance is -11.0; expected a positive"),
        ({"source_distance": math.nan}, "source_distance is nan"),
        ({"detector_width": 0.0}, "detector_width is 0.0"),
        ({"angles": 0}, "angles is 0"),
        ({"bins": -3}, "bins is -3"),
        ({"size": -6}, "size is -6"),
    ],
)
def test_other_fans_are_refused(settings: dict[str, Any], message: str) -> None:
    usual = {"size": 6, "angles": 5, "bins": 7, "source_distance": 11.0, "detector_distance": 13.0}
    with pytest.raises(LapwingError, match=message):
        FanBeam(**{**usual, **settings})  # type: ignore[arg-type]


def test_other_things_are_no_geometry() -> None:
    with pytest.raises(DataError, match="geometry is 28; expected a ParallelBeam or a FanBeam"):
        require_geometry(28)
