"""A posterior as one tensor of bytes, so that ``torch.save`` can write it; in it is a file of Lapwing, no pickle."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from lapwing.api import load
from lapwing.fitted import Fitted


def packed(posterior: Fitted) -> Tensor:
    """Return the file of a posterior as a tensor of bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.lapwing"
        posterior.save(path)
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def unpacked(content: Tensor, model: nn.Module) -> Fitted:
    """Return the posterior from the bytes of ``packed``, for this model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.lapwing"
        path.write_bytes(bytes(content.tolist()))
        return load(path, model)
