"""Pictures of Results. They read numbers and draw; no network is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from experiments.tables import Scored
from lapwing.metrics.classification import calibration

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


def effective_parameters(gammas: Mapping[str, float], sizes: Mapping[str, int], path: Path) -> None:
    """Layer by layer, and in all: how many weights there are, and how many of them the data decide.

    ``gammas`` and ``sizes`` are the ``layers`` and ``sizes`` of an ``EffectiveParameters``.
    """
    names = [*(name or "(top)" for name in gammas), "all layers"]
    decided = [*gammas.values(), sum(gammas.values())]
    weights = [*(sizes[name] for name in gammas), sum(sizes[name] for name in gammas)]
    # A gap sets the sum apart from what it sums.
    heights = [-float(i) for i in range(len(gammas))] + [-len(gammas) - 0.35]
    figure, axes = _figure(1, 2, (9.6, max(3.5, 1.6 + 0.42 * len(names))))
    counts, shares = axes[0]
    counts.barh(heights, weights, color=TOTAL, label="weights")
    counts.barh(heights, decided, color=POSTERIOR, height=0.5, label="γ, those that the data decide")
    shares.barh(heights, [100.0] * len(names), color=TOTAL)
    shares.barh(heights, [100 * g / n for g, n in zip(decided, weights, strict=True)], color=POSTERIOR, height=0.5)
    for height, gamma, count in zip(heights, decided, weights, strict=True):
        counts.annotate(f"{gamma:,.1f} of {count:,}", (count, height), (5, 0), textcoords="offset points", va="center")
        shares.annotate(f"{100 * gamma / count:.0f} %", (100, height), (5, 0), textcoords="offset points", va="center")
    counts.set(xlabel="number of weights", yticks=heights, yticklabels=names)
    counts.set_xlim(0, 1.35 * max(weights))
    shares.set(xlabel="share of the weights, %", xlim=(0, 115), xticks=range(0, 101, 20), yticks=[])
    for axis in (counts, shares):
        axis.tick_params(axis="y", length=0)
    figure.legend(*counts.get_legend_handles_labels(), frameon=False, ncols=2, loc="outside lower center")
    _save(figure, path)


def distances(result: Drawn, path: Path) -> None:
    """For every network, as training goes on: how far naive and corrected predictive are apart, and their NLL."""
    watched = [key.removesuffix("/KL") for key in result.arrays if key.endswith("/KL")]
    networks = list(dict.fromkeys(run.split("/")[0] for run in watched))
    figure, axes = _figure(len(networks), 2, (9.6, 0.5 + 3.4 * len(networks)))
    styles = {"plain": ("plain network", PLAIN), "naive": ("naive evidence", OTHER),
              "corrected": ("corrected evidence", POSTERIOR)}  # fmt: skip
    for (apart, nll), network in zip(axes, networks, strict=True):
        for run in (run for run in watched if run.split("/")[0] == network):
            _against_epochs(apart, result.arrays, f"{run}/KL", {"color": INK})
            for key, (label, colour) in styles.items():
                _against_epochs(nll, result.arrays, f"{run}/NLL {key}", {"color": colour, "label": label})
        apart.set(title=f"{network}: naive from corrected", xlabel="epoch", ylabel="KL divergence, nats")
        nll.set(title=f"{network}: test data", xlabel="epoch", ylabel="NLL, nats")
        for axis in (apart, nll):
            axis.title.set_fontsize(10)
            axis.set_xticks(result.arrays["epochs"])
            axis.set_ylim(bottom=0)
    handles, labels = axes[0][1].get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))  # one entry each, however many runs there are
    figure.legend(shown.values(), shown.keys(), frameon=False, ncols=3, loc="outside lower center")
    _save(figure, path)


def _against_epochs(axis: Any, arrays: Mapping[str, list[float]], key: str, style: dict[str, str]) -> None:
    """A run that ended early has fewer values than there are epochs to look at."""
    values = arrays[key]
    axis.plot(arrays["epochs"][: len(values)], values, marker="o", markersize=4.5, linewidth=1.6, **style)


def sampling(result: Drawn, path: Path) -> None:
    """Against γ: the variance of one objective's gradients over the other's, and how well one sample knows γ."""
    arrays = result.arrays
    figure, axes = _figure(1, 2, (10.4, 4.4))
    ratio, spread = axes[0]
    for key, colour, label in (("optimum", POSTERIOR, "at the solution"), ("start", OTHER, "at a sample of the prior")):
        ratio.loglog(arrays["γ / nC, %"], arrays[f"L / L' at {key}"], "o-", color=colour, markersize=4.5, label=label)
    ratio.axhline(1, color=INK, linestyle="--", linewidth=1)
    ratio.set(title="gradients from one datum", xlabel="γ / nC, %", ylabel="variance of L over that of L'")
    for space, colour in (("function", POSTERIOR), ("weight", PLAIN)):
        spread.loglog(arrays["γ"], arrays[f"expected {space}, %"], color=colour, label=f"{space} space, closed form")
        spread.loglog(arrays["γ"], arrays[f"sd {space}, %"], "o", color=colour, markersize=4.5, label="measured")
    bound = [100 * (2 / gamma) ** 0.5 for gamma in arrays["γ"]]
    spread.loglog(arrays["γ"], bound, color=INK, linestyle=":", label="√(2/γ)")
    spread.axhline(10, color=INK, linestyle="--", linewidth=1)
    spread.set(title="γ from one sample", xlabel="γ", ylabel="relative standard deviation, %")
    for axis in (ratio, spread):
        axis.title.set_fontsize(10)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.legend(frameon=False, fontsize=9)
    _save(figure, path)


def inducing(result: Drawn, path: Path) -> None:
    """Bands of every method around those of the exact posterior; KL and NLL against the number of points, by start."""
    names = [key.removesuffix("/std") for key in result.arrays if key.endswith("/std")]
    figure, axes = _figure(4, 2, (10.4, 13.6))
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
        _level(line)
    figure.legend(*_once(panels), frameon=False, ncols=5, fontsize=9, loc="outside upper center")
    _save(figure, path)


def _against_exact(axis: Any, arrays: Mapping[str, list[float]], name: str) -> None:
    grid = arrays["grid"]
    _band(axis, arrays, "exact/std", TOTAL, "exact, two standard deviations")
    if name != "exact":
        _edges(axis, arrays, f"{name}/std", POSTERIOR, "the method, two standard deviations")
        bottom = [0.03] * len(arrays[f"{name}/points"])  # on the lower edge, whatever the range is
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
    """The median over draws, and bars from the least to the largest; for NLL the exact posterior as a line."""
    sizes = arrays["sizes"]
    colours = {"greedy": POSTERIOR, "kmeans": OTHER, "random": PLAIN, "Nyström": INK}
    starts = list(dict.fromkeys(key.split("/")[1] for key in arrays if key.startswith(f"{score} {label}/")))
    for place, start in enumerate(starts):
        draws = [sorted(arrays[f"{score} {label}/{start}/{size:.0f}"]) for size in sizes]
        middle = [each[len(each) // 2] for each in draws]
        bars = [[m - each[0] for m, each in zip(middle, draws)], [each[-1] - m for m, each in zip(middle, draws)]]
        shifted = [size * 1.02 ** (place - 1) for size in sizes]  # bars side by side
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


def inducing_targets(result: Drawn, path: Path) -> None:
    """The band of Full and the edges of those of the others; a line for every target, a column for every size."""
    groups = list(dict.fromkeys(row.group for row in result.rows))
    names = list(dict.fromkeys(row.name for row in result.rows))[1:]
    sizes = list(dict.fromkeys(name.split("(")[1] for name in names))
    figure, axes = _figure(len(groups), len(sizes), (6.2 * len(sizes), 0.6 + 3.0 * len(groups)))
    for line, group in zip(axes, groups, strict=True):
        for axis, size in zip(line, sizes, strict=True):
            shown = [name for name in names if name.endswith(size)]
            _against_full(axis, result.arrays, group, shown)
            axis.set_title(f"{group}: {' and '.join(shown)}", fontsize=10)
    figure.legend(*_once(axes.flat), frameon=False, ncols=6, fontsize=9, loc="outside lower center")
    _save(figure, path)


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


def response(result: Drawn, path: Path) -> None:
    """Bands by pushing above; below, the error against the strength of the push, and against the length of tuning."""
    arrays = result.arrays
    names = (
        "full Hessian",
        "HFL, each point",
        "HFL, mean push",
        "HFL, absolute push, calibrated",
        "GGN",
        "ensemble of 5",
    )
    shown = [name for name in names if f"mean/{name}" in arrays]
    figure, axes = _figure(3, 3, (11.4, 9.4))
    for axis, name in zip((*axes[0], *axes[1]), shown, strict=False):
        mean, std = (torch.tensor(arrays[f"{kind}/{name}"]) for kind in ("mean", "std"))
        axis.fill_between(arrays["grid"], mean - 2 * std, mean + 2 * std, color=EPISTEMIC, label="2 sd of f")
        axis.plot(arrays["grid"], mean, color=POSTERIOR, label="network")
        axis.plot(arrays["grid"], arrays["truth"], color=INK, linestyle="--", linewidth=1, label="truth")
        axis.plot(arrays["x"], arrays["y"], ".", color=PLAIN, markersize=4, label="data")
        axis.set_title(name, fontsize=10)
        axis.set_ylim(min(arrays["y"]) - 2, max(arrays["y"]) + 2)
    axes[0][0].legend(frameon=False, fontsize=8)
    strength, steps, blank = axes[2]
    for label, colour in (("float64", POSTERIOR), ("float32", PLAIN)):
        strength.loglog(arrays["strengths"], arrays[f"median/{label}"], "o-", color=colour, markersize=3, label=label)
        strength.loglog(arrays["strengths"], arrays[f"worst/{label}"], ":", color=colour, label=f"{label}, worst point")
    strength.set(xlabel="strength λ times the deviation", ylabel="relative error")
    strength.set_title("error against the push", fontsize=10)
    strength.set_ylim(1e-14, 1e2)
    strength.legend(frameon=False, fontsize=8, loc="lower right")
    for place, colour in (("data", POSTERIOR), ("gap", PLAIN), ("outside", OTHER)):
        steps.semilogx(arrays["steps"], arrays[f"recovered/{place}"], "o-", color=colour, label=place)
    steps.axhline(1, color=INK, linestyle="--", linewidth=1)
    steps.set(xlabel="steps of Adam", ylabel="share of the variance")
    steps.set_title("unfinished fine-tuning", fontsize=10)
    steps.legend(frameon=False, fontsize=8)
    blank.axis("off")
    _save(figure, path)


def _once(axes: Any) -> tuple[list[Any], list[str]]:
    """Every entry of the legends of some axes once."""
    shown: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    return list(shown.values()), list(shown)


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
