"""The picture of inducing points on tables: errors against the number of points and against seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.engine.contract import Record
from experiments.inducing_picture import legend_entries
from lapwing.demo.figures import INK, OTHER, PLAIN, POSTERIOR, new_figure, save

GREEN, PURPLE = "#009e73", "#cc79a7"
STYLES = {  # by family: colour, line
    "VaLLA": (POSTERIOR, "-"), "VaLLA, fixed points": (POSTERIOR, ":"), "ELLA": (PLAIN, "-"),
    "ELLA, residual": (PLAIN, ":"), "SWAG": (GREEN, "-"), "dropout": (PURPLE, "-"),
}  # fmt: skip
SIZED = ("VaLLA", "VaLLA, fixed points", "ELLA", "ELLA, residual")


def family(method: str) -> tuple[str, int] | None:
    """Return the family and the size of a method; None if it has none.

    >>> family("VaLLA(20), fixed points"), family("exact")
    (('VaLLA, fixed points', 20), None)
    """
    name, opened, rest = method.partition("(")
    size, closed, suffix = rest.partition(")")
    if not opened or not closed or name + suffix not in STYLES:
        return None
    return name + suffix, int(size)


def draw(records: Iterable[Record], path: Path) -> None:
    """Draw a column for each table: NLL and KL against points, NLL against seconds; below, points needed against γ."""
    given = list(records)
    groups = [g for g in dict.fromkeys(record.group for record in given) if ", n = " not in g]
    figure, axes = new_figure(4, len(groups), (3.6 * len(groups), 10.5))
    for column, group in enumerate(groups):
        rows = [record for record in given if record.group == group]
        nll, kl, cost = (axes[line][column] for line in range(3))
        nll.set_title(group, fontsize=10)
        _lines(nll, rows, SIZED, "NLL", seconds=False)
        _lines(kl, rows, SIZED, "KL of y", seconds=False)
        _lines(cost, rows, tuple(STYLES), "NLL", seconds=True)
        for axis in (nll, cost):
            _levels(axis, rows)
        nll.set(xscale="log", xlabel="number of points M", ylabel="NLL" if column == 0 else "")
        kl.set(xscale="log", yscale="log", xlabel="number of points M", ylabel="KL of y" if column == 0 else "")
        cost.set(xscale="log", xlabel="seconds of fitting", ylabel="NLL" if column == 0 else "")
    _growth(axes[3][0], given)
    for axis in axes[3][1:]:
        axis.axis("off")
    figure.legend(*legend_entries(axes.flat), frameon=False, ncols=4, fontsize=9, loc="outside upper center")
    save(figure, path)


def _lines(axis: Any, records: Sequence[Record], families: Sequence[str], score: str, seconds: bool) -> None:
    """Draw the mean over repeats of a score, against size or mean seconds."""
    for name in families:
        sizes: dict[int, list[Record]] = {}
        for record in records:
            known = family(record.method)
            if known is not None and known[0] == name and score in record.scores:
                sizes.setdefault(known[1], []).append(record)
        if not sizes:
            continue
        ordered = sorted(sizes.items())
        across = [_mean([r.seconds or 0.0 for r in rows]) if seconds else size for size, rows in ordered]
        up = [_mean([r.scores[score] for r in rows]) for _, rows in ordered]
        colour, line = STYLES[name]
        axis.plot(across, up, line, color=colour, marker="o", markersize=3.5, linewidth=1.4, label=name)


def _levels(axis: Any, records: Sequence[Record]) -> None:
    for method, colour, line in (("exact", INK, "--"), ("plain", INK, ":")):
        values = [record.scores["NLL"] for record in records if record.method == method]
        axis.axhline(_mean(values), color=colour, linestyle=line, linewidth=1, label=f"{method}")


def _growth(axis: Any, records: Sequence[Record]) -> None:
    """Draw the number of points that were needed against γ, a mark for every repeat."""
    needed = [record for record in records if record.method == "points needed"]
    marks = ("o", "s", "^", "D", "v")
    for place, group in enumerate(dict.fromkeys(record.group for record in needed)):
        rows = [record.scores for record in needed if record.group == group]
        across, up = ([row[name] for row in rows] for name in ("γ", "M"))
        axis.scatter(across, up, s=18, color=OTHER, edgecolors=INK, marker=marks[place % 5], label=group)
    largest = max((value for record in needed for value in record.scores.values()), default=math.nan)
    axis.plot([1, largest], [1, largest], color=INK, linewidth=0.8, linestyle="-.", label="M = γ")
    axis.set(xscale="log", yscale="log", xlabel="effective parameters γ", ylabel="M within 0.01 nats")
    least = min((value for record in needed for value in record.scores.values()), default=1.0)
    axis.set(xlim=(least / 2, largest * 2), ylim=(least / 2, largest * 2))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
