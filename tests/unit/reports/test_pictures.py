"""Pictures from numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from lapwing.experiments.result import Result, Row
from lapwing.reports import pictures


def numbers(count: int, seed: int = 0) -> list[float]:
    found: list[float] = torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def digits() -> Result:
    names = ("plain network", "posterior")
    arrays = {
        f"{name}/{key}": numbers(30, i) for i, key in enumerate(("test", "shuffled", "rotated")) for name in names
    }
    arrays |= {f"{name}/correct": [1.0, 0.0, 1.0] * 10 for name in names}
    return Result("digits", {}, 0, tuple(Row(name, {"NLL": 0.1, "ECE": 0.2}) for name in names), {}, arrays)


def observed(reach: float = 1.0) -> Result:
    arrays = {"observed": numbers(20)}
    for name in ("plain network", "posterior"):
        arrays |= {f"{name}/mean": [0.5] * 20, f"{name}/low": [0.5 - reach] * 20, f"{name}/high": [0.5 + reach] * 20}
    return Result("diabetes", {}, 0, (Row("plain network", {}), Row("posterior", {})), {}, arrays)


def bands(noise: float = 0.5) -> Result:
    grid = torch.linspace(-2, 2, 41)
    arrays = {"grid": grid.tolist(), "mean": grid.tolist(), "truth": grid.tolist(), "x": [-1.0, 1.0], "y": [-1.0, 1.0],
              "epistemic_std": [0.2] * 41, "std": [0.2 + noise] * 41}  # fmt: skip
    return Result("bands", {}, 0, (Row("posterior", {}),), {}, arrays)


def drawn(draw: Callable[[Any, Path], None], result: Result, folder: Path) -> torch.Tensor:
    """The pixels, (height, width, 3)."""
    path = folder / "picture.png"
    draw(result, path)
    return torch.tensor(imread(path))[..., :3]


def share(pixels: torch.Tensor, colour: str) -> float:
    """The share of pixels of just this colour."""
    rgb = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return float(((pixels - rgb).abs().amax(-1) < 0.01).float().mean())


@pytest.mark.parametrize(
    ("draw", "result"),
    [(pictures.digits, digits()), (pictures.observed, observed()), (pictures.bands, bands())],
    ids=["digits", "observed", "bands"],
)
def test_a_picture_is_written_and_not_blank(draw: Callable[[Any, Path], None], result: Result, tmp_path: Path) -> None:
    pixels = drawn(draw, result, tmp_path)
    assert min(pixels.shape[:2]) > 500
    assert 0.02 < float((pixels < 0.98).any(-1).float().mean()) < 0.9


def test_epistemic_and_total_bands_are_apart(tmp_path: Path) -> None:
    apart, together = drawn(pictures.bands, bands(0.5), tmp_path), drawn(pictures.bands, bands(0.0), tmp_path)
    assert share(apart, pictures.EPISTEMIC) > 0.02
    assert share(apart, pictures.TOTAL) > 2 * share(apart, pictures.EPISTEMIC)
    assert share(together, pictures.TOTAL) < 0.1 * share(apart, pictures.TOTAL)


def test_points_outside_their_interval_have_a_colour_of_their_own(tmp_path: Path) -> None:
    wide, narrow = drawn(pictures.observed, observed(1.0), tmp_path), drawn(pictures.observed, observed(0.01), tmp_path)
    orange = lambda pixels: float(((pixels[..., 0] - pixels[..., 2]) > 0.4).float().mean())
    assert orange(narrow) > 3 * orange(wide)


def test_pictures_use_no_global_figures(tmp_path: Path) -> None:
    from matplotlib import pyplot

    drawn(pictures.bands, bands(), tmp_path)
    assert pyplot.get_fignums() == []
