"""Images to scan: their ranges, seeds and places; and digits from a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.tomography import phantoms
from lapwing.errors import DataError, LapwingError

RANDOM: list[Callable[..., Tensor]] = [phantoms.rectangles, phantoms.ellipses]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_image(image: Tensor, size: int) -> None:
    assert (image.shape, image.dtype) == ((size, size), torch.float64)
    assert float(image.min()) == 0
    assert float(image.max()) == 1


def test_the_head() -> None:
    """The skull is one, the brain 0.2 and the ventricles zero; the tumours lie above and below the centre."""
    image = phantoms.shepp_logan(200)
    assert_image(image, 200)
    at = {  # value at (x, y) in [-1, 1]²
        (0.0, 0.9): 1.0, (0.0, -0.8): 0.2, (0.22, 0.0): 0.0, (-0.22, 0.0): 0.0, (0.0, 0.4): 0.3, (0.0, 0.1): 0.3,
        (0.0, -0.1): 0.3, (-0.08, -0.605): 0.3, (0.06, -0.605): 0.3, (0.9, 0.9): 0.0, (-0.3, 0.3): 0.0,
        (0.3, 0.25): 0.0, (-0.3, -0.3): 0.2,
    }  # fmt: skip
    for (x, y), value in at.items():
        row, column = math.floor(100 - 100 * y), math.floor(100 + 100 * x)
        assert float(image[row, column]) == pytest.approx(value, abs=1e-12), (x, y)
    assert_image(phantoms.shepp_logan(28), 28)


@pytest.mark.parametrize("made", RANDOM)
def test_random_shapes(made: Callable[..., Tensor]) -> None:
    for seed in range(5):
        image = made(33, seeded(seed))
        assert_image(image, 33)
        assert torch.equal(image, made(33, seeded(seed)))
        assert not torch.equal(image, made(33, seeded(seed + 1)))
        assert 0.02 < float((image > 0).double().mean()) < 0.9


@pytest.mark.parametrize("made", RANDOM)
def test_the_number_of_shapes(made: Callable[..., Tensor]) -> None:
    assert made(65, seeded(1), count=1).unique().tolist() == [0.0, 1.0]
    assert len(made(65, seeded(1), count=6).unique()) > 4


def test_edges_of_rectangles_have_two_directions() -> None:
    """One rectangle is an affine square: the covariance of its pixels is that of its sides."""
    covered = phantoms.rectangles(129, seeded(2), count=1, spread=0.0).nonzero().double()
    spread = torch.linalg.eigvalsh(covered.T.cov())
    area = 12 * float((spread[0] * spread[1]).sqrt())
    assert len(covered) == pytest.approx(area, rel=0.03)


def test_digits(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    test, train = (
        draw.integers(0, 256, (7, 28, 28)).astype(np.uint8),
        draw.integers(0, 256, (5, 28, 28)).astype(np.uint8),
    )
    np.savez(tmp_path / "mnist.npz", x_test=test, x_train=train)
    images = phantoms.digits(tmp_path, 3)
    assert (images.shape, images.dtype) == ((3, 28, 28), torch.float64)
    assert torch.equal((255 * images).round().to(torch.uint8), torch.from_numpy(test[:3]))
    assert torch.equal((255 * phantoms.digits(tmp_path, 5, "train")).round().to(torch.uint8), torch.from_numpy(train))
    with pytest.raises(DataError, match="count is 8; expected at most 7"):
        phantoms.digits(tmp_path, 8)
    with pytest.raises(DataError, match=r"kmnist.npz is not in the data folder"):
        phantoms.digits(tmp_path, 3, name="kmnist")
    with pytest.raises(LapwingError, match="part is 'validation'; expected one of test, train"):
        phantoms.digits(tmp_path, 3, "validation")


def test_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LAPWING_DATA", raising=False)
    with pytest.raises(DataError, match="no data folder: pass --data-dir DIR or set LAPWING_DATA"):
        phantoms.digits(None, 3)
    with pytest.raises(DataError, match="does not exist"):
        phantoms.digits(tmp_path / "nowhere", 3)


@pytest.mark.parametrize("size", [0, -3, 2.5, "28", None])
def test_other_sizes_are_refused(size: Any) -> None:
    for made in (phantoms.shepp_logan, lambda s: phantoms.rectangles(s, None), lambda s: phantoms.ellipses(s, None)):
        with pytest.raises(LapwingError, match="size is"):
            made(size)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    for made in RANDOM:
        with pytest.raises(LapwingError, match="count is 0"):
            made(9, None, count=0)
    for spread in (-1.0, math.nan):
        with pytest.raises(DataError, match="spread is"):
            phantoms.rectangles(9, None, spread=spread)
    with pytest.raises(LapwingError, match="count is 0"):
        phantoms.digits(tmp_path, 0)
