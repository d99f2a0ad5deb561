"""Finished pushes of small networks, on made images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.options import silent
from experiments.push_sizes import PushSizes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten classes of noise under the name of Fashion-MNIST."""
    draw = np.random.default_rng(0)
    arrays = {"x_train": draw.integers(0, 255, (40, 28, 28)).astype(np.uint8), "y_train": np.arange(40) % 10}
    np.savez(tmp_path / "fashion_mnist.npz", **arrays, x_test=arrays["x_train"], y_test=arrays["y_train"])
    return tmp_path


def test_a_small_network_is_pushed_to_the_end(folder: Path) -> None:
    settings = PushSizes(folder, channels=("2x3",), data=30, precision=3.0)
    assert settings.units() == ("2x3",)
    training, push = settings.measure("2x3", silent)
    assert training.scores["weights"] == 2 * 9 + 2 + 3 * 18 + 3 + 12 * 10 + 10
    assert training.scores["slope"] < 1e-6
    assert push.scores["finished"] == 1
    assert push.seconds is not None
    assert push.seconds > 0
