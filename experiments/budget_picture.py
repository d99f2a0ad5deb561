"""The picture of inducing points on tables: errors against the number of points and against seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.engine.contract import Record
from experiments.inducing_picture import legend_entries
from lapwing.demo.result import save
from lapwing.plots import INK, OTHER, PLAIN, POSTERIOR, new_figure

GREEN, PURPLE = "#009e73", "#cc79a7"
STYLES = {  # by family: colour, line
    "VaLLA": (POSTERIOR, "-"), "VaLLA, fixed points": (POSTERIOR, ":"), "ELLA": (PLAIN, "-"),
    "ELLA, residual": (PLAIN, ":"), "SWAG": (GREEN, "-"), "dropout": (PURPLE, "-"),
}  # fmt: skip
GROWTH = ", n = "  # in the groups that have the same table with more and more rows
MARKS = ((POSTERIOR, "o"), (PLAIN, "s"), (GREEN, "^"), (PURPLE, "D"), (OTHER, "v"))
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
    """Draw a column for each table: NLL and KL against points, NLL against seconds; below, what does not need one."""
    given = list(records)
    groups = [g for g in dict.fromkeys(record.group for record in given) if GROWTH not in g]
    figure, axes = new_figure(4, len(groups), (3.6 * len(groups), 11.0))
    for column, group in enumerate(groups):
        rows = [record for record in given if record.group == group]
        nll, kl, cost = (axes[line][column] for line in range(3))
        nll.set_title(group, fontsize=10)
        _lines(nll, rows, SIZED, "NLL", seconds=False)
        _lines(kl, rows, SIZED, "KL of y", seconds=False)
        _lines(cost, rows, tuple(STYLES), "NLL", seconds=True)
        for axis in (nll, cost):
            _levels(axis, rows)
        nll.set(xlabel="number of points M", ylabel="NLL")
        kl.set(yscale="log", xlabel="number of points M", ylabel="KL of y from exact")
        _cost_axis(cost, rows)
    legend = legend_entries(axes[:3].flat)
    for axis, below in zip(axes[3], (_needed, _gaps, _means), strict=False):
        below(axis, given)
        axis.legend(frameon=False, fontsize=8, loc="lower left" if below is _means else "best")
    columns = 5 if len(groups) > 1 else 2
    figure.legend(*legend, frameon=False, ncols=columns, fontsize=9, loc="outside upper center")
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
        if not seconds:
            _size_axis(axis, across)
        axis.plot(across, up, line, color=colour, marker="o", markersize=3.5, linewidth=1.4, label=name)


def _size_axis(axis: Any, sizes: Sequence[float]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    axis.minorticks_off()


def _cost_axis(axis: Any, records: Sequence[Record]) -> None:
    """Mark the cost of the exact posterior, and label a few core-seconds that lie in the frame."""
    exact = [record for record in records if record.method == "exact"]
    seconds = _mean([record.seconds or 0.0 for record in exact])
    axis.plot(
        [seconds], [_mean([r.scores["NLL"] for r in exact])], "*", color=INK, markersize=9, label="exact, its cost"
    )
    axis.set(xscale="log", xlabel="core-seconds of fitting", ylabel="NLL")
    low, high = axis.get_xlim()
    ticks = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 3)]
    shown = [tick for tick in ticks if low <= tick <= high]
    axis.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axis.minorticks_off()


def _levels(axis: Any, records: Sequence[Record]) -> None:
    for method, line in (("exact", "--"), ("plain", ":")):
        values = [record.scores["NLL"] for record in records if record.method == method]
        axis.axhline(_mean(values), color=INK, linestyle=line, linewidth=1, label=method)


def _grown(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of every number of rows, by its text, fewest first."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if GROWTH in record.group:
            groups.setdefault(record.group.partition(", ")[2], []).append(record)
    return dict(sorted(groups.items(), key=lambda item: int(item[0].rpartition(" ")[2])))


def _needed(axis: Any, records: Sequence[Record]) -> None:
    """Draw the number of points that were needed against γ, a mark for every repeat."""
    ends = [1.0]
    for (group, rows), (colour, mark) in zip(_grown(records).items(), MARKS, strict=False):
        needed = [record.scores for record in rows if record.method == "points needed"]
        across, up = ([row[name] for row in needed] for name in ("γ", "M"))
        axis.scatter(across, up, s=18, color=colour, marker=mark, label=group, zorder=3)
        ends += across + up
    axis.plot([0, max(ends)], [0, max(ends)], color=INK, linewidth=0.8, linestyle="-.", label="M = γ")
    axis.set(xlabel="effective parameters γ", ylabel="M that is close enough")


def _gaps(axis: Any, records: Sequence[Record]) -> None:
    """Draw the distance of the NLL from the exact one against the number of points, a line for every number of rows."""
    for (group, rows), (colour, mark) in zip(_grown(records).items(), MARKS, strict=False):
        exact = {record.repeat: record.scores["NLL"] for record in rows if record.method == "exact"}
        gaps: dict[int, list[float]] = {}
        for record in rows:
            known = family(record.method)
            if known is not None:
                gaps.setdefault(known[1], []).append(record.scores["NLL"] - exact[record.repeat])
        whole = {size: _mean(each) for size, each in sorted(gaps.items()) if len(each) == len(exact)}
        axis.plot(list(whole), list(whole.values()), color=colour, marker=mark, markersize=3.5, label=group)
    axis.set(xscale="log", xlabel="number of points M", ylabel="NLL above the exact one")


def _means(axis: Any, records: Sequence[Record]) -> None:
    """Draw the NLL with the tangent mean, less that with the network's output, a mark for every repeat."""
    variants = ("exact, tangent mean", "exact, tangent mean, tuned")
    groups = [g for g in dict.fromkeys(record.group for record in records) if GROWTH not in g]
    base = {(r.group, r.repeat): r.scores["NLL"] for r in records if r.method == "exact"}
    for (colour, mark), name, shift in zip(MARKS, variants, (-0.12, 0.12), strict=False):
        points = [
            (groups.index(r.group) + shift, r.scores["NLL"] - base[r.group, r.repeat])
            for r in records
            if r.method == name
        ]
        axis.scatter(*zip(*points, strict=True), s=18, color=colour, marker=mark, label=name.removeprefix("exact, "))
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.set(ylabel="NLL minus that of network mean", xlim=(-0.5, len(groups) - 0.5))
    axis.set_xticks(range(len(groups)), groups)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
