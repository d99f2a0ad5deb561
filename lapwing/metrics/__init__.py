"""Scores of predictions, as functions of plain tensors and NumPy arrays: ``lw.metrics``.

Class probabilities: ``categorical_nll``, ``accuracy``, ``brier``, ``ece``, ``adaptive_ece``, ``classwise_ece``,
``calibration``. Numbers: ``normal_nll``, ``rmse``, ``mae``, ``crps``, ``crps_samples``. Intervals and quantiles:
``coverage``, ``interval_width``, ``picp``, ``mpiw``, ``pit``, ``pit_samples``, ``cqm``. Detection of inputs from
outside the training distribution: ``auroc``, ``aupr``, ``fpr95``. Abstaining: ``risk_coverage``, ``aurc``. Labels of
several inputs together: ``joint_log_likelihood``, ``dyadic_log_likelihood``. The uncertainty of any score:
``bootstrap``. Nothing here knows a model or a posterior.

>>> import torch
>>> rmse(torch.zeros(2), torch.tensor([3.0, 3.0]))
3.0
"""

from lapwing.metrics.classification import Calibration as Calibration
from lapwing.metrics.classification import (
    accuracy,
    adaptive_ece,
    brier,
    calibration,
    categorical_nll,
    classwise_ece,
    ece,
)
from lapwing.metrics.detection import aupr, auroc, fpr95
from lapwing.metrics.intervals import coverage, cqm, interval_width, mpiw, picp, pit, pit_samples
from lapwing.metrics.joint import dyadic_log_likelihood, joint_log_likelihood
from lapwing.metrics.regression import crps, crps_samples, mae, normal_nll, rmse
from lapwing.metrics.resampling import ScoreInterval as ScoreInterval
from lapwing.metrics.resampling import bootstrap
from lapwing.metrics.selection import RiskCoverage as RiskCoverage
from lapwing.metrics.selection import aurc, risk_coverage

__all__ = [
    "categorical_nll", "accuracy", "brier", "ece", "adaptive_ece", "classwise_ece", "calibration", "normal_nll", "rmse",
    "mae", "crps", "crps_samples", "coverage", "interval_width", "picp", "mpiw", "pit", "pit_samples", "cqm", "auroc",
    "aupr", "fpr95", "risk_coverage", "aurc", "joint_log_likelihood", "dyadic_log_likelihood", "bootstrap",
]  # fmt: skip
