"""The picture of the response experiment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lapwing.demo.result import Result, save
from lapwing.plots import INK, OTHER, PLAIN, POSTERIOR, new_figure

EPISTEMIC = "#7fb8dc"  # the colour of the uncertainty of a function
METHODS = (
    "full Hessian", "HFL, each point", "HFL, mean push", "HFL, absolute push, calibrated", "GGN", "ensemble of 5",
)  # fmt: skip


def picture(result: Result, path: Path) -> None:
    """Draw the bands of some methods; below, the error against the strength of the push and the length of tuning."""
    arrays = result.arrays
    figure, axes = new_figure(3, 3, (11.4, 9.4))
    names = [name for name in METHODS if f"mean/{name}" in arrays]
    for axis, name in zip((*axes[0], *axes[1]), names, strict=False):
        _band(axis, arrays, name)
    axes[0][0].legend(frameon=False, fontsize=8)
    strength, steps, blank = axes[2]
    _strengths(strength, arrays)
    _steps(steps, arrays)
    blank.axis("off")
    save(figure, path)


def _band(axis: Any, arrays: Mapping[str, list[float]], name: str) -> None:
    mean, std = (torch.tensor(arrays[f"{kind}/{name}"]) for kind in ("mean", "std"))
    axis.fill_between(arrays["grid"], mean - 2 * std, mean + 2 * std, color=EPISTEMIC, label="2 sd of f")
    axis.plot(arrays["grid"], mean, color=POSTERIOR, label="network")
    axis.plot(arrays["grid"], arrays["truth"], color=INK, linestyle="--", linewidth=1, label="truth")
    axis.plot(arrays["x"], arrays["y"], ".", color=PLAIN, markersize=4, label="data")
    axis.set_title(name, fontsize=10)
    axis.set_ylim(min(arrays["y"]) - 2, max(arrays["y"]) + 2)


def _strengths(axis: Any, arrays: Mapping[str, list[float]]) -> None:
    for label, colour in (("float64", POSTERIOR), ("float32", PLAIN)):
        axis.loglog(arrays["strengths"], arrays[f"median/{label}"], "o-", color=colour, markersize=3, label=label)
        axis.loglog(arrays["strengths"], arrays[f"worst/{label}"], ":", color=colour, label=f"{label}, worst point")
    axis.set(xlabel="strength λ times the deviation", ylabel="relative error")
    axis.set_title("error against the push", fontsize=10)
    axis.set_ylim(1e-14, 1e2)
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _steps(axis: Any, arrays: Mapping[str, list[float]]) -> None:
    for place, colour in (("data", POSTERIOR), ("gap", PLAIN), ("outside", OTHER)):
        axis.semilogx(arrays["steps"], arrays[f"recovered/{place}"], "o-", color=colour, label=place)
    axis.axhline(1, color=INK, linestyle="--", linewidth=1)
    axis.set(xlabel="steps of Adam", ylabel="share of the variance")
    axis.set_title("unfinished fine-tuning", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
