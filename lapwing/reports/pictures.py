"""Pictures of Results. They read numbers and draw; no network is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from lapwing.metrics.classification import calibration
from lapwing.reports.tables import Scored

INK, PLAIN, POSTERIOR, OTHER = "#333333", "#d55e00", "#0072b2", "#e69f00"
TOTAL, EPISTEMIC = "#fddbb0", "#7fb8dc"
NORMAL_95 = 1.959964


class Drawn(Protocol):
    """What a picture reads of a Result."""

    @property
    def rows(self) -> Sequence[Scored]: ...
    @property
    def arrays(self) -> Mapping[str, list[float]]: ...


def digits(result: Drawn, path: Path) -> None:
    """For every method: reliability above, confidence on digits and on other images below."""
    count = len(result.rows)
    figure, axes = _figure(2, count, (3.6 * count, 6.8))
    for column, row in enumerate(result.rows):
        _reliability(axes[0][column], row, result.arrays)
        _confidence(axes[1][column], row.name, result.arrays)
    axes[0][0].set_ylabel("accuracy in bin")
    axes[1][0].set_ylabel("share of images")
    _level(axes[1])
    handles, labels = axes[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=3, loc="outside lower center")
    _save(figure, path)


def _reliability(axis: Any, row: Scored, arrays: Mapping[str, list[float]]) -> None:
    found = calibration(torch.tensor(arrays[f"{row.name}/test"]), torch.tensor(arrays[f"{row.name}/correct"]))
    bins = len(found.weight)
    centres = [(i + 0.5) / bins for i in range(bins)]
    # Bins with few images are pale: their accuracy is known badly.
    for centre, height, weight in zip(centres, found.accuracy.tolist(), found.weight.tolist(), strict=True):
        if weight > 0:
            axis.bar(centre, height, width=0.92 / bins, color=POSTERIOR, alpha=min(1.0, 0.3 + 7 * weight))
    axis.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1)
    axis.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="confidence")
    axis.set_title(f"{row.name}\nNLL {row.scores['NLL']:.3f}, ECE {row.scores['ECE']:.3f}", fontsize=10)


def _confidence(axis: Any, name: str, arrays: Mapping[str, list[float]]) -> None:
    edges = [i / 20 for i in range(21)]
    styles = {"test": ("test digits", POSTERIOR), "shuffled": ("shuffled pixels", PLAIN), "rotated": ("rotated", OTHER)}
    for key, (label, colour) in styles.items():
        values = arrays[f"{name}/{key}"]
        weights = [1 / len(values)] * len(values)
        axis.hist(values, edges, weights=weights, color=colour, alpha=0.15)
        axis.hist(values, edges, weights=weights, histtype="step", color=colour, linewidth=1.8, label=label)
    axis.set(xlim=(0, 1), xlabel="confidence")


def observed(result: Drawn, path: Path) -> None:
    """For every method the predicted mean with its 95 % interval against what was observed."""
    y = torch.tensor(result.arrays["observed"])
    figure, axes = _figure(1, len(result.rows), (4.6 * len(result.rows), 4.6))
    for axis, row in zip(axes[0], result.rows, strict=True):
        mean, low, high = (torch.tensor(result.arrays[f"{row.name}/{key}"]) for key in ("mean", "low", "high"))
        inside = (low <= y) & (y <= high)
        for mask, colour, label in ((inside, POSTERIOR, "inside its interval"), (~inside, PLAIN, "outside")):
            bars = [(mean - low)[mask].tolist(), (high - mean)[mask].tolist()]
            axis.errorbar(
                y[mask].tolist(), mean[mask].tolist(), yerr=bars, fmt="o", markersize=3, linewidth=0.8,
                color=colour, alpha=0.75, label=label,
            )  # fmt: skip
        ends = [float(y.min()), float(y.max())]
        axis.plot(ends, ends, color=INK, linestyle="--", linewidth=1)
        axis.set_xlabel("observed")
        axis.set_title(f"{row.name}\n{int(inside.sum())} of {len(y)} inside", fontsize=10)
    axes[0][0].set_ylabel("predicted, with 95 % interval")
    _level(axes[0])
    figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, ncols=2, loc="outside lower center")
    _save(figure, path)


def bands(result: Drawn, path: Path) -> None:
    """A function of one input: what the network does not know, and the noise on top of it."""
    arrays = result.arrays
    grid, mean = torch.tensor(arrays["grid"]), torch.tensor(arrays["mean"])
    figure, axes = _figure(1, 1, (8.0, 4.6))
    axis = axes[0][0]
    styles = {
        "std": (TOTAL, "95 % of new data: epistemic and noise"),
        "epistemic_std": (EPISTEMIC, "95 % epistemic"),
    }
    for key, (colour, label) in styles.items():
        width = NORMAL_95 * torch.tensor(arrays[key])
        low, high = (mean - width).tolist(), (mean + width).tolist()
        axis.fill_between(grid.tolist(), low, high, color=colour, linewidth=0, label=label)
    axis.plot(grid.tolist(), mean.tolist(), color=INK, linewidth=1.6, label="mean")
    axis.plot(grid.tolist(), arrays["truth"], color=INK, linestyle=":", linewidth=1.2, label="truth")
    axis.scatter(arrays["x"], arrays["y"], s=9, color=PLAIN, zorder=3, label="data")
    reach = max(abs(v) for v in arrays["y"])
    axis.set(xlabel="x", ylabel="y", xlim=(float(grid.min()), float(grid.max())), ylim=(-2.5 * reach, 2.5 * reach))
    figure.legend(*axis.get_legend_handles_labels(), frameon=False, ncols=5, fontsize=9, loc="outside lower center")
    _save(figure, path)


def _level(axes: Any) -> None:
    """The same vertical range for all."""
    limits = [axis.get_ylim() for axis in axes]
    for axis in axes:
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of its own on the Agg canvas: no window, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
