"""The pictures of the inducing-point experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lapwing.demo.result import Result, save, share_vertical_range
from lapwing.plots import INK, OTHER, PLAIN, POSTERIOR, new_figure

TOTAL = "#fddbb0"  # the colour of the uncertainty of the exact posterior


def picture(result: Result, path: Path) -> None:
    """Draw the bands of every method on those of the exact posterior, and KL and NLL against the number of points."""
    names = [key.removesuffix("/std") for key in result.arrays if key.endswith("/std")]
    figure, axes = new_figure(4, 2, (10.4, 13.6))
    low, high = _two_deviations(result.arrays, "exact/std", "")
    room = 0.05 * (max(high) - min(low))
    panels = [*axes[0], *axes[1]]
    for axis, name in zip(panels, names, strict=True):
        _against_exact(axis, result.arrays, name)
        axis.set(xlabel="x", ylabel="y", ylim=(min(low) - room, max(high) + room))
        axis.set_title(name, fontsize=10)
    for line, score in ((axes[2], "KL"), (axes[3], "NLL")):
        for axis, label in zip(line, ("as started", "learned"), strict=True):
            _points_against_error(axis, result.arrays, score, label)
        share_vertical_range(line)
    figure.legend(*legend_entries(panels), frameon=False, ncols=5, fontsize=9, loc="outside upper center")
    save(figure, path)


def _against_exact(axis: Any, arrays: Mapping[str, list[float]], name: str) -> None:
    grid = arrays["grid"]
    _band(axis, arrays, "exact/std", TOTAL, "exact, two standard deviations")
    if name != "exact":
        _edges(axis, arrays, f"{name}/std", POSTERIOR, "the method, two standard deviations")
        bottom = [0.03] * len(arrays[f"{name}/points"])  # a share of the axis, so that they are on its lower edge
        axis.plot(
            arrays[f"{name}/points"], bottom, "|", color=POSTERIOR, markersize=11, label="inducing points",
            transform=axis.get_xaxis_transform(),
        )  # fmt: skip
    axis.plot(grid, arrays["mean"], color=INK, linewidth=1.4, label="mean")
    axis.scatter(arrays["x"], arrays["y"], s=5, color=PLAIN, zorder=3, label="data")
    axis.set_xlim(grid[0], grid[-1])


def _band(axis: Any, arrays: Mapping[str, list[float]], key: str, colour: str, label: str, group: str = "") -> None:
    low, high = _two_deviations(arrays, key, group)
    axis.fill_between(arrays[f"{group}grid"], low, high, color=colour, linewidth=0, label=label)


def _edges(axis: Any, arrays: Mapping[str, list[float]], key: str, colour: str, label: str, group: str = "") -> None:
    low, high = _two_deviations(arrays, key, group)
    axis.plot(arrays[f"{group}grid"], low, color=colour, linewidth=1.4, label=label)
    axis.plot(arrays[f"{group}grid"], high, color=colour, linewidth=1.4)


def _two_deviations(arrays: Mapping[str, list[float]], key: str, group: str) -> tuple[list[float], list[float]]:
    mean, std = (torch.tensor(arrays[f"{group}{name}"]) for name in ("mean", key))
    return (mean - 2 * std).tolist(), (mean + 2 * std).tolist()


def _points_against_error(axis: Any, arrays: Mapping[str, list[float]], score: str, label: str) -> None:
    """Draw the median over draws, with bars from least to largest; for the NLL also that of the exact posterior."""
    sizes = arrays["sizes"]
    colours = {"greedy": POSTERIOR, "kmeans": OTHER, "random": PLAIN, "Nyström": INK}
    starts = list(dict.fromkeys(key.split("/")[1] for key in arrays if key.startswith(f"{score} {label}/")))
    for place, start in enumerate(starts):
        draws = [sorted(arrays[f"{score} {label}/{start}/{size:.0f}"]) for size in sizes]
        middle = [each[len(each) // 2] for each in draws]
        bars = [[m - each[0] for m, each in zip(middle, draws)], [each[-1] - m for m, each in zip(middle, draws)]]
        shifted = [size * 1.02 ** (place - 1) for size in sizes]  # so that bars do not overlap
        axis.errorbar(
            shifted, middle, yerr=bars, color=colours[start], marker="o", markersize=4, linewidth=1.4, capsize=2,
            label=start,
        )  # fmt: skip
    axis.set(xscale="log", xlabel="number of points")
    if score == "KL":
        axis.set(yscale="log", ylabel="KL from exact, nats")
    else:
        axis.axhline(arrays["NLL exact"][0], color=INK, linestyle="--", linewidth=1, label="exact")
        axis.set(ylabel="NLL of held-out rows, nats")
    axis.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    axis.minorticks_off()
    axis.set_title(f"points {label}: median and range of draws", fontsize=10)
    axis.legend(frameon=False, fontsize=9, loc="lower left" if score == "KL" else "upper right")


def targets_picture(result: Result, path: Path) -> None:
    """Draw the band of Full and the edges of the other bands: a row for every target, a column for every size."""
    groups = list(dict.fromkeys(row.group for row in result.rows))
    names = list(dict.fromkeys(row.name for row in result.rows))[1:]
    sizes = list(dict.fromkeys(name.split("(")[1] for name in names))
    figure, axes = new_figure(len(groups), len(sizes), (6.2 * len(sizes), 0.6 + 3.0 * len(groups)))
    for line, group in zip(axes, groups, strict=True):
        for axis, size in zip(line, sizes, strict=True):
            compared = [name for name in names if name.endswith(size)]
            _against_full(axis, result.arrays, group, compared)
            axis.set_title(f"{group}: {' and '.join(compared)}", fontsize=10)
    figure.legend(*legend_entries(axes.flat), frameon=False, ncols=6, fontsize=9, loc="outside lower center")
    save(figure, path)


def _against_full(axis: Any, arrays: Mapping[str, list[float]], group: str, names: Sequence[str]) -> None:
    grid, y = arrays[f"{group}/grid"], arrays[f"{group}/y"]
    _band(axis, arrays, "Full/std", TOTAL, "Full, two standard deviations", f"{group}/")
    for name, colour in zip(names, (POSTERIOR, OTHER), strict=True):
        _edges(axis, arrays, f"{name}/std", colour, name.split("(")[0], f"{group}/")
    axis.plot(grid, arrays[f"{group}/mean"], color=INK, linewidth=1.2, label="mean")
    axis.plot(grid, arrays[f"{group}/truth"], color=INK, linestyle=":", linewidth=1.2, label="truth")
    axis.scatter(arrays[f"{group}/x"], y, s=4, color=PLAIN, zorder=3, label="data")
    room = 0.6 * (max(y) - min(y))
    axis.set(xlabel="x", ylabel="y", xlim=(grid[0], grid[-1]), ylim=(min(y) - room, max(y) + room))


def legend_entries(axes: Any) -> tuple[list[Any], list[str]]:
    """Return handles and labels of the legends of some axes, each label once."""
    entries: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    return list(entries.values()), list(entries)
