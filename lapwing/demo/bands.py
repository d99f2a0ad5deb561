"""One input with a gap in the data: the error bars must be wide where there are no data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import lapwing as lw
from lapwing.demo.figures import EPISTEMIC, INK, NORMAL_95, PLAIN, TOTAL, new_figure, save
from lapwing.demo.regression import Table, predict
from lapwing.demo.result import Result, Row, plain
from lapwing.demo.training import Recipe, batches, trained


@dataclass(frozen=True)
class Bands:
    """Settings: noisy points on a curve, with none between -1 and 1."""

    recipe: Recipe = Recipe(epochs=500)
    data: int = 200
    noise_std: float = 0.3
    seed: int = 0


def run(settings: Bands) -> Result:
    """Fit the curve and predict across the gap and beyond both ends.

    >>> result = run(Bands(Recipe(hidden=(5,), epochs=3), data=20))
    >>> list(result.rows[0].scores)
    ['epistemic std at data', 'epistemic std in gap', 'noise std']
    """
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(settings.seed)
    side = torch.rand(settings.data, generator=generator, dtype=torch.float64) * 2 + 1
    x = torch.where(torch.arange(settings.data) % 2 == 0, side, -side)
    noise = torch.randn(settings.data, generator=generator, dtype=torch.float64)
    y = curve(x) + settings.noise_std * noise
    grid = torch.linspace(-4, 4, 401, dtype=torch.float64)
    table = Table(x.unsqueeze(1), y, grid.unsqueeze(1), curve(grid))
    model = trained(*table.training, 1, settings.recipe, settings.seed)
    data = batches(*table.training, settings.recipe.batch_size)
    predicted = predict(lw.fit(model, data, "regression", method=lw.Full(), progress=False), table)
    epistemic = predicted["epistemic_std"]
    scores = {
        "epistemic std at data": float(epistemic[(grid.abs() - 2).abs() < 0.5].mean()),
        "epistemic std in gap": float(epistemic[grid.abs() < 0.5].mean()),
        "noise std": float((predicted["std"].square() - epistemic.square()).mean().sqrt()),
    }
    columns = {"x": x, "y": y, "grid": grid, "truth": curve(grid)}
    columns |= {name: predicted[name] for name in ("mean", "std", "epistemic_std")}
    arrays = {name: column.tolist() for name, column in columns.items()}
    seconds = {"total": time.perf_counter() - start}
    return Result("bands", plain(settings), settings.seed, (Row("posterior", scores),), seconds, arrays)


def curve(x: Tensor) -> Tensor:
    """Return the true function, without noise."""
    return torch.sin(2 * x) + 0.3 * x


def picture(result: Result, path: Path) -> None:
    """Draw the mean, its epistemic band, and the band that new data fall into, with the noise."""
    arrays = result.arrays
    grid, mean = torch.tensor(arrays["grid"]), torch.tensor(arrays["mean"])
    figure, axes = new_figure(1, 1, (8.0, 4.6))
    axis = axes[0][0]
    bands = (("std", TOTAL, "95 % of new data: epistemic and noise"), ("epistemic_std", EPISTEMIC, "95 % epistemic"))
    for key, colour, label in bands:
        width = NORMAL_95 * torch.tensor(arrays[key])
        low, high = (mean - width).tolist(), (mean + width).tolist()
        axis.fill_between(grid.tolist(), low, high, color=colour, linewidth=0, label=label)
    axis.plot(grid.tolist(), mean.tolist(), color=INK, linewidth=1.6, label="mean")
    axis.plot(grid.tolist(), arrays["truth"], color=INK, linestyle=":", linewidth=1.2, label="truth")
    axis.scatter(arrays["x"], arrays["y"], s=9, color=PLAIN, zorder=3, label="data")
    reach = max(abs(v) for v in arrays["y"])
    axis.set(xlabel="x", ylabel="y", xlim=(float(grid.min()), float(grid.max())), ylim=(-2.5 * reach, 2.5 * reach))
    figure.legend(*axis.get_legend_handles_labels(), frameon=False, ncols=5, fontsize=9, loc="outside lower center")
    save(figure, path)
