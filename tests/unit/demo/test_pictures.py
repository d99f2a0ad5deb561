"""The picture, from numbers alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from matplotlib.colors import to_hex, to_rgb

from lapwing.demo import overview
from lapwing.demo.bands import draw_bands
from lapwing.demo.figures import PLAIN, POSTERIOR
from lapwing.demo.result import Result
from lapwing.demo.training import PLAIN as PLAIN_ROW
from lapwing.demo.training import VALIDATED
from lapwing.plots import new_axis
from tests.pixels import drawn, inked, share


def some_digits(correct: float = 0.5) -> Result:
    arrays: dict[str, list[float]] = {}
    for name in (PLAIN_ROW, VALIDATED):
        arrays[f"noisy digits/{name}/confidence"] = torch.linspace(0.1, 1, 60).tolist()
        arrays[f"noisy digits/{name}/correct"] = [1.0 if i % 10 < 10 * correct else 0.0 for i in range(60)]
    return Result("digits", {}, 0, (), {}, arrays)


def some_bands(width: float = 0.5) -> Result:
    grid = torch.linspace(-2, 2, 41)
    arrays = {"grid": grid, "truth": grid, "x": torch.tensor([-1.0, 1.0]), "y": torch.tensor([-1.0, 1.0]),
              "low": grid - width, "high": grid + width, "plain low": grid - 0.2, "plain high": grid + 0.2}  # fmt: skip
    return Result("bands", {}, 0, (), {}, {name: values.tolist() for name, values in arrays.items()})


def faded(colour: str, alpha: float) -> str:
    """The colour of a transparent area over white."""
    return to_hex(tuple(1 - alpha * (1 - part) for part in to_rgb(colour)))


@cache
def pixels(correct: float = 0.5, width: float = 0.5) -> torch.Tensor:
    """Return the pixels of the picture of these digits and bands."""
    draw = lambda result, path: overview.picture(result, some_bands(width), path)
    with TemporaryDirectory() as folder:
        return drawn(draw, some_digits(correct), Path(folder))


def test_the_picture_is_written_and_not_blank() -> None:
    image = pixels()
    assert min(image.shape[:2]) > 500
    assert 0.05 < inked(image) < 0.9


def test_wide_intervals_are_wide_bands() -> None:
    narrow, wide = (pixels(width=width) for width in (0.25, 1.0))
    assert share(wide, faded(POSTERIOR, 0.3)) > 2 * share(narrow, faded(POSTERIOR, 0.3)) > 0


def test_points_are_as_high_as_predictions_are_right() -> None:
    from lapwing.demo.digits import draw_reliability

    axis = new_axis()
    draw_reliability(axis, some_digits(0.8), "noisy digits", (PLAIN_ROW, VALIDATED))
    heights = {drawn.lines[0].get_color(): drawn.lines[0].get_ydata() for drawn in axis.containers}
    for colour in (PLAIN, POSTERIOR):
        assert sum(heights[colour]) / len(heights[colour]) == pytest.approx(0.8, abs=0.1)
    assert "55 % confident, 80 % right" in axis.get_title()


def test_no_band_leaves_its_frame() -> None:
    axis = new_axis()
    draw_bands(axis, some_bands(width=50.0))
    low, high = axis.get_ylim()
    assert low < -52
    assert high > 52


def test_the_picture_uses_no_global_figures(tmp_path: Path) -> None:
    from matplotlib import pyplot

    overview.picture(some_digits(), some_bands(), tmp_path / "picture.png")
    assert pyplot.get_fignums() == []
