"""Filtered back-projection: discs come back, it is linear, and other sinograms are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.tomography.backprojection import fbp
from experiments.tomography.geometry import FanBeam, Geometry, ParallelBeam, pixel_centres
from experiments.tomography.rays import ray_transform
from lapwing.errors import DataError, LapwingError
from tests.tolerances import assert_close

D = torch.float64
SIZE = 32
MANY: dict[str, Geometry] = {
    "parallel": ParallelBeam(SIZE, angles=60),
    "fan": FanBeam(SIZE, angles=90, bins=64, source_distance=48.0, detector_distance=70.0),
    "uneven": ParallelBeam(
        SIZE, tuple(i * math.pi / 50 for i in range(50)) + tuple(0.01 + 0.02 * i for i in range(40))
    ),
}
FEW: dict[str, Geometry] = {
    "parallel": ParallelBeam(7, angles=4),
    "fan": FanBeam(7, angles=3, bins=9, source_distance=10.0, detector_distance=12.0),
}


def disc(radius: float, x: float, y: float) -> tuple[Tensor, Tensor]:
    """Return a disc of value one, with the covered share of the pixels at its rim, and the distance from its centre."""
    across, up = pixel_centres(SIZE)
    parts = [(a + 0.5) / 8 - 0.5 for a in range(8)]
    image = sum((((across + a - x).hypot(up + b - y) < radius).to(D) for a in parts for b in parts), torch.zeros(1))
    return image / 64, (across - x).hypot(up - y)


@pytest.mark.parametrize("window", ["none", "hann"])
@pytest.mark.parametrize("name", MANY)
def test_a_disc_comes_back(name: str, window: str) -> None:
    """Off the centre, so that angles and directions matter. Rims are blurred over about two pixels."""
    image, distance = disc(9.0, 3.0, -1.5)
    geometry = MANY[name]
    result = fbp(geometry, ray_transform(geometry).forward(image.reshape(-1)), window)
    inside, outside = distance < 6, distance > 12
    assert float(result[inside].mean()) == pytest.approx(1, abs=0.01)
    assert float((result[inside] - 1).abs().max()) < 0.06
    assert float(result[outside].square().mean().sqrt()) < 0.03


@pytest.mark.parametrize("name", FEW)
def test_it_is_linear_and_takes_batches(name: str, generator: torch.Generator) -> None:
    geometry = FEW[name]
    y = torch.randn(3, 2, math.prod(geometry.shape), generator=generator, dtype=D)
    images = fbp(geometry, y)
    assert images.shape == (3, 2, 7, 7)
    assert_close(fbp(geometry, 2 * y[0, 1] - y[2, 0]), 2 * images[0, 1] - images[2, 0])
    assert_close(fbp(geometry, y.float()), images.float())


def test_the_ramp_filter_is_a_convolution(generator: torch.Generator) -> None:
    """One angle, bins over the middles of the columns: the sum with the published kernel of the ramp, written out."""
    bins = 11
    size = 6
    geometry = ParallelBeam(size, angles=1, bins=bins)
    width = size * math.sqrt(2) / bins
    y = torch.randn(bins, generator=generator, dtype=D)
    kernel = {0: 0.25 / width**2, **{k: -1 / (math.pi * k * width) ** 2 for k in range(1, bins, 2)}}
    filtered = [width * sum(float(y[j]) * kernel.get(abs(i - j), 0.0) for j in range(bins)) for i in range(bins)]
    columns = []
    for x in (c + 0.5 - size / 2 for c in range(size)):
        place = x / width + (bins - 1) / 2
        left = math.floor(place)
        columns.append(math.pi * ((1 - place + left) * filtered[left] + (place - left) * filtered[left + 1]))
    assert_close(fbp(geometry, y), torch.tensor(columns, dtype=D).expand(size, size))


def test_the_hann_window_damps_noise(generator: torch.Generator) -> None:
    geometry = MANY["parallel"]
    noise = torch.randn(math.prod(geometry.shape), generator=generator, dtype=D)
    assert float(fbp(geometry, noise, "hann").std()) < 0.6 * float(fbp(geometry, noise).std())


@pytest.mark.parametrize("name", FEW)
def test_angles_may_come_in_any_order(name: str, generator: torch.Generator) -> None:
    """Also one turn later."""
    geometry = FEW[name]
    angles, bins = geometry.shape
    y = torch.randn(angles, bins, generator=generator, dtype=D)
    later = geometry.with_angles(
        [a + geometry.period * (2 if name == "parallel" else 1) for a in geometry.radians[::-1]]
    )
    assert_close(fbp(later, y.flip(0).reshape(-1)), fbp(geometry, y.reshape(-1)))


@pytest.mark.parametrize(
    ("sinogram", "message"),
    [
        (torch.zeros(4, 11), r"shape \(4, 11\).*expected.*\(..., 44\), for 4 angles and 11 bins"),
        (torch.tensor(0.0), "sinogram is tensor"),
        (torch.zeros(44, dtype=torch.int64), "float32 or float64"),
        ([0.0] * 44, "sinogram is"),
        (torch.full((44,), torch.nan), "not finite"),
        (torch.full((44,), torch.inf), "not finite"),
    ],
)
def test_other_sinograms_are_refused(sinogram: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fbp(FEW["parallel"], sinogram)


def test_other_settings_are_refused() -> None:
    with pytest.raises(LapwingError, match="window is 'hamming'; expected one of none, hann"):
        fbp(FEW["parallel"], torch.zeros(44), "hamming")
    with pytest.raises(DataError, match="geometry is 3"):
        fbp(3, torch.zeros(44))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the detector has 1 bin; expected at least 2"):
        fbp(ParallelBeam(5, angles=2, bins=1), torch.zeros(2))
