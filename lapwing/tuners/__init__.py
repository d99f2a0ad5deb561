"""Tuners: each takes a posterior and returns it under better hyperparameters. One class each."""

from lapwing.tuners.ascend import Ascend
from lapwing.tuners.fixed_point import FixedPoint
from lapwing.tuners.held_out import CrossValidated, Grid, Temperature
from lapwing.tuners.linear_mode import LinearMode
from lapwing.tuners.maximise_bound import MaximiseBound, evidence_bound
from lapwing.tuners.maximise_evidence import MaximiseEvidence
from lapwing.tuners.sample_em import SampleEM

__all__ = [
    "Ascend", "CrossValidated", "FixedPoint", "Grid", "LinearMode", "MaximiseBound", "MaximiseEvidence", "SampleEM",
    "Temperature", "evidence_bound",
]  # fmt: skip
