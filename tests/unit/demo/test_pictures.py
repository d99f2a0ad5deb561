"""Pictures from numbers alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lapwing.demo import bands, diabetes, digits
from lapwing.demo.figures import EPISTEMIC, TOTAL
from lapwing.demo.result import Picture, Result, Row
from tests.pixels import drawn, inked, share


def numbers(count: int, seed: int = 0) -> list[float]:
    values: list[float] = torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return values


def some_digits() -> Result:
    names = ("plain network", "posterior")
    arrays = {
        f"{name}/{key}": numbers(30, i) for i, key in enumerate(("test", "shuffled", "rotated")) for name in names
    }
    arrays |= {f"{name}/correct": [1.0, 0.0, 1.0] * 10 for name in names}
    return Result("digits", {}, 0, tuple(Row(name, {"NLL": 0.1, "ECE": 0.2}) for name in names), {}, arrays)


def some_patients(reach: float = 1.0) -> Result:
    arrays = {"observed": numbers(20)}
    for name in ("plain network", "posterior"):
        arrays |= {f"{name}/mean": [0.5] * 20, f"{name}/low": [0.5 - reach] * 20, f"{name}/high": [0.5 + reach] * 20}
    return Result("diabetes", {}, 0, (Row("plain network", {}), Row("posterior", {})), {}, arrays)


def some_bands(noise: float = 0.5) -> Result:
    grid = torch.linspace(-2, 2, 41)
    arrays = {"grid": grid.tolist(), "mean": grid.tolist(), "truth": grid.tolist(), "x": [-1.0, 1.0], "y": [-1.0, 1.0],
              "epistemic_std": [0.2] * 41, "std": [0.2 + noise] * 41}  # fmt: skip
    return Result("bands", {}, 0, (Row("posterior", {}),), {}, arrays)


@pytest.mark.parametrize(
    ("draw", "result"),
    [(digits.picture, some_digits()), (diabetes.picture, some_patients()), (bands.picture, some_bands())],
    ids=["digits", "diabetes", "bands"],
)
def test_a_picture_is_written_and_not_blank(draw: Picture, result: Result, tmp_path: Path) -> None:
    pixels = drawn(draw, result, tmp_path)
    assert min(pixels.shape[:2]) > 500
    assert 0.02 < inked(pixels) < 0.9


def test_epistemic_and_total_bands_are_apart(tmp_path: Path) -> None:
    noisy, exact = (drawn(bands.picture, some_bands(noise), tmp_path) for noise in (0.5, 0.0))
    assert share(noisy, EPISTEMIC) > 0.02
    assert share(noisy, TOTAL) > 2 * share(noisy, EPISTEMIC)
    assert share(exact, TOTAL) < 0.1 * share(noisy, TOTAL)


def test_points_outside_their_interval_have_another_colour(tmp_path: Path) -> None:
    wide, narrow = (drawn(diabetes.picture, some_patients(width), tmp_path) for width in (1.0, 0.01))
    orange = lambda pixels: float(((pixels[..., 0] - pixels[..., 2]) > 0.4).float().mean())
    assert orange(narrow) > 3 * orange(wide)


def test_pictures_use_no_global_figures(tmp_path: Path) -> None:
    from matplotlib import pyplot

    drawn(bands.picture, some_bands(), tmp_path)
    assert pyplot.get_fignums() == []
