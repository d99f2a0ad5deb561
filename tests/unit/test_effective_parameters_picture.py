"""The picture of effective parameters in the tutorials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from effective_parameters import GAMMA, effective_parameters_picture

from tests.pixels import drawn, inked, share


def draw(layers: Any, path: Path) -> None:
    effective_parameters_picture(*layers, path)


def layers(count: int = 3, part: float = 0.5) -> tuple[dict[str, float], dict[str, int]]:
    """γ and the number of weights of each layer."""
    sizes = {str(i): 20 * (i + 1) for i in range(count)}
    return {name: part * size for name, size in sizes.items()}, sizes


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Three layers, of whose weights the data determine half."""
    return drawn(draw, layers(), tmp_path_factory.mktemp("half"))


def test_it_is_not_blank(half: torch.Tensor, tmp_path: Path) -> None:
    for pixels in (half, drawn(draw, ({"": 1.0}, {"": 4}), tmp_path)):
        assert min(pixels.shape[:2]) > 500
        assert 0.02 < inked(pixels) < 0.9


def test_effective_parameters_fill_their_share_of_the_weights(half: torch.Tensor, tmp_path: Path) -> None:
    none, quarter, whole = (share(drawn(draw, layers(part=part), tmp_path), GAMMA) for part in (0.0, 0.25, 1.0))
    assert none < 0.01  # the legend
    assert share(half, GAMMA) - none == pytest.approx(2 * (quarter - none), rel=0.02)
    assert whole - none == pytest.approx(4 * (quarter - none), rel=0.02)


def test_many_layers_need_more_room(half: torch.Tensor, tmp_path: Path) -> None:
    many = drawn(draw, layers(30), tmp_path)
    assert many.shape[0] > 3 * half.shape[0]
    assert many.shape[1] == half.shape[1]
