"""Scores of predictions, as functions of plain tensors: ``lw.metrics``.

Class probabilities: ``categorical_nll``, ``accuracy``, ``brier``, ``ece``, ``calibration``. Normal predictions and
intervals: ``normal_nll``, ``rmse``, ``crps``, ``coverage``, ``interval_width``. Detection of inputs from outside the
training distribution: ``auroc``. Nothing here knows a model or a posterior.

>>> import torch
>>> rmse(torch.zeros(2), torch.tensor([3.0, 3.0]))
3.0
"""

from lapwing.metrics.classification import accuracy, brier, calibration, ece
from lapwing.metrics.classification import nll as categorical_nll
from lapwing.metrics.ood import auroc
from lapwing.metrics.regression import coverage, crps, interval_width, rmse
from lapwing.metrics.regression import nll as normal_nll

__all__ = [
    "categorical_nll", "accuracy", "brier", "ece", "calibration", "normal_nll", "rmse", "crps", "coverage",
    "interval_width", "auroc",
]  # fmt: skip
