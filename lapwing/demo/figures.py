"""Parts that all pictures share: colours, figures without a window, axes and legends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK, PLAIN, POSTERIOR, OTHER = "#333333", "#d55e00", "#0072b2", "#e69f00"
TOTAL, EPISTEMIC = "#fddbb0", "#7fb8dc"
NORMAL_95 = 1.959964  # a normal variable is within this many standard deviations of its mean with probability 95 %


def new_figure(
    rows: int, columns: int, size: tuple[float, float], widths: Sequence[float] | None = None
) -> tuple[Any, Any]:
    """Return a figure and its axes, (rows, columns). It opens no window and changes no global state of matplotlib.

    ``widths`` are the relative widths of the columns; equal if None.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Write the figure as a PNG file."""
    figure.savefig(path, dpi=150)


def share_vertical_range(axes: Sequence[Any]) -> None:
    """Give all axes the same vertical range."""
    limits = [axis.get_ylim() for axis in axes]
    for axis in axes:
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
