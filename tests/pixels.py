"""Pictures as tensors of pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.image import imread


def read(path: Path) -> torch.Tensor:
    """Return the pixels of a picture, (height, width, 3)."""
    return torch.tensor(imread(path))[..., :3]


def drawn(draw: Callable[[Any, Path], None], result: Any, folder: Path) -> torch.Tensor:
    """Draw a picture and return its pixels, (height, width, 3)."""
    path = folder / "picture.png"
    draw(result, path)
    return read(path)


def inked(pixels: torch.Tensor) -> float:
    """Return the share of pixels that are not white."""
    return float((pixels < 0.98).any(-1).float().mean())


def share(pixels: torch.Tensor, colour: str) -> float:
    """Return the share of pixels of exactly this colour."""
    rgb = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return float(((pixels - rgb).abs().amax(-1) < 0.01).float().mean())
