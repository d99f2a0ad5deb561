"""CIFAR-10 and its residual networks, read from files made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import resnets
from lapwing.errors import DataError

CPU = torch.device("cpu")


def encoded(images: np.ndarray) -> np.ndarray:
    """(N, 32, 32, 3) bytes as differences: green, then red and blue less green, along rows and columns."""
    red, green, blue = (images[..., i] for i in range(3))
    flat = np.stack([green, red - green, blue - green], 1)
    for axis in (3, 2):
        flat = np.diff(flat, axis=axis, prepend=np.zeros_like(np.take(flat, [0], axis)))
    return flat.astype(np.uint8)


def written(folder: Path, count: int = 6) -> np.ndarray:
    images = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    halves = np.array_split(np.arange(count), 2)
    for name, rows in zip(("cifar10_train_a", "cifar10_train_b"), halves, strict=True):
        np.savez(folder / f"{name}.npz", delta=encoded(images[rows]), y=rows % 10)
    return images


def test_images_come_back(tmp_path: Path) -> None:
    images = written(tmp_path)
    x, y = resnets.cifar10(tmp_path, "train", CPU)
    mean, std = (torch.tensor(t).view(1, 3, 1, 1) for t in (resnets.MEAN, resnets.STD))
    back = ((x * std + mean) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    assert np.array_equal(back.numpy(), images)
    assert y.tolist() == list(range(6))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cifar10_test\.npz is not in the data folder"):
        resnets.cifar10(tmp_path, "test", CPU)
    with pytest.raises(DataError, match=r"models/cifar10_resnet20\.npz is not in the data folder"):
        resnets.pretrained(tmp_path, 20)


def test_weights_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = resnets.ResNet(20).eval()
    (tmp_path / "models").mkdir()
    kept = {name: t.numpy() for name, t in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    np.savez(tmp_path / "models" / "cifar10_resnet20.npz", **kept)
    again = resnets.pretrained(tmp_path, 20)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), model(x))
    assert sum(p.numel() for p in model.parameters()) == 272_474
    del kept["fc.bias"]
    np.savez(tmp_path / "models" / "cifar10_resnet20.npz", **kept)
    with pytest.raises(DataError, match=r"lacks fc\.bias"):
        resnets.pretrained(tmp_path, 20)


def test_other_depths_are_refused() -> None:
    with pytest.raises(DataError, match="a ResNet of 18 layers; expected one of 20, 32, 44, 56"):
        resnets.ResNet(18)


def test_crops_are_parts_of_the_image_at_the_old_size() -> None:
    x = torch.arange(32.0).expand(5, 3, 32, 32).contiguous()
    crops = resnets.cropped(x, seed=1)
    assert crops.shape == x.shape
    assert torch.equal(crops, resnets.cropped(x, seed=1))
    assert not torch.equal(crops, resnets.cropped(x, seed=2))
    assert float(crops.min()) >= 0
    assert float(crops.max()) <= 31
    assert bool((crops.diff(dim=-1) >= -1e-4).all())  # a ramp stays a ramp


def test_rectangles_fit_and_have_the_area_and_shape_that_were_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([resnets._rectangle(320, 0.5, 4 / 3, generator) for _ in range(2000)]).double()
    left, top, width, height = drawn.unbind(1)
    assert bool((left >= 0).all() & (top >= 0).all())
    assert bool((left + width <= 320).all() & (top + height <= 320).all())
    area, shape = width * height / 320**2, width / height
    assert 0.495 < float(area.min()) < 0.52
    assert float(area.max()) > 0.95
    assert 0.74 < float(shape.min()) < 0.78
    assert 1.28 < float(shape.max()) < 1.35
    assert abs(float(shape.log().mean())) < 0.02  # neither way more than the other
