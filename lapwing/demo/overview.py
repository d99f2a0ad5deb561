"""The picture of the demo: what Lapwing adds to a regression and to a classifier."""

from __future__ import annotations

from pathlib import Path

from lapwing.demo import figures
from lapwing.demo.bands import draw_bands
from lapwing.demo.digits import draw_reliability
from lapwing.demo.fits import PLAIN, VALIDATED
from lapwing.demo.result import Result


def picture(digits: Result, bands: Result, path: Path) -> None:
    """Draw intervals around a curve with a gap in the data, and how often two classifiers of noisy digits are right."""
    figure, axes = figures.new_figure(1, 3, (12.4, 4.2), widths=(1.5, 1, 1))
    curve, left, right = axes[0]
    draw_bands(curve, bands)
    draw_reliability(left, digits, "noisy digits", PLAIN, figures.PLAIN)
    draw_reliability(right, digits, "noisy digits", VALIDATED, figures.POSTERIOR)
    figures.save(figure, path)
