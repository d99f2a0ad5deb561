"""One input with a gap in the data: the error bars must be wide where there are no data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.demo.figures import INK, PLAIN
from lapwing.demo.regression import SplitTable, predict
from lapwing.demo.result import Result, Row, plain
from lapwing.demo.training import TrainingSettings, batches, trained
from lapwing.plots import fit_frame, shade


@dataclass(frozen=True)
class Bands:
    """Settings: noisy points on a curve, with none between -1 and 1."""

    recipe: TrainingSettings = TrainingSettings(epochs=500)
    data: int = 200
    noise_std: float = 0.3
    seed: int = 0


def run(settings: Bands) -> Result:
    """Fit the curve and predict across the gap and beyond both ends.

    >>> result = run(Bands(TrainingSettings(hidden=(5,), epochs=3), data=20))
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
    table = SplitTable(x.unsqueeze(1), y, grid.unsqueeze(1), curve(grid))
    model = trained(*table.training, 1, settings.recipe, settings.seed)
    data = batches(*table.training, settings.recipe.batch_size)
    predicted = predict(lw.fit(model, data, "regression", method=lw.Full(), progress=False), table)
    alone = predict(lw.fit(model, data, "regression", method=lw.baselines.MapOnly(), progress=False), table)
    epistemic = predicted["epistemic_std"]
    scores = {
        "epistemic std at data": float(epistemic[(grid.abs() - 2).abs() < 0.5].mean()),
        "epistemic std in gap": float(epistemic[grid.abs() < 0.5].mean()),
        "noise std": float((predicted["std"].square() - epistemic.square()).mean().sqrt()),
    }
    columns = {"x": x, "y": y, "grid": grid, "truth": curve(grid)}
    columns |= {name: predicted[name] for name in ("mean", "std", "epistemic_std", "low", "high")}
    columns |= {f"plain {name}": alone[name] for name in ("low", "high")}
    arrays = {name: column.tolist() for name, column in columns.items()}
    seconds = {"total": time.perf_counter() - start}
    return Result("bands", plain(settings), settings.seed, (Row("posterior", scores),), seconds, arrays)


def curve(x: Tensor) -> Tensor:
    """Return the true function, without noise."""
    return torch.sin(2 * x) + 0.3 * x


def draw_bands(axis: Any, result: Result) -> None:
    """Draw the data, the true curve, and the 95 % intervals with error bars and of the plain network."""
    arrays = result.arrays
    grid = arrays["grid"]
    shade(axis, grid, arrays["low"], arrays["high"], label="Lapwing")
    for end, label in (("low", None), ("high", "plain network")):
        axis.plot(grid, arrays[f"plain {end}"], color=PLAIN, linewidth=1.6, label=label)
    axis.plot(grid, arrays["truth"], color=INK, linestyle=":", linewidth=1.6, label="truth")
    axis.set(xlabel="x", ylabel="y", xlim=(min(grid), max(grid)))
    fit_frame(axis, torch.tensor(arrays["low"] + arrays["high"]), torch.tensor(arrays["x"]), torch.tensor(arrays["y"]))
    axis.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.13), columnspacing=1.2)
    axis.set_title("95 % intervals for y:\nLapwing's widen where there are no data", fontsize=11)
