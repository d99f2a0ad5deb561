"""The picture of cost against quality: a column for each task, time above and memory below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.engine.contract import Record
from lapwing.demo.result import save
from lapwing.plots import INK, OTHER, PLAIN, POSTERIOR, new_figure

BASELINES = ("Ensemble", "MC dropout", "SWAG", "IVON", "Variational last layer", "Mixture of Laplace")
POINT = 100 / 72  # pixels of the size of one point of a font, at the resolution of a new figure
SHIFTS = tuple(sign * step for step in range(4, 120, 10) for sign in (1, -1))  # of a label, in points

Point = tuple[str, float, float]  # name, cost, NLL


def draw(records: Iterable[Record], path: Path) -> None:
    """Draw the NLL of every method against the seconds of its fit and its peak of memory, with the first seed.

    Slow methods have no other, and networks of several seeds differ by more than methods.
    """
    every = list(records)
    given = [record for record in every if record.repeat == min(each.repeat for each in every)]
    groups = list(dict.fromkeys(record.group for record in given))
    figure, axes = new_figure(2, len(groups), (4.6 * len(groups), 8.2))
    points = []
    for column, group in enumerate(groups):
        rows = [record for record in given if record.group == group]
        axes[0][column].set_title(group, fontsize=11)
        points.append(_points(axes[0][column], rows, lambda record: record.scores["fit s"]))
        points.append(
            _points(axes[1][column], rows, lambda record: None if record.peak is None else record.peak / 2**20)
        )
        axes[0][column].set(xlabel="fit, in processor seconds", ylabel="NLL with validation data")
        axes[1][column].set(xlabel="peak of memory in MB", ylabel="NLL with validation data")
    figure.canvas.draw()  # labels are placed by where points are
    for axis, drawn in zip(axes.T.flat, points, strict=True):
        _labels(axis, drawn)
    save(figure, path)


def _points(axis: Any, rows: Sequence[Record], cost: Callable[[Record], float | None]) -> list[Point]:
    """Draw and return a point for each method: the mean of its NLL and the mean of its cost, where it was measured."""
    points = []
    for method in dict.fromkeys(record.method for record in rows):
        of_method = [record for record in rows if record.method == method]
        costs = [value for value in map(cost, of_method) if value is not None]
        if not costs:
            continue
        nll = [record.scores["validated NLL"] for record in of_method]
        colour = PLAIN if method == "plain" else OTHER if method in BASELINES else POSTERIOR
        points.append((method, sum(costs) / len(costs), sum(nll) / len(nll)))
        axis.plot([points[-1][1]], [points[-1][2]], "o", color=colour, markersize=5)
    axis.set_xscale("log")
    axis.margins(x=0.3, y=0.25)
    return points


def _labels(axis: Any, points: Sequence[Point]) -> None:
    """Write the names beside the points, each as near as it can be without covering another."""
    taken: list[tuple[float, float, float]] = []  # left, right, height in pixels
    for name, x, y in sorted(points, key=lambda point: point[1]):
        left, height = axis.transData.transform((x, y))
        left += 5 * POINT
        right = left + 3.9 * POINT * len(name)
        free = lambda shift, left=left, right=right, height=height: all(
            left > b or right < a or abs(height + shift * POINT - h) > 9 * POINT for a, b, h in taken
        )
        shift = next((shift for shift in SHIFTS if free(shift)), SHIFTS[-1])
        taken.append((left, right, height + shift * POINT))
        axis.annotate(
            name, (x, y), xytext=(5, shift), textcoords="offset points", fontsize=7, color=INK,
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": INK} if abs(shift) > SHIFTS[0] else None,
        )  # fmt: skip
