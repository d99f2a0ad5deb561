"""A picture of effective parameters: how many weights each layer has, and how many of them the data determine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lapwing.demo.result import save

WEIGHTS, GAMMA = "#fddbb0", "#0072b2"


def effective_parameters_picture(gammas: Mapping[str, float], sizes: Mapping[str, int], path: Path) -> None:
    """Draw for each layer, and for all layers together, the number of weights and the number of effective parameters.

    Args:
        gammas: effective parameters by layer, the ``layers`` of ``posterior.effective_parameters()``.
        sizes: weights by layer, its ``sizes``.
        path: the PNG file to write.
    """
    names = [*(name or "(top)" for name in gammas), "all layers"]
    gamma = [*gammas.values(), sum(gammas.values())]
    weights = [*(sizes[name] for name in gammas), sum(sizes[name] for name in gammas)]
    # A gap separates the sum from the layers.
    heights = [-float(i) for i in range(len(gammas))] + [-len(gammas) - 0.35]
    figure = Figure(figsize=(9.6, max(3.5, 1.6 + 0.42 * len(names))), layout="constrained")
    FigureCanvasAgg(figure)
    counts, shares = figure.subplots(1, 2)
    counts.barh(heights, weights, color=WEIGHTS, label="weights")
    counts.barh(heights, gamma, color=GAMMA, height=0.5, label="γ, those that the data decide")
    shares.barh(heights, [100.0] * len(names), color=WEIGHTS)
    shares.barh(heights, [100 * g / n for g, n in zip(gamma, weights, strict=True)], color=GAMMA, height=0.5)
    for height, g, n in zip(heights, gamma, weights, strict=True):
        counts.annotate(f"{g:,.1f} of {n:,}", (n, height), (5, 0), textcoords="offset points", va="center")
        shares.annotate(f"{100 * g / n:.0f} %", (100, height), (5, 0), textcoords="offset points", va="center")
    counts.set(xlabel="number of weights", yticks=heights, yticklabels=names)
    counts.set_xlim(0, 1.35 * max(weights))
    shares.set(xlabel="share of the weights, %", xlim=(0, 115), xticks=range(0, 101, 20), yticks=[])
    for axis in (counts, shares):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    figure.legend(*counts.get_legend_handles_labels(), frameon=False, ncols=2, loc="outside lower center")
    save(figure, path)
