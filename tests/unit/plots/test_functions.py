"""Bands and maps, by what their axes hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lapwing as lw
from lapwing.errors import DataError, UnsupportedError
from lapwing.predictives.numbers import NormalPredictive
from lapwing.values.gaussian import FunctionGaussian


def predicted(x: torch.Tensor) -> NormalPredictive:
    """Return predictions at x with mean x, and the second output -x, that are unsure far from zero."""
    mean = torch.cat([x, -x], 1)
    return NormalPredictive(FunctionGaussian(mean, torch.diag_embed(mean.square())), torch.full_like(mean, 0.25))


def reach(ax: Any, number: int) -> tuple[float, float]:
    """Return the lowest and the highest point of an area."""
    heights = ax.collections[number].get_paths()[0].vertices[:, 1]
    return float(heights.min()), float(heights.max())


@pytest.mark.parametrize("output", [0, 1])
def test_a_band_has_the_intervals_of_targets_and_of_the_function(output: int) -> None:
    x = torch.tensor([[3.0], [-1.0], [2.0]])
    prediction = predicted(x)
    ax = lw.plots.band(prediction, x, output=output, level=0.9, data=(x, torch.cat([x, x - 40], 1)))
    low, high = (end[:, output] for end in prediction.interval(0.9))
    assert reach(ax, 0) == pytest.approx((float(low.min()), float(high.max())))
    half = 1.644854 * x.abs().squeeze(1)
    mean = prediction.mean[:, output]
    assert reach(ax, 1) == pytest.approx((float((mean - half).min()), float((mean + half).max())), rel=1e-5)
    bottom, top = ax.get_ylim()
    assert bottom < min(float(low.min()), -41.0 if output else 0.0)
    assert top > float(high.max())
    assert ax.get_lines()[0].get_xdata().tolist() == [-1.0, 2.0, 3.0]


def test_a_belief_has_one_band() -> None:
    x = torch.linspace(-1, 1, 5).unsqueeze(1)
    assert len(lw.plots.band(predicted(x).belief, x.squeeze(1)).collections) == 1


def test_bands_of_other_things_are_refused() -> None:
    x = torch.zeros(4, 1)
    with pytest.raises(DataError, match="one number for each input"):
        lw.plots.band(predicted(x), torch.zeros(4, 3))
    with pytest.raises(DataError, match="output is 2"):
        lw.plots.band(predicted(x), x, output=2)
    with pytest.raises(UnsupportedError, match="expected one of numbers"):
        lw.plots.band(torch.rand(4, 2), x)


def test_a_grid_surrounds_its_inputs() -> None:
    x = torch.tensor([[0.0, 1.0], [10.0, 3.0], [4.0, 2.0]])
    made = lw.plots.grid(x, points=4, margin=0.5)
    assert made.shape == (16, 2)
    assert made.amin(0).tolist() == pytest.approx([-5.0, 0.0])
    assert made.amax(0).tolist() == pytest.approx([15.0, 4.0])
    with pytest.raises(DataError, match="Make the inputs by hand"):
        lw.plots.grid(torch.zeros(5, 3))


@pytest.mark.parametrize("classes", [1, 3])
def test_a_map_shows_confidence_in_its_range(classes: int) -> None:
    points = lw.plots.grid(torch.randn(9, 2), points=5)
    probs = torch.rand(25, 1) if classes == 1 else torch.rand(25, 3).softmax(1)
    ax = lw.plots.confidence_map(probs, points, data=(torch.randn(8, 2), torch.arange(8) % 3))
    colours = ax.figure.axes[1]
    assert colours.get_ylabel() == "confidence"
    assert colours.get_ylim() == pytest.approx((0.5 if classes == 1 else 1 / 3, 1.0))
    assert len(ax.collections) == 1 + 3


def test_a_map_of_numbers_shows_their_spread() -> None:
    points = lw.plots.grid(torch.randn(9, 2), points=5)
    ax = lw.plots.confidence_map(predicted(points[:, :1]), points)
    assert ax.figure.axes[1].get_ylabel() == "standard deviation"
    with pytest.raises(DataError, match=r"lw\.plots\.grid"):
        lw.plots.confidence_map(predicted(points[:, :1]), points[:, :1])
