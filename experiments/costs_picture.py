"""The picture of cost against quality: a column for each task, time above and memory below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.engine.contract import Record
from lapwing.demo.figures import INK, OTHER, PLAIN, POSTERIOR, new_figure, save

BASELINES = ("Ensemble", "MC dropout", "SWAG", "IVON", "Variational last layer", "Mixture of Laplace")


def draw(records: Iterable[Record], path: Path) -> None:
    """Draw the NLL of every method against the epochs of its fit and against its peak of memory."""
    given = list(records)
    groups = list(dict.fromkeys(record.group for record in given))
    figure, axes = new_figure(2, len(groups), (4.6 * len(groups), 8.2))
    for column, group in enumerate(groups):
        rows = [record for record in given if record.group == group]
        axes[0][column].set_title(group, fontsize=11)
        _points(axes[0][column], rows, lambda record: record.scores["fit / epoch"])
        _points(axes[1][column], rows, lambda record: None if record.peak is None else record.peak / 2**20)
        axes[0][column].set(xlabel="fit, in epochs of plain training", ylabel="NLL with validation data")
        axes[1][column].set(xlabel="peak of memory in MB", ylabel="NLL with validation data")
    save(figure, path)


def _points(axis: Any, rows: Sequence[Record], cost: Any) -> None:
    """Draw one point for each method: the mean of its NLL against the mean of its cost, where it was measured."""
    for method in dict.fromkeys(record.method for record in rows):
        of_method = [record for record in rows if record.method == method]
        costs = [value for value in map(cost, of_method) if value is not None]
        if not costs:
            continue
        nll = [record.scores["NLL, validated"] for record in of_method]
        colour = PLAIN if method == "plain" else OTHER if method in BASELINES else POSTERIOR
        x, y = sum(costs) / len(costs), sum(nll) / len(nll)
        axis.plot([x], [y], "o", color=colour, markersize=5)
        axis.annotate(method, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7, color=INK)
    axis.set_xscale("log")
    axis.margins(x=0.15)
