"""Outputs with a value of every channel at every pixel, (B, C, H, W) or (B, C, D, H, W), as the library sees them.

Inside the library the pixels of an image are the tokens of a token-level output: (B, H W, C), in the order of the rows
of the image. Outputs and targets are brought into this form where they enter, results back into that of images where
users get them; nothing in between knows images.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lapwing.core.gaussian import Deferred, FunctionGaussian
from lapwing.errors import DataError

DIMS = (2, 3)  # of an image: (H, W), or (D, H, W)


def pixels(images: Tensor) -> Tensor:
    """Return images (B, C, H, W) as their pixels (B, H W, C). A view where the memory allows it."""
    return images.movedim(1, -1).flatten(1, -2)


def pixel_belief(images: FunctionGaussian) -> FunctionGaussian:
    """Return a belief about images (B, C, H, W) as one about each of their pixels (B, H W, C); never joint."""
    each = images.marginal
    deferred = Deferred(
        lambda: pixels(each.variance), lambda: each.cov.flatten(1, -3), lambda: pixels(each.centred_variance)
    )
    return FunctionGaussian(pixels(each.mean), deferred)


@dataclass(frozen=True)
class ImageForm:
    """The height and width of images, and their depth if they have one.

    Args:
        sizes: (H, W), or (D, H, W).

    >>> import torch
    >>> form = ImageForm((2, 3))
    >>> form.outputs(pixels(torch.zeros(5, 4, 2, 3))).shape
    torch.Size([5, 4, 2, 3])
    """

    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return " x ".join(map(str, self.sizes))

    @property
    def count(self) -> int:
        """The number of pixels of an image."""
        total = 1
        for size in self.sizes:
            total *= size
        return total

    def labels(self, flat: Tensor) -> Tensor:
        """Return numbers of each pixel (..., H W) as images (..., H, W)."""
        if flat.shape[-1] != self.count:
            raise DataError(
                f"{flat.shape[-1]} pixels for images of {self}; expected {self.count}. The model gives outputs of "
                "several sizes for inputs of one shape: give it inputs of one size at a time."
            )
        return flat.unflatten(-1, self.sizes)

    def outputs(self, flat: Tensor) -> Tensor:
        """Return outputs of each pixel (..., H W, C) as images (..., C, H, W)."""
        return self.labels(flat.transpose(-1, -2))

    def blocks(self, cov: Tensor) -> Tensor:
        """Return covariances of each pixel (B, H W, C, C) as (B, H, W, C, C)."""
        return self.labels(cov.movedim(1, -1)).movedim((1, 2), (-2, -1))

    def targets(self, y: Tensor) -> Tensor:
        """Return targets (B, H, W) or (B, C, H, W) in the form of pixels, (B, H W) or (B, H W, C).

        Raises:
            DataError: If they have another number of dimensions, or another height or width.
        """
        dims = len(self.sizes)
        if y.ndim not in (dims + 1, dims + 2) or tuple(y.shape[-dims:]) != self.sizes:
            listed = ", ".join(map(str, self.sizes))
            raise DataError(
                f"targets have the shape {tuple(y.shape)} and the outputs are images of {self}; expected (B, {listed}) "
                f"for class numbers or a single channel, or (B, C, {listed}). If they are no images, let the model "
                "return (B, C)."
            )
        return y.flatten(1) if y.ndim == dims + 1 else pixels(y)

    def belief(self, flat: FunctionGaussian) -> FunctionGaussian:
        """Return a belief about pixels (B, H W, C) as one about images (B, C, H, W); joint if it was."""
        mean = self.outputs(flat.mean)
        if flat.joint:
            order = flat.cov.permute(0, 2, 1, 3, 5, 4)
            return FunctionGaussian(mean, order.reshape(*mean.shape, *mean.shape), joint=True, outputs_dim=1)
        deferred = Deferred(
            lambda: self.outputs(flat.variance),
            lambda: self.blocks(flat.cov),
            lambda: self.outputs(flat.centred_variance),
        )
        return FunctionGaussian(mean, deferred, outputs_dim=1)
