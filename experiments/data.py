"""Read real data from a folder that the user names. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.errors import DataError


def data_folder(given: str | Path | None) -> Path:
    """Return the folder given, or else the one that the environment variable LAPWING_DATA names."""
    chosen = given or os.environ.get("LAPWING_DATA")
    if not chosen:
        raise DataError("no data folder: pass --data-dir DIR or set LAPWING_DATA to the folder of the .npz files.")
    folder = Path(chosen)
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist; expected a folder with .npz files.")
    return folder


@dataclass(frozen=True, eq=False)
class Images:
    """Standardised grey images (N, 1, 28, 28) and their classes, on one device."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def read(cls, folder: Path, name: str, device: torch.device, data: int | None = None, seed: int = 0) -> Images:
        """Read NAME.npz. ``data`` selects that many training images, the same for the same seed."""
        (x, y), (x_test, y_test) = read_grey(folder, name, device)
        if data is not None:
            rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:data].to(device)
            x, y = x[rows], y[rows]
        mean, std = x.mean(), x.std()
        return cls(((x - mean) / std, y), ((x_test - mean) / std, y_test))


def read_grey(folder: Path, name: str, device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training and test images of NAME.npz, (N, 1, H, W) with pixels from zero to one, and their classes."""
    path = folder / f"{name}.npz"
    if not path.exists():
        raise DataError(f"{path.name} is not in the data folder; expected keys x_train, y_train, x_test, y_test.")
    with np.load(path, allow_pickle=False) as file:
        arrays = [torch.from_numpy(file[key]) for key in ("x_train", "y_train", "x_test", "y_test")]
    x, y, x_test, y_test = (t.to(device) for t in arrays)
    return (x.float().unsqueeze(1) / 255, y.long()), (x_test.float().unsqueeze(1) / 255, y_test.long())


def digits_like(folder: Path, name: str, device: torch.device) -> Tensor:
    """Return the grey test images of NAME.npz as colour images of 32 x 32 pixels, standardised.

    They serve as out-of-distribution images for networks that were trained on photographs.
    """
    grey = Images.read(folder, name, device).test[0]
    return F.interpolate(grey, (32, 32), mode="bilinear", align_corners=False).expand(-1, 3, -1, -1).contiguous()


@dataclass(frozen=True, eq=False)
class Shuffled:
    """Batches of rows in a new order at every pass, drawn from the global random state; data stay on their device."""

    x: Tensor
    y: Tensor
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.x)).to(self.x.device).split(self.size):
            yield self.x[rows], self.y[rows]

    def __len__(self) -> int:
        return -(-len(self.x) // self.size)
