"""The picture of the demo: what Lapwing adds to a regression and to a classifier."""

from __future__ import annotations

from pathlib import Path

from lapwing.demo import figures
from lapwing.demo.bands import draw_bands
from lapwing.demo.digits import draw_reliability
from lapwing.demo.result import Result
from lapwing.demo.training import PLAIN, VALIDATED


def picture(digits: Result, bands: Result, path: Path) -> None:
    """Draw intervals around a curve with a gap in the data, and how often two classifiers of noisy digits are right."""
    figure, axes = figures.new_figure(1, 2, (11.6, 4.6), widths=(1.35, 1))
    draw_bands(axes[0, 0], bands)
    draw_reliability(axes[0, 1], digits, "noisy digits", (PLAIN, VALIDATED))
    figures.save(figure, path)
