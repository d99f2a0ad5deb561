"""The picture of shifted images: NLL and ECE of every method against the shift, a row for each network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.engine.contract import Record
from lapwing.demo.result import save
from lapwing.plots import new_figure

COLOURS = (
    "#d55e00", "#e69f00", "#009e73", "#0072b2", "#56b4e9", "#cc79a7", "#333333", "#999999", "#882255", "#44aa99",
    "#117733", "#aa4499", "#ddcc77", "#6f4e37", "#332288",
)  # fmt: skip


def picture(records: Sequence[Record], path: Path) -> None:
    """Draw the mean over the seeds of NLL and ECE at every step, a line for each method."""
    networks = list(dict.fromkeys(record.group.split(", ")[0] for record in records))
    methods = list(dict.fromkeys(record.method for record in records))
    colours = {method: COLOURS[i % len(COLOURS)] for i, method in enumerate(methods)}
    figure, axes = new_figure(len(networks), 2, (10.4, 0.8 + 3.2 * len(networks)))
    for pair, network in zip(axes, networks, strict=True):
        for axis, score in zip(pair, ("NLL", "ECE"), strict=True):
            for method in methods:
                _line(axis, records, network, method, score, colours[method])
            axis.set(title=network, ylabel=f"{score}, nats" if score == "NLL" else score, ylim=(0, None))
            axis.title.set_fontsize(10)
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    figure.legend(lines.values(), lines.keys(), frameon=False, ncols=4, loc="outside lower center")
    save(figure, path)


def _line(axis: Any, records: Sequence[Record], network: str, method: str, score: str, colour: str) -> None:
    """Draw one line, if the method has scores for the network."""
    values: dict[float, list[float]] = {}
    unit = ""
    for record in records:
        name, step = record.group.split(", ")
        if (name, record.method) == (network, method):
            words = step.split()
            number = next(float(word) for word in words if word.replace(".", "", 1).isdigit())
            unit = next(word for word in words if word.isalpha())
            values.setdefault(number, []).append(record.scores[score])
    if values:
        steps = sorted(values)
        means = [sum(values[step]) / len(values[step]) for step in steps]
        axis.plot(steps, means, marker="o", markersize=3.5, linewidth=1.4, color=colour, label=method)
        axis.set_xlabel(unit)
