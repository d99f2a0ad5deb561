"""HFL against exact Laplace on real tables: standard splits, and splits with a gap."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.data import data_folder
from experiments.minimum import exact_variance, minimised, rank_correlation, squared_error
from experiments.pinned import EVIDENCE
from experiments.repeats import mean_scores
from experiments.response_task import KINDS, ResponseTask, interval_scores
from lapwing.demo.result import Row
from lapwing.demo.training import SplitTable, TrainingSettings, mlp, optimise
from lapwing.errors import LapwingError
from lapwing.methods.hfl import ResponsePosterior

METHODS: dict[str, Any] = {
    "noise only": lw.baselines.MapOnly(),
    "GGN": lw.Full(),
    "Kron": lw.Kron(),
    "HFL, each point": lw.HFL(drift=math.inf),
}


def table_rows(name: str, settings: ResponseTask, notes: list[str]) -> list[Row]:
    """Return the scores of every method on both kinds of splits; a split that fails leaves a note instead."""
    rows = []
    for kind in KINDS:
        scores_of: dict[str, list[dict[str, float]]] = {}
        for split in range(settings.splits):
            try:
                scores = table_scores(name, kind, split, settings)
            except LapwingError as error:
                notes.append(f"{name}, {kind} split {split}: {error}")
                continue
            for method, of_split in scores.items():
                scores_of.setdefault(method, []).append(of_split)
        rows += [Row(method, mean_scores(scores), f"{name}, {kind}") for method, scores in scores_of.items()]
    return rows


def table_scores(name: str, kind: str, split: int, settings: ResponseTask) -> dict[str, dict[str, float]]:
    """Return the scores of every method on one split of a table."""
    path = data_folder(settings.data_dir) / f"uci_{name}.npz"
    return _scores(_read(path, KINDS[kind], split), settings, split)


def _read(path: Path, prefix: str, split: int) -> SplitTable:
    """Read the training rows of a split and its first hundred test rows."""
    with np.load(path, allow_pickle=False) as file:
        x, y = (torch.from_numpy(file[key].astype(np.float64)) for key in ("X", "y"))
        train, test = (torch.from_numpy(file[f"{prefix}{part}_{split}"].astype(np.int64)) for part in ("train", "test"))
    return SplitTable(x[train], y[train].reshape(-1), x[test][:100], y[test].reshape(-1)[:100])


def _scores(table: SplitTable, settings: ResponseTask, seed: int) -> dict[str, dict[str, float]]:
    """Return interval scores of every method, and how its variances compare with those of the exact Hessian.

    "error" is the median relative error of the variances; for HFL the largest.
    """
    inputs, targets = table.training
    model, precision, noise = _fitted_network(inputs, targets, settings, seed)
    likelihood = lw.Gaussian(noise_std=noise**0.5)
    new, scale = table.scale_x(table.x_test), table.scale_y
    variances, scores = {}, {}
    for name, method in METHODS.items():
        posterior = lw.fit(model, [(inputs, targets)], likelihood, method=method, prior=precision, progress=False)
        outputs = posterior.functions(new)
        variances[name] = outputs.variance[:, 0]
        std = (outputs.variance[:, 0] + noise).sqrt() * scale.std
        scores[name] = interval_scores(outputs.mean[:, 0] * scale.std + scale.mean, std, table.y_test)
    assert isinstance(posterior.posterior, ResponsePosterior)  # of HFL, the last method
    exact = exact_variance(posterior.posterior, new)
    for name, variance in variances.items():
        errors = (variance / exact - 1).abs()
        scores[name]["rank correlation"] = rank_correlation(variance, exact)
        scores[name]["error"] = float(errors.max() if name == "HFL, each point" else errors.median())
    return scores


def _fitted_network(x: Tensor, y: Tensor, settings: ResponseTask, seed: int) -> tuple[nn.Module, float, float]:
    """Train a network, choose precision and noise by the evidence, and return it at the minimum under them."""
    start = mlp(x.shape[1], 1, TrainingSettings((settings.hidden,)), seed).double()
    optimise(start, x, y, TrainingSettings((settings.hidden,), epochs=60, batch_size=64), seed)
    posterior = lw.fit(start, [(x, y)], "regression", method=lw.Full(), tuner=EVIDENCE, progress=False)
    precision, noise = float(posterior.prior.values), float(posterior.likelihood.dispersion)
    return minimised(start, x, squared_error(y, noise), precision), precision, noise
