"""Simulated measurements: the size of their noise, and input that makes no sense."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from experiments.tomography.geometry import ParallelBeam
from experiments.tomography.noise import measured
from experiments.tomography.rays import ray_transform
from lapwing.errors import DataError
from tests.tolerances import assert_close

SIZE = 9
BEAM = ParallelBeam(SIZE, angles=40)
OPERATOR = ray_transform(BEAM)
IMAGE = torch.linspace(-0.2, 1, SIZE**2, dtype=torch.float64).reshape(SIZE, SIZE)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_noise_has_its_share_of_the_mean() -> None:
    clean = OPERATOR.forward(IMAGE.reshape(-1))
    y, std = measured(OPERATOR, IMAGE, 0.05, seeded(0))
    assert std == pytest.approx(0.05 * float(clean.abs().mean()), rel=1e-12)
    error = (y - clean) / std
    assert abs(float(error.mean())) < 5 / len(error) ** 0.5
    assert abs(float(error.square().mean()) - 1) < 5 * (2 / len(error)) ** 0.5
    assert torch.equal(y, measured(OPERATOR, IMAGE, 0.05, seeded(0))[0])
    assert torch.equal(y, measured(OPERATOR, IMAGE.reshape(-1), 0.05, seeded(0))[0])
    assert not torch.equal(y, measured(OPERATOR, IMAGE, 0.05, seeded(1))[0])


def test_no_noise() -> None:
    y, std = measured(OPERATOR, IMAGE, 0, None)
    assert std == 0
    assert_close(y, OPERATOR.forward(IMAGE.reshape(-1)))


def test_the_dtype_is_that_of_the_operator() -> None:
    y, std = measured(OPERATOR.to(dtype=torch.float32), IMAGE, 0.1, seeded(0))
    assert y.dtype == torch.float32
    assert std == pytest.approx(measured(OPERATOR, IMAGE, 0.1, seeded(0))[1], rel=1e-5)


@pytest.mark.parametrize("share", [-0.1, math.nan, math.inf, "5 %", None, True])
def test_other_shares_are_refused(share: Any) -> None:
    with pytest.raises(DataError, match=r"share is .*expected a finite number that is not negative"):
        measured(OPERATOR, IMAGE, share, None)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(8, 9), r"shape \(8, 9\).*expected \(H, W\) or \(H \* W,\) with 81 pixels"),
        (torch.zeros(2, SIZE, SIZE), "with 81 pixels"),
        (torch.zeros(1, SIZE, SIZE), "with 81 pixels"),
        ([0.0] * 81, "with 81 pixels"),
        (torch.full((SIZE, SIZE), torch.nan), "not finite"),
    ],
)
def test_other_images_are_refused(image: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        measured(OPERATOR, image, 0.05, None)
