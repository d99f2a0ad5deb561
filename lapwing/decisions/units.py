"""Targets in other units than those that the network predicts: residuals far beyond those of the training data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.core.callers import warn_caller

FAR = 100.0  # times the residual variance of the training data
APART = 10.0  # times what the outputs vary: a network that interpolates has small residuals on its training data alone
LEAST = 20  # data of an output below which its variance says little


def training_residuals(posterior: Any) -> Tensor | None:
    """Return the mean squared residual of each output on the training data, (C,); None without Gaussian noise.

    It follows from the loss that every posterior keeps, also in its file, and not from the noise, which may be given.
    """
    likelihood, base = posterior.likelihood, posterior.base
    statistics = getattr(base, "statistics", None)
    if likelihood.noise_variance is None or statistics is None:
        return None
    if statistics.losses:
        return 2 * torch.tensor(statistics.losses, dtype=torch.float64) / statistics.data
    mean = 2 * statistics.loss / (statistics.data * statistics.outputs)
    ratios = likelihood.noise_variance.detach().double().cpu() / likelihood.dispersion.detach().double().cpu()
    return (mean * ratios).expand(statistics.outputs)


def units_finding(posterior: Any, mean: Tensor, error: Tensor, name: str) -> str:
    """Return a sentence if targets seem to be in other units than the outputs of the network; nothing otherwise.

    Residuals are far larger than those of the training data, and than all that the outputs vary; or targets are far
    smaller than outputs, as standardised ones are for a network that predicts the original numbers.

    Args:
        posterior: A fitted posterior with Gaussian noise; others are not judged.
        mean: Predictions of all data, (N, C).
        error: Targets less predictions, (N, C).
        name: The name of the data.
    """
    trained = training_residuals(posterior)
    if trained is None or len(mean) < LEAST:
        return ""
    mean, error = mean.double(), error.double()
    residual, spread = error.square().mean(0), mean.var(0)
    beyond = residual > FAR * trained
    other = (residual > APART * (spread + trained)) | (mean.square().mean(0) > FAR * (mean + error).square().mean(0))
    chosen = (beyond & other).nonzero().flatten().tolist()
    if not chosen:
        return ""
    one = max(chosen, key=lambda i: float(residual[i] / trained[i].clamp_min(1e-300)))
    where = f" of output {one}" if len(trained) > 1 else ""
    return (
        f"{name}: the mean squared residual{where} is {float(residual[one]):.3g}, and {float(trained[one]):.3g} on the "
        f"training data; targets have the standard deviation {float((mean + error)[:, one].std()):.3g} and predictions "
        f"{float(spread[one].sqrt()):.3g}. Are the targets in other units than those that the network was trained on, "
        "or the inputs far from its data? Give targets in the same units, for instance standardised in the same way."
    )


def warn_of_units(posterior: Any, mean: Tensor, error: Tensor, name: str) -> tuple[str, ...]:
    """Warn if targets seem to be in other units, and return the sentence, if there is one; see ``units_finding``."""
    finding = units_finding(posterior, mean, error, name)
    if finding:
        warn_caller(finding)
    return (finding,) if finding else ()
