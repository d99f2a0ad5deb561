"""Parts that pictures of several axes share: figures without a window and files. Colours are those of ``lw.plots``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lapwing.plots import INK as INK
from lapwing.plots import OTHER as OTHER
from lapwing.plots import PLAIN as PLAIN
from lapwing.plots import POSTERIOR as POSTERIOR
from lapwing.plots import new_figure as new_figure

TOTAL, EPISTEMIC = "#fddbb0", "#7fb8dc"
NORMAL_95 = 1.959964  # a normal variable is within this many standard deviations of its mean with probability 95 %


def save(figure: Any, path: Path) -> None:
    """Write the figure as a PNG file."""
    figure.savefig(path, dpi=150)


def share_vertical_range(axes: Sequence[Any]) -> None:
    """Give all axes the same vertical range."""
    limits = [axis.get_ylim() for axis in axes]
    for axis in axes:
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
