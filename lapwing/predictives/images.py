"""Predictives of images: those of their pixels, (B, H W, C), in the form that users have, (B, C, H, W).

A pixel is a datum: its channels are joint, and different pixels are independent given the belief about each. Members
that have a number for each datum, such as entropies, are (B, H, W).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.images import ImageForm, pixel_belief
from lapwing.errors import DataError
from lapwing.predictives.protocol import (
    ClassPredictive,
    LabelPredictive,
    MultilabelPredictive,
    NumberPredictive,
    Predictive,
    given_tensor,
)


class ImagePredictive(Predictive, Protocol):
    """A predictive of images, by the predictive of their pixels."""

    pixels: Any  # the predictive of (B, H W, C)
    form: ImageForm

    @property
    def distribution(self) -> Any:
        """The distribution of each pixel, with the batch shape (B, H W), as a ``torch.distributions`` object."""
        return self.pixels.distribution

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability or log-density of the targets of each pixel, (B, H, W).

        Args:
            y: Class numbers (B, H, W); other targets (B, C, H, W), or (B, H, W) of one channel.

        Raises:
            DataError: ``y`` has another shape, or is not what the predictive is about.
        """
        return self.form.labels(self.pixels.log_prob(self.flat(y)))

    def flat(self, y: Any) -> Any:
        """Return targets of images as those of pixels; a single number as it is."""
        y = given_tensor(y)
        return self.form.targets(y) if isinstance(y, Tensor) and y.ndim else y


class ImageLabelPredictive(ImagePredictive, LabelPredictive, Protocol):
    """A predictive of a label for each pixel, or for each channel of each pixel."""

    @property
    def probs(self) -> Tensor:
        """Probabilities of the classes, or of label one, (B, C, H, W)."""
        return self.form.outputs(self.pixels.probs)

    @property
    def integrated_probs(self) -> Tensor:
        return self.form.outputs(self.pixels.integrated_probs)

    @property
    def entropy(self) -> Tensor:
        return self.form.labels(self.pixels.entropy)

    @property
    def aleatoric(self) -> Tensor:
        return self.form.labels(self.pixels.aleatoric)

    @property
    def mutual_information(self) -> Tensor:
        return self.form.labels(self.pixels.mutual_information)


@dataclass(frozen=True, eq=False, repr=False)
class ImageClasses(ImageLabelPredictive, ClassPredictive):
    """The predictive of the class of each pixel.

    Args:
        pixels: The predictive of pixels (B, H W, C).
        form: The height and width.
    """

    pixels: Any
    form: ImageForm

    @property
    def log_probs(self) -> Tensor:
        return self.form.outputs(self.pixels.log_probs)

    @property
    def standard_error(self) -> Tensor:
        return self.form.outputs(self.pixels.standard_error)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the class of each pixel, (n, B, H, W)."""
        return self.form.labels(self.pixels.sample(n, generator))


@dataclass(frozen=True, eq=False, repr=False)
class ImageLabels(ImageLabelPredictive, MultilabelPredictive):
    """The predictive of a binary label for each channel of each pixel."""

    pixels: Any
    form: ImageForm

    def known_log_prob(self, y: Tensor, known: Tensor) -> Tensor:
        """Return the log-probability of the labels (B, C, H, W) that count, (B, H, W)."""
        return self.form.labels(self.pixels.known_log_prob(self.flat(y), self.flat(known)))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the labels, (n, B, C, H, W)."""
        return self.form.outputs(self.pixels.sample(n, generator))


@dataclass(frozen=True, eq=False, repr=False)
class ImageNumbers(ImagePredictive, NumberPredictive):
    """The predictive of a number for each channel of each pixel."""

    pixels: Any
    form: ImageForm

    @property
    def mean(self) -> Tensor:
        return self.form.outputs(self.pixels.mean)

    @property
    def epistemic_variance(self) -> Tensor:
        return self.form.outputs(self.pixels.epistemic_variance)

    @property
    def aleatoric_variance(self) -> Tensor:
        return self.form.outputs(self.pixels.aleatoric_variance)

    @property
    def variance(self) -> Tensor:
        return self.form.outputs(self.pixels.variance)

    @property
    def entropy(self) -> Tensor:
        return self.form.labels(self.pixels.entropy)

    @property
    def known_entropy(self) -> Tensor:
        return self.form.labels(self.pixels.known_entropy)

    @property
    def mutual_information(self) -> Tensor:
        return self.form.labels(self.pixels.mutual_information)

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return the probability of at most y, for each channel of each pixel by itself, (B, C, H, W)."""
        return self.form.outputs(self.pixels.cdf(self.flat(y)))

    def quantile(self, level: float) -> Tensor:
        return self.form.outputs(self.pixels.quantile(level))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the images, (n, B, C, H, W)."""
        return self.form.outputs(self.pixels.sample(n, generator))


class Images:
    """The form of the images of consecutive batches, and results in it; results stay as they are without images."""

    def __init__(self) -> None:
        self.form: ImageForm | None = None

    def add(self, form: ImageForm | None) -> None:
        """Note the form of one more batch; raise if it is not that of the batches before."""
        if form is not None and self.form not in (None, form):
            raise DataError(
                f"images of {self.form} and of {form} in two batches; expected one size for one answer. Ask for the "
                "batches one by one, or pad all inputs alike."
            )
        self.form = self.form if form is None else form

    def over(self, forms: Iterable[ImageForm | None]) -> None:
        """Note the forms of the batches of several processes."""
        for form in forms:
            self.add(form)

    def outputs(self, flat: Tensor) -> Tensor:
        """Return outputs (..., B, H W, C) as images (..., B, C, H, W)."""
        return flat if self.form is None else self.form.outputs(flat)

    def belief(self, flat: FunctionGaussian) -> FunctionGaussian:
        """Return a belief about pixels as one about images."""
        return flat if self.form is None else self.form.belief(flat)

    def predictive(self, flat: Any) -> Any:
        """Return a predictive of pixels as one of images; of the same contract, by the members that it has."""
        if self.form is None:
            return flat
        if hasattr(type(flat), "log_probs"):
            return ImageClasses(flat, self.form)
        return (ImageLabels if hasattr(type(flat), "probs") else ImageNumbers)(flat, self.form)


def by_pixels(predict: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method ``predict(self, belief)`` of a likelihood, made to take beliefs about images too."""

    @wraps(predict)
    def run(self: Any, belief: FunctionGaussian) -> Any:
        if belief.outputs_dim == -1:
            return predict(self, belief)
        images = Images()
        images.add(ImageForm(tuple(belief.mean.shape[2:])))
        return images.predictive(predict(self, pixel_belief(belief)))

    return run
