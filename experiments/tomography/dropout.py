"""Baselines for error bars of images: a deep image prior with dropout, and one variance for all pixels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from experiments.tomography.scores import noise_floor
from experiments.tomography.unet import UNet, dropout_masks
from lapwing.errors import DataError, UnsupportedError
from lapwing.runtime.settings import POSITIVE, TENSOR, describe, integer
from lapwing.runtime.threads import generator_or_default


@dataclass(frozen=True, eq=False)
class SampledImages:
    """A belief about an image by samples (K, H, W), at least two."""

    samples: Tensor

    def __post_init__(self) -> None:
        TENSOR.check("samples", self.samples)
        if self.samples.ndim != 3 or len(self.samples) < 2:
            raise DataError(f"samples is {describe(self.samples)}; expected at least two images (K, H, W).")

    @cached_property
    def mean(self) -> Tensor:
        """The mean of the samples, (H, W): the reconstruction."""
        return self.samples.mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """The unbiased variance of every pixel, (H, W)."""
        return self.samples.var(0)

    @cached_property
    def deviations(self) -> Tensor:
        """Samples minus their mean, (K, dx), scaled so that deviationsᵀ deviations / K is the unbiased covariance."""
        count = len(self.samples)
        return (self.samples - self.mean).flatten(1) * (count / (count - 1)) ** 0.5

    def covariance(self) -> Tensor:
        """Return the unbiased covariance (dx, dx), of rank K - 1 at most."""
        return self.deviations.mT @ self.deviations / len(self.samples)


@dataclass(frozen=True, eq=False)
class IsotropicImage:
    """A belief about an image with the same variance for all pixels, independent of each other."""

    mean: Tensor  # (H, W)
    variance: float


def dropout_samples(
    unet: UNet, z: Tensor, samples: int, generator: torch.Generator | None = None, chunk: int = 256
) -> SampledImages:
    """Draw images from a network that was trained with dropout, each with random dropout masks.

    Args:
        unet: The trained network, with a dropout above zero.
        z: Its input, (H, W).
        samples: The number of images K, at least 2.
        generator: For the masks; seed 0 if None.
        chunk: Images in one forward pass. It does not change the samples.

    Raises:
        UnsupportedError: The network has no dropout, or a number is out of range.
        DataError: The input is not an image, or is NaN.

    >>> from experiments.tomography.unet import seeded_unet
    >>> dropout_samples(seeded_unet(0, channels=2, dropout=0.5), torch.rand(4, 6), samples=3).mean.shape
    torch.Size([4, 6])
    """
    integer(2).check("samples", samples)
    integer().check("chunk", chunk)
    TENSOR.check("z", z)
    if z.ndim != 2:
        raise DataError(f"z is {describe(z)}; expected one image (H, W).")
    if not unet.dropout:
        raise UnsupportedError("the network has no dropout; expected one that was trained with UNet(dropout=0.05).")
    masks = dropout_masks(unet, samples, generator_or_default(generator), z)
    with torch.no_grad():
        images = [unet(z.expand(len(part), 1, *z.shape), part)[:, 0] for part in masks.split(chunk)]
    return SampledImages(torch.cat(images))


def isotropic_baselines(
    image: Tensor, matrix: Tensor, learned_std: float, rank: int = 100
) -> tuple[IsotropicImage, IsotropicImage]:
    """Return N(image, c · I) with the noise floor c of noise of standard deviation 1, and of the learned one.

    Args:
        image: The reconstruction (H, W).
        matrix: The map from images to measurements, (dy, dx).
        learned_std: The standard deviation of the noise that the evidence chose.
        rank: The number of singular values of the noise floor.

    Raises:
        DataError: The image does not fit the matrix.
        UnsupportedError: The standard deviation is not positive.

    >>> unit, learned = isotropic_baselines(torch.zeros(1, 2), torch.eye(2), learned_std=0.1)
    >>> unit.variance, round(learned.variance, 6)
    (1.0, 0.01)
    """
    TENSOR.check("image", image)
    POSITIVE.check("learned_std", learned_std)
    unit = noise_floor(matrix, 1.0, rank)
    if image.numel() != matrix.shape[1]:
        raise DataError(f"image is {describe(image)}, matrix is {describe(matrix)}; expected (H, W) and (dy, H · W).")
    return IsotropicImage(image, unit), IsotropicImage(image, learned_std**2 * unit)
