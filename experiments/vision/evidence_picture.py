"""The picture of the evidence: distances and NLL while training goes on, and against the scale of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.engine.contract import Record
from lapwing.demo.result import save
from lapwing.plots import INK, OTHER, PLAIN, POSTERIOR, new_figure

COLOURS = {
    "plain network": PLAIN, "naive": OTHER, "naive, one precision": OTHER, "corrected": POSTERIOR,
    "corrected, one precision": "#56b4e9", "corrected, many": POSTERIOR,
}  # fmt: skip


def picture(records: Sequence[Record], path: Path) -> None:
    """Draw, for every network, a thin line for each seed: KL and NLL against the epoch and against the factor."""
    moving = list(dict.fromkeys(_network(record) for record in records if _step(record)))
    figure, axes = new_figure(max(1, len(moving)), 4, (14.4, 0.9 + 3.2 * max(1, len(moving))))
    for row, network in zip(axes, moving, strict=False):
        for (axis, score), part in zip(zip(row, ("KL", "NLL", "KL", "NLL"), strict=True), (0, 0, 1, 1), strict=True):
            kind = ("training", "scale")[part]
            some = [r for r in records if _step(r) and _network(r) == network and f" {kind}," in r.group]
            _lines(axis, some, score)
            axis.set(title=f"{network}, {kind}", ylabel=f"{score}, nats", xlabel=("epoch", "factor")[part])
            axis.title.set_fontsize(10)
            if part:
                axis.set_xscale("log")
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    figure.legend(lines.values(), lines.keys(), frameon=False, ncols=5, loc="outside lower center")
    save(figure, path)


def _lines(axis: Any, records: Sequence[Record], score: str) -> None:
    """Draw a line for every method and seed that has the score."""
    for method in dict.fromkeys(record.method for record in records):
        for seed in dict.fromkeys(record.repeat for record in records):
            points = sorted(
                (_step(r), r.scores[score]) for r in records if (r.method, r.repeat) == (method, seed)
                and score in r.scores
            )  # fmt: skip
            if points:
                colour = COLOURS.get(method, INK)
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3.5, linewidth=1.2, color=colour,
                          label=method)  # fmt: skip


def _network(record: Record) -> str:
    return record.group.split(", ")[0].rsplit(" ", 1)[0]


def _step(record: Record) -> float:
    """Return the epoch or the factor of a record; zero if it has neither."""
    words = record.group.split(", ")
    return float(words[1].split()[-1]) if len(words) > 1 else 0.0
