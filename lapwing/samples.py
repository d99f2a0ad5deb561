"""Samples of a data set: the part of each process, their weights, and inputs whose samples are not rows of tensors."""

from lapwing.data.batches import Weighted, unpacked, weighted
from lapwing.data.inputs import OneSample, SampleSet
from lapwing.data.processes import Part

__all__ = ["OneSample", "Part", "SampleSet", "Weighted", "unpacked", "weighted"]
