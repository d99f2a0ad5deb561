"""Tuners (``lw.tuners``): each turns a posterior into one with better hyperparameters.

There is one class for each tuner, used as ``fit(..., tuner=lw.tuners.FixedPoint())`` or ``posterior.tuned(...)``.
``evidence_bound`` is the lower bound that ``MaximiseBound`` maximises. The evidence itself is a method of posteriors.
"""

from lapwing.runtime.settings import refuse_other_settings
from lapwing.tuners.base import Ascend, FixedPoint, MaximiseBound, MaximiseEvidence, TunerWithSettings, evidence_bound
from lapwing.tuners.grid import CrossValidated, Grid, Temperature
from lapwing.tuners.linear_mode import LinearMode, SampleEM
from lapwing.tuners.mixing import Budget, Integrate

__all__ = [
    "Ascend", "Budget", "CrossValidated", "FixedPoint", "Grid", "Integrate", "LinearMode", "MaximiseBound",
    "MaximiseEvidence", "SampleEM", "Temperature", "evidence_bound",
]  # fmt: skip

refuse_other_settings(TunerWithSettings.__subclasses__())
