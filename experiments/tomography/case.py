"""Simulated scans: an image, its geometry, noisy measurements, and the start of a reconstruction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from experiments.tomography.backprojection import fbp
from experiments.tomography.geometry import ParallelBeam
from experiments.tomography.noise import measured
from experiments.tomography.rays import ray_transform
from lapwing.linalg.operators import SparseOperator

ANGLES, NOISES = (5, 10, 20, 30), (0.05, 0.10)
# Weights of the total variation that Barbano et al. validated on training images, by the share of noise and the angles.
WEIGHTS = {
    (0.05, 5): 1e-5, (0.05, 10): 3e-5, (0.05, 20): 1e-4, (0.05, 30): 1e-4,
    (0.10, 5): 3e-5, (0.10, 10): 1e-4, (0.10, 20): 3e-4, (0.10, 30): 3e-4,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """How an image is measured: the number of angles, and the noise as a share of the mean measurement."""

    angles: int = 10
    noise: float = 0.05

    @property
    def weight_of_tv(self) -> float:
        """The weight of the total variation for this setting, that of the nearest one which was validated."""
        near = min(WEIGHTS, key=lambda known: (abs(known[0] - self.noise), abs(known[1] - self.angles)))
        return WEIGHTS[near]

    def __str__(self) -> str:
        return f"{self.angles} angles, {self.noise:.0%} noise"


@dataclass(frozen=True, eq=False)
class Scan:
    """The measurements of one image, and what a reconstruction starts from.

    Args:
        truth: The image, (H, W) in float64.
        geometry: The rays.
        operator: The ray transform of flat images, in float64.
        y: Measurements (dy,) with noise.
        noise_std: The standard deviation of the noise that was added.
    """

    truth: Tensor
    geometry: ParallelBeam
    operator: SparseOperator
    y: Tensor
    noise_std: float

    @classmethod
    def of(cls, truth: Tensor, geometry: ParallelBeam, noise: float, seed: int) -> Scan:
        """Measure an image with noise of this share of the mean measurement."""
        operator = ray_transform(geometry, torch.float64)
        generator = torch.Generator().manual_seed(seed)
        y, std = measured(operator, truth, noise, generator)
        return cls(truth, geometry, operator, y, float(std))

    @cached_property
    def backprojection(self) -> Tensor:
        """The filtered back-projection of the measurements, (H, W): the input of the network."""
        return fbp(self.geometry, self.y)


def scans(truths: Tensor, setting: Setting, seed: int = 0) -> list[Scan]:
    """Return the scans of images (N, H, W) in one setting; each has noise of its own."""
    geometry = ParallelBeam(truths.shape[-1], setting.angles)
    return [Scan.of(truth, geometry, setting.noise, seed + 1 + i) for i, truth in enumerate(truths)]
