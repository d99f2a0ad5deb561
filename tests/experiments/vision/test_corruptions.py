"""Corrupted and rotated images."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from experiments.vision.corruptions import KINDS, STRENGTHS, corrupted, rotated
from lapwing.errors import DataError


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    """Five images of two channels: smooth waves and noise, so that every kind changes them."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = torch.arange(20.0).view(-1, 1), torch.arange(24.0)
    waves = 0.5 + 0.2 * torch.sin(rows / 3) * torch.cos(columns / 4)
    return (waves + 0.2 * torch.rand(5, 2, 20, 24, generator=generator)).to(dtype).clamp(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_strength_is_further_from_the_clean_image(kind: str, dtype: torch.dtype) -> None:
    x = images(dtype)
    distances = [float((corrupted(x, kind, s) - x).norm()) for s in (0, *STRENGTHS)]
    assert distances[0] == 0
    assert all(after > 1.02 * before for before, after in pairwise(distances))


@pytest.mark.parametrize("kind", KINDS)
def test_shape_dtype_range_and_seed(kind: str) -> None:
    x = images(torch.float64)
    once, again, other = (corrupted(x, kind, 4, seed) for seed in (3, 3, 5))
    assert once.shape == x.shape
    assert once.dtype == x.dtype
    assert float(once.min()) >= 0
    assert float(once.max()) <= 1
    assert torch.equal(once, again)
    assert torch.equal(once, other) == (kind != "noise")


def test_an_image_without_structure_has_nothing_to_lose() -> None:
    flat = torch.full((2, 3, 16, 20), 0.25)
    for kind in ("blur", "contrast", "pixelate"):
        torch.testing.assert_close(corrupted(flat, kind, 5), flat)


def test_contrast_keeps_the_mean_of_each_image() -> None:
    x = images(torch.float64)
    torch.testing.assert_close(corrupted(x, "contrast", 3).mean((1, 2, 3)), x.mean((1, 2, 3)))


def test_rotations() -> None:
    x = images(torch.float64)[..., :20]
    torch.testing.assert_close(rotated(x, 0.0), x)
    torch.testing.assert_close(rotated(x, 90.0), x.rot90(1, (2, 3)))
    torch.testing.assert_close(rotated(x, 180.0), x.flip((2, 3)))


def test_wrong_input_is_refused() -> None:
    x = images()
    with pytest.raises(DataError, match="expected one of noise"):
        corrupted(x, "fog", 1)
    for strength in (6, -1, True, 1.5):
        with pytest.raises(DataError, match="expected a whole number from 0 to 5"):
            corrupted(x, "blur", strength)  # type: ignore[arg-type]
    for wrong in (x[0], (255 * x).byte(), x[:0]):
        with pytest.raises(DataError, match=r"expected floating-point numbers \(N, C, H, W\)"):
            corrupted(wrong, "blur", 1)
    for wrong in (2 * x, x.where(x < 0.6, torch.nan)):
        with pytest.raises(DataError, match="expected zero to one"):
            rotated(wrong, 10.0)
