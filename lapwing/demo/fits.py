"""The ways to predict from one trained network that the demo compares."""

from __future__ import annotations

import warnings
from functools import partial

from torch import Tensor, nn

import lapwing as lw
from lapwing.demo.training import Batches

PLAIN, DEFAULT, VALIDATED, NAIVE = "plain network", "Lapwing", "Lapwing with validation", "naive evidence"


def fits(model: nn.Module, data: Batches, held_out: tuple[Tensor, Tensor]) -> dict[str, lw.Fitted]:
    """Return the fitted posteriors by name: the network alone, rescaled, and with error bars.

    The second and the fourth use the held-out data. The last one shows why the evidence alone is not the default.
    """
    real = held_out[1].is_floating_point()
    fit = partial(lw.fit, model, data, "regression" if real else "classification", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lw.errors.CalibrationWarning)  # the table shows what it says
        naive = fit(tuner=lw.tuners.MaximiseEvidence())
    return {
        PLAIN: fit(method=lw.baselines.MapOnly()),
        "refitted noise" if real else "temperature scaling": fit(method=lw.baselines.MapOnly(), validation=held_out),
        DEFAULT: fit(),
        VALIDATED: fit(validation=held_out),
        NAIVE: naive,
    }
