"""One input with a gap in the data: where the network knows, and where it does not."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

import lapwing as lw
from experiments.regression import Table, predicted
from experiments.result import Result, Row, plain
from experiments.training import Recipe, batches, trained


@dataclass(frozen=True)
class Bands:
    """Noisy points on a wave, with none between -1 and 1."""

    recipe: Recipe = Recipe(epochs=500)
    data: int = 200
    noise_std: float = 0.3
    seed: int = 0


def run(settings: Bands) -> Result:
    """Fit the wave and predict across the gap and beyond both ends."""
    begun = time.perf_counter()
    generator = torch.Generator().manual_seed(settings.seed)
    side = torch.rand(settings.data, generator=generator, dtype=torch.float64) * 2 + 1
    x = torch.where(torch.arange(settings.data) % 2 == 0, side, -side)
    noise = torch.randn(settings.data, generator=generator, dtype=torch.float64)
    y = wave(x) + settings.noise_std * noise
    grid = torch.linspace(-4, 4, 401, dtype=torch.float64)
    table = Table(x.unsqueeze(1), y, grid.unsqueeze(1), wave(grid))
    model = trained(*table.training, 1, settings.recipe, settings.seed)
    data = batches(*table.training, settings.recipe.batch_size)
    found = predicted(lw.fit(model, data, "regression", method=lw.Full(), progress=False), table)
    near, gap = (grid.abs() - 2).abs() < 0.5, grid.abs() < 0.5
    scores = {
        "epistemic std at data": float(found.epistemic_std[near].mean()),
        "epistemic std in gap": float(found.epistemic_std[gap].mean()),
        "noise std": float((found.std.square() - found.epistemic_std.square()).mean().sqrt()),
    }
    arrays = {
        "x": x, "y": y, "grid": grid, "truth": wave(grid),
        "mean": found.mean, "std": found.std, "epistemic_std": found.epistemic_std,
    }  # fmt: skip
    lists = {name: array.tolist() for name, array in arrays.items()}
    seconds = {"total": time.perf_counter() - begun}
    return Result("bands", plain(settings), settings.seed, (Row("posterior", scores),), seconds, lists)


def wave(x: Tensor) -> Tensor:
    return torch.sin(2 * x) + 0.3 * x
