"""Sets of images with pixels from zero to one, and how their networks want them standardised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments import resnets
from experiments.data import data_folder, read_grey
from lapwing.errors import DataError

Pair = tuple[Tensor, Tensor]  # images and classes


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images (N, C, H, W) with pixels from zero to one, their classes, and images of another kind, on one device.

    ``mean`` and ``std`` (1, C, 1, 1) standardise them for a network.
    """

    train: Pair
    test: Pair
    strange: Tensor | None  # images out of the distribution, for tests; None where their file is missing
    mean: Tensor
    std: Tensor

    @classmethod
    def made(cls, train: Pair, test: Pair, strange: Tensor | None) -> ImageSet:
        """Return the set with mean and standard deviation over all training pixels of a channel."""
        mean, std = (f(train[0], (0, 2, 3), keepdim=True) for f in (torch.mean, torch.std))
        return cls(train, test, strange, mean, std)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.train[0].shape[1:]
        return channels, height, width

    @property
    def n_classes(self) -> int:
        """The number of classes."""
        return int(self.train[1].max()) + 1

    def standard(self, x: Tensor) -> Tensor:
        """Return images as the networks take them."""
        return (x - self.mean) / self.std

    def standard_train(self) -> Pair:
        """Return the training images as the networks take them, and their classes."""
        return self.standard(self.train[0]), self.train[1]


def read_set(name: str, data_dir: str | Path | None, device: str | torch.device) -> ImageSet:
    """Return a set of images by its name.

    Args:
        name: "digits" (of scikit-learn, no folder needed), "mnist", "fashion_mnist", "cifar10", or "cifar10_half",
            which reads the first half of the training images alone.
        data_dir: The folder of the .npz files; by default LAPWING_DATA.
        device: Where the images shall be.

    Raises:
        DataError: If the name is unknown or a file is missing.
    """
    if name not in SETS:
        raise DataError(f"the set of images is {name!r}; expected one of {', '.join(SETS)}.")
    return SETS[name](data_dir, torch.device(device))


def _digits(data_dir: str | Path | None, device: torch.device) -> ImageSet:
    """Return 1,200 training and 597 test images of 8 x 8 pixels; strange are digits with dark and light exchanged."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    x = (torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16)[order].to(device)
    y = torch.from_numpy(classes).long()[order].to(device)
    return ImageSet.made((x[:1200], y[:1200]), (x[1200:], y[1200:]), 1 - x[1200:])


def _grey(name: str, other: str, data_dir: str | Path | None, device: torch.device) -> ImageSet:
    folder = data_folder(data_dir)
    train, test = read_grey(folder, name, device)
    return ImageSet.made(train, test, _strange(folder, other, device))


def _strange(folder: Path, name: str, device: torch.device) -> Tensor | None:
    return read_grey(folder, name, device)[1][0] if (folder / f"{name}.npz").exists() else None


def _photographs(part: str, data_dir: str | Path | None, device: torch.device) -> ImageSet:
    """Return CIFAR-10 under the standardisation of the given networks; strange are digits, stretched, in colour."""
    folder = data_folder(data_dir)
    mean, std = (torch.tensor(t, device=device).view(1, 3, 1, 1) for t in (resnets.MEAN, resnets.STD))
    pairs = []
    for each in (part, "test"):
        x, y = resnets.cifar10(folder, each, device)
        pairs.append(((x * std + mean).clamp(0, 1), y))
    digits = _strange(folder, "mnist", device)
    if digits is not None:
        large = F.interpolate(digits, (32, 32), mode="bilinear", align_corners=False)
        digits = large.expand(-1, 3, -1, -1).contiguous()
    return ImageSet(pairs[0], pairs[1], digits, mean, std)


SETS: dict[str, Callable[[str | Path | None, torch.device], ImageSet]] = {
    "digits": _digits,
    "mnist": partial(_grey, "mnist", "fashion_mnist"),
    "fashion_mnist": partial(_grey, "fashion_mnist", "mnist"),
    "cifar10": partial(_photographs, "train"),
    "cifar10_half": partial(_photographs, "train_a"),
}
