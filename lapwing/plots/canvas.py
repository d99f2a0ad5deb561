"""Parts that all pictures share: colours, figures without a window, legends. Matplotlib is imported when used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lapwing.errors import UnsupportedError

# Colours that people with any kind of colour blindness can tell apart (Okabe and Ito 2008), and ink for the rest.
INK, PLAIN, POSTERIOR, OTHER = "#333333", "#d55e00", "#0072b2", "#e69f00"
COLOURS = (PLAIN, POSTERIOR, OTHER, "#009e73", "#cc79a7", "#56b4e9")
MARKERS, DASHES = ("s", "o", "^", "D", "v", "P"), ("--", "-", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)))
SIZE = (4.6, 3.5)  # inches


def new_axis(ax: Any = None, size: tuple[float, float] = SIZE) -> Any:
    """Return the axis that was given, or one in a new figure."""
    return new_figure(1, 1, size)[1][0, 0] if ax is None else ax


def new_figure(
    rows: int, columns: int, size: tuple[float, float], widths: Sequence[float] | None = None
) -> tuple[Any, Any]:
    """Return a figure and its axes, (rows, columns). It opens no window and changes no global state of Matplotlib.

    ``widths`` are the relative widths of the columns; equal if None.

    Raises:
        UnsupportedError: Matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "lw.plots needs the package matplotlib, which is not installed: pip install 'lapwing[plots]'."
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def styled(predictions: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return name, prediction and the style of its line, for one prediction or for a mapping of names to several.

    >>> [(name, style["color"]) for name, _, style in styled({"plain": 1, "Lapwing": 2})]
    [('plain', '#d55e00'), ('Lapwing', '#0072b2')]
    """
    if not isinstance(predictions, Mapping):
        return [("", predictions, {"color": POSTERIOR, "marker": "o", "linestyle": "-"})]
    if not predictions:
        raise UnsupportedError("the mapping of predictions is empty; expected at least one name with its prediction.")
    return [
        (
            plain_text(str(name)),
            prediction,
            {"color": COLOURS[i % 6], "marker": MARKERS[i % 6], "linestyle": DASHES[i % 6]},
        )
        for i, (name, prediction) in enumerate(predictions.items())
    ]


def plain_text(text: str) -> str:
    """Return text that Matplotlib draws as it is: dollar signs would start mathematics."""
    return text.replace("$", r"\$")


def add_legend(ax: Any, **settings: Any) -> None:
    """Add a legend without a frame, if something has a label."""
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=9, **settings)


def thinned(length: int, most: int = 200) -> list[int]:
    """Return at most about ``most`` of the row numbers 0..length-1, evenly, the first and the last among them.

    >>> thinned(4), thinned(100, 3)
    ([0, 1, 2, 3], [0, 50, 99])
    """
    if length <= most:
        return list(range(length))
    return sorted({round(i * (length - 1) / (most - 1)) for i in range(most)})
