"""The pictures of the case study: one reconstruction with its error bars, samples of priors, and chosen angles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.tomography.beliefs import DROPOUT, EVIDENCE, TV
from lapwing.demo.result import Result, save
from lapwing.plots import INK, OTHER, PLAIN, POSTERIOR, new_figure

COLOURS = {DROPOUT: OTHER, EVIDENCE: PLAIN, TV: POSTERIOR}


def image_of(result: Result, name: str) -> Tensor:
    """Return an image that a result holds."""
    size = int(result.settings["size"])
    return torch.tensor(result.arrays[name], dtype=torch.float64).reshape(-1, size, size).squeeze(0)


def reconstruction(result: Result, path: Path) -> None:
    """Draw truth, back-projection, reconstruction and error; standard deviations, their histogram, and a Q-Q plot."""
    figure, axes = new_figure(2, 4, (12.4, 6.2))
    truth, image = image_of(result, "truth"), image_of(result, "reconstruction")
    error = (truth - image).abs()
    stds = {name: image_of(result, f"std/{name}") for name in (EVIDENCE, TV)}
    most = float(max(error.max(), *(std.max() for std in stds.values())))
    shown = (("truth", truth), ("filtered back-projection", image_of(result, "fbp")), ("reconstruction", image))
    for axis, (title, picture) in zip(axes[0], shown, strict=False):
        _show(axis, picture, title, "gray", 0.0, 1.0)
    errors = [(axes[0][3], error, "absolute error")]
    errors += [(axis, std, f"std: {name}") for axis, (name, std) in zip(axes[1], stds.items(), strict=False)]
    for axis, picture, title in errors:
        drawn = _show(axis, picture, title, "magma", 0.0, most)
        figure.colorbar(drawn, ax=axis, shrink=0.75)
    _histogram(axes[1][2], error, stds)
    _quantiles(axes[1][3], result)
    save(figure, path)


def _show(axis: Any, picture: Tensor, title: str, colours: str, low: float, high: float) -> Any:
    drawn = axis.imshow(picture.numpy(), cmap=colours, vmin=low, vmax=high, interpolation="nearest")
    axis.set_title(title, fontsize=10)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    return drawn


def _histogram(axis: Any, error: Tensor, stds: dict[str, Tensor]) -> None:
    bins = torch.linspace(0, float(max(error.max(), *(std.max() for std in stds.values()))), 31).tolist()
    axis.hist(error.flatten().tolist(), bins, color=INK, alpha=0.35, label="absolute error")
    for name, std in stds.items():
        axis.hist(std.flatten().tolist(), bins, histtype="step", color=COLOURS[name], linewidth=1.5, label=name)
    axis.set_yscale("log")
    axis.set(xlabel="size", ylabel="pixels")
    axis.set_title("errors and standard deviations", fontsize=10)
    axis.legend(frameon=False, fontsize=8)


def _quantiles(axis: Any, result: Result) -> None:
    normal = result.arrays["quantiles"]
    axis.plot(normal, normal, color=INK, linestyle="--", linewidth=1)
    for name in (DROPOUT, EVIDENCE, TV):
        axis.plot(normal, result.arrays[f"quantiles/{name}"], color=COLOURS[name], label=name)
    axis.set(xlabel="quantiles of N(0, 1)", ylabel="error / std", ylim=(-4, 4))
    axis.set_title("Q-Q plot", fontsize=10)
    axis.legend(frameon=False, fontsize=8)


def prior_samples(result: Result, path: Path) -> None:
    """Draw samples of each prior over images, a row for each, in a range of grey values of its own."""
    names = [name.removeprefix("samples/") for name in result.arrays]
    drawn = {name: image_of(result, f"samples/{name}") for name in names}
    count = len(next(iter(drawn.values())))
    figure, axes = new_figure(len(names), count, (1.9 * count, 2.1 * len(names)))
    for row, (name, images) in zip(axes, drawn.items(), strict=True):
        centre, half = image_of(result, f"samples/{name}").mean(), 2.5 * float(images.std())
        for axis, image in zip(row, images, strict=True):
            _show(axis, image, "", "gray", float(centre) - half, float(centre) + half)
        row[0].set_title(name, fontsize=10, loc="left")
    save(figure, path)


def design(result: Result, path: Path) -> None:
    """Draw PSNR against the number of angles for every way to choose them, with standard errors over images."""
    figure, axes = new_figure(1, 2, (9.2, 3.8), widths=(2, 1))
    colours = dict(zip(result.settings["strategies"], (POSTERIOR, PLAIN, INK, OTHER), strict=True))
    angles = result.arrays["angles"]
    for name, colour in colours.items():
        mean, error = result.arrays[f"psnr/{name}"], result.arrays[f"error/{name}"]
        axes[0][0].errorbar(angles, mean, error, color=colour, marker="o", markersize=3, capsize=2, label=name)
    axes[0][0].set(xlabel="number of angles", ylabel="PSNR in dB")
    axes[0][0].legend(frameon=False, fontsize=8)
    for height, (name, colour) in enumerate(colours.items()):
        chosen = result.arrays[f"chosen/{name}"]
        axes[0][1].plot(chosen, [height] * len(chosen), "|", color=colour, markersize=14)
    axes[0][1].set(xlabel="angle in degrees", yticks=range(len(colours)), yticklabels=list(colours), xlim=(-3, 180))
    axes[0][1].set_title("angles of the first image", fontsize=10)
    save(figure, path)
