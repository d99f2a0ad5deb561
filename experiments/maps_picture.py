"""The pictures of the maps: bands of every method on one input, and maps of confidence on two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.response_picture import EPISTEMIC
from lapwing.demo.result import save
from lapwing.plots import INK, PLAIN, POSTERIOR, new_figure

CLASSES = (PLAIN, POSTERIOR, "#009e73")  # colours of the classes
Place = tuple[str, str]  # the name of a row and that of a method


def panels(
    rows: Sequence[str], methods: Sequence[str], across: int, size: tuple[float, float]
) -> tuple[Any, dict[Place, Any]]:
    """Return a figure and its axes by row and method; methods that do not fit beside each other take more rows."""
    blocks = -(-len(methods) // across)
    figure, axes = new_figure(blocks * len(rows), across, (size[0] * across, size[1] * blocks * len(rows)))
    placed: dict[Place, Any] = {}
    for place in range(blocks * across):
        block, column = divmod(place, across)
        for line, row in enumerate(rows):
            axis = axes[block * len(rows) + line][column]
            if place >= len(methods):
                axis.axis("off")
                continue
            placed[row, methods[place]] = axis
            if line == 0:
                axis.set_title(methods[place].replace(", ", ",\nlargest "), fontsize=9)
            if column == 0:
                axis.set_ylabel(row, fontsize=9)
    return figure, placed


def draw_band(axis: Any, grid: Tensor, mean: Tensor, std: Tensor, truth: Tensor, reach: float) -> None:
    """Draw mean and band of a method, and the true curve. A band that leaves the frame is named by its width there."""
    x, centre, width = grid[:, 0], mean[:, 0], 2 * std[:, 0]
    low, high = centre - width, centre + width
    axis.fill_between(x, low, high, color=EPISTEMIC, linewidth=0, label="2 standard deviations of f")
    axis.plot(x, centre, color=POSTERIOR, linewidth=1.3, label="mean")
    axis.plot(x, truth[:, 0], color=INK, linestyle=":", linewidth=1.2, label="truth")
    axis.set(xlim=(float(x[0]), float(x[-1])), ylim=(-reach, reach))
    axis.tick_params(labelsize=7)
    widest = float(width.max())
    if float(high.max()) > reach or float(low.min()) < -reach:
        axis.text(
            0.5, 0.03, f"2 sd up to {widest:.{1 if widest < 100 else 0}f}", transform=axis.transAxes, fontsize=7,
            ha="center", color=INK, bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1},
        )  # fmt: skip


def draw_points(axis: Any, x: Tensor, y: Tensor) -> None:
    """Draw the training data of a regression."""
    axis.scatter(x[:, 0], y[:, 0], s=4, color=PLAIN, zorder=3, label="data")


def draw_map(axis: Any, probs: Tensor, side: float, x: Tensor, y: Tensor) -> None:
    """Draw the most probable class by its colour, the paler the less probable, and the training data.

    ``probs`` (n², C) are those of ``square(side, n)``.
    """
    axis.imshow(blended(probs), origin="lower", extent=(-side, side, -side, side), interpolation="nearest")
    for number in range(probs.shape[1]):
        rows = y == number
        axis.scatter(x[rows, 0], x[rows, 1], s=8, color=CLASSES[number], edgecolors="white", linewidths=0.4)
    axis.set(xticks=[], yticks=[])
    axis.spines[["left", "bottom"]].set_visible(False)


def blended(probs: Tensor) -> Any:
    """Return the colours of a map, (n, n, 3): white where no class is more probable than others.

    >>> blended(torch.tensor([[0.5, 0.5]])).tolist()
    [[[1.0, 1.0, 1.0]]]
    """
    count = probs.shape[1]
    colours = torch.tensor([[int(each[i : i + 2], 16) / 255 for i in (1, 3, 5)] for each in CLASSES]).to(probs)
    best = probs.max(1)
    strength = ((best.values - 1 / count) / (1 - 1 / count)).clamp(0, 1).unsqueeze(1)
    mixed = 1 - strength * (1 - colours[best.indices])
    side = round(len(probs) ** 0.5)
    return mixed.reshape(side, side, 3).numpy()


def square(side: float, count: int) -> Tensor:
    """Return the points of a grid over a square around zero, (count², 2), row by row from below."""
    ticks = torch.linspace(-side, side, count, dtype=torch.float64)
    across, up = torch.meshgrid(ticks, ticks, indexing="xy")
    return torch.stack([across.reshape(-1), up.reshape(-1)], 1)


def save_with_legend(figure: Any, axis: Any, path: Path) -> None:
    """Write a figure with the legend of one of its axes above all."""
    figure.legend(*axis.get_legend_handles_labels(), frameon=False, ncols=4, fontsize=9, loc="outside upper center")
    save(figure, path)


def save_with_title(figure: Any, text: str, path: Path) -> None:
    """Write a figure with a line of text above all."""
    figure.suptitle(text, fontsize=10)
    save(figure, path)
