"""Predictives of batches one after another, and those of images from those of their pixels.

Predictives of images: those of their pixels, (B, H W, C), in the form that users have, (B, C, H, W).

A pixel is a datum: its channels are joint, and different pixels are independent given the belief about each. Members
that have a number for each datum, such as entropies, are (B, H, W).

The predictive of all rows of a loader: predictives of its batches, one after another.

Every member is computed batch by batch, so that a temporary is as large as for one batch. The numbers that all members
follow from are kept: (N, C) log-probabilities of classes, and means and variances of everything else. Covariances
between outputs are kept as well while they take at most ``KEPT`` bytes; without them what needs them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributions import Distribution

from lapwing.data.processes import Processes
from lapwing.errors import DataError, UnsupportedError
from lapwing.predictives.base import (
    ClassPredictive,
    LabelPredictive,
    MultilabelPredictive,
    NumberPredictive,
    Predictive,
    Scoring,
    checked_numbers,
    given_tensor,
)
from lapwing.predictives.labels import AveragedClasses
from lapwing.predictives.mixture import MixtureDistribution
from lapwing.runtime.state import on_device, rebuilt
from lapwing.values.gaussian import Deferred, FunctionGaussian, ImageForm, pixel_belief


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


KEPT = 2**28  # bytes of covariances that are kept
SLAB = 2**25 + 2**16  # bytes; the C library takes pieces of more than 32 MiB from the system, and gives them back
ALIGNED = 64  # bytes
WIDE = 32  # outputs above which no covariance between them is kept


class Joined(Protocol):
    """Predictives of consecutive batches as one."""

    parts: tuple[Any, ...]

    def rows(self, member: Callable[[Any], Tensor], dim: int = 0) -> Tensor:
        """Return a member of all parts, joined along the rows."""
        return joined_rows([member(part) for part in self.parts], dim)

    def split(self, y: Tensor) -> Sequence[Tensor]:
        """Return targets of all rows, cut as the parts are."""
        return y.split([len(part.mean) for part in self.parts])

    def scored(self, y: Tensor) -> Tensor:
        """Return the log-probabilities of targets (N, [T,] C) that were checked, (N, [T])."""
        pairs = zip(self.parts, self.split(y), strict=True)
        return torch.cat([part.log_prob(own) for part, own in pairs])


@dataclass(frozen=True, eq=False, repr=False)
class JoinedClasses(ClassPredictive):
    """The predictive of the class of each row of a loader.

    Args:
        logs: Log-probabilities (N, C).
        parts: The predictives of the batches, for ``epistemic`` and ``aleatoric``; none if they were too large.
    """

    logs: Tensor
    parts: tuple[Any, ...]

    @property
    def log_probs(self) -> Tensor:
        return self.logs

    @cached_property
    def integrated_probs(self) -> Tensor:
        return self._rows(lambda part: part.integrated_probs)

    @cached_property
    def aleatoric(self) -> Tensor:
        return self._rows(lambda part: part.aleatoric)

    def _rows(self, member: Callable[[Any], Tensor]) -> Tensor:
        if not self.parts:
            _refuse(self.logs.shape[-1])
        return torch.cat([member(part) for part in self.parts])


@dataclass(frozen=True, eq=False, repr=False)
class JoinedLabels(Joined, MultilabelPredictive):
    """The predictive of the binary labels of each row of a loader."""

    parts: tuple[Any, ...]

    @cached_property
    def probs(self) -> Tensor:
        return self.rows(lambda part: part.probs)

    @cached_property
    def integrated_probs(self) -> Tensor:
        return self.rows(lambda part: part.integrated_probs)

    @cached_property
    def aleatoric(self) -> Tensor:
        return self.rows(lambda part: part.aleatoric)

    def log_prob(self, y: Tensor) -> Tensor:
        return self.scored(checked_numbers(y, self.probs, one=False, within=(0, 1)))

    def known_log_prob(self, y: Tensor, known: Tensor) -> Tensor:
        each = zip(self.parts, self.split(y), self.split(known), strict=True)
        return torch.cat([part.known_log_prob(own, mask) for part, own, mask in each])

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.rows(lambda part: part.sample(n, generator), dim=1)


@dataclass(frozen=True, eq=False, repr=False)
class JoinedNumbers(Joined, NumberPredictive):
    """The predictive of the numbers of each row of a loader."""

    parts: tuple[Any, ...]

    @cached_property
    def mean(self) -> Tensor:
        return self.rows(lambda part: part.mean)

    @cached_property
    def epistemic_variance(self) -> Tensor:
        return self.rows(lambda part: part.epistemic_variance)

    @cached_property
    def aleatoric_variance(self) -> Tensor:
        return self.rows(lambda part: part.aleatoric_variance)

    @cached_property
    def entropy(self) -> Tensor:
        return self.rows(lambda part: part.entropy)

    @cached_property
    def known_entropy(self) -> Tensor:
        return self.rows(lambda part: part.known_entropy)

    @property
    def distribution(self) -> Distribution:
        return MixtureDistribution(self)

    @property
    def scoring(self) -> Scoring:
        scoring: Scoring = self.parts[0].scoring
        return scoring

    def cdf(self, y: Tensor | float) -> Tensor:
        numbers = checked_numbers(y, self.mean)
        each = self.split(numbers) if numbers.ndim else [numbers] * len(self.parts)
        return torch.cat([part.cdf(own) for part, own in zip(self.parts, each, strict=True)])

    def quantile(self, level: float) -> Tensor:
        return self.rows(lambda part: part.quantile(level))

    def log_prob(self, y: Tensor) -> Tensor:
        return self.scored(checked_numbers(y, self.mean, one=False))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.rows(lambda part: part.sample(n, generator), dim=1)


def joined(predictives: Iterable[Any], device: torch.device) -> Any:
    """Return the predictives of consecutive batches as one, on the device. Each is dropped once its numbers are kept.

    Raises:
        UnsupportedError: If the predictives have neither ``log_probs``, ``probs`` nor ``quantile``.
        DataError: If outputs of several batches have different shapes.
    """
    gathered = _Gathered(device)
    for predictive in predictives:
        gathered.add(predictive)
    return gathered.value()


def joined_processes(own: Any | None, processes: Processes, device: torch.device) -> Any:
    """Return the predictives of several processes as one, on the device, in the order of the processes.

    Args:
        own: What ``joined`` returned in this process, on the CPU; None if it has no rows.
        processes: Those with the other rows.
        device: Where the answer shall be.

    Raises:
        DataError: If no process has rows.
    """
    given = [each for each in processes.gather_values(own) if each is not None]
    if not given:
        raise DataError("the loader is empty in all processes: no batch was yielded; expected at least one.")
    if isinstance(given[0], AveragedClasses):
        return on_device(AveragedClasses.joined(given), device)
    parts = tuple(part for each in given for part in each.parts) if all(each.parts for each in given) else ()
    if isinstance(given[0], JoinedClasses):
        return on_device(JoinedClasses(joined_rows([each.logs for each in given]), parts), device)
    return on_device(type(given[0])(parts), device)


def joined_beliefs(beliefs: Iterable[FunctionGaussian], device: torch.device) -> FunctionGaussian:
    """Return the beliefs about consecutive batches as one, on the device; above 32 outputs with variances alone."""
    means: list[Tensor] = []
    spreads: list[Tensor] = []
    for belief in beliefs:
        means.append(belief.mean.to(device))
        wide = belief.mean.shape[-1] > WIDE
        spreads.append((belief.variance if wide else belief.cov).to(device))
    mean, spread = joined_rows(means), joined_rows(spreads)
    if spread.ndim > mean.ndim:
        return FunctionGaussian(mean, spread)
    return FunctionGaussian(mean, Deferred(partial(_itself, spread), partial(_refuse, mean.shape[-1])))


class _Gathered:
    """The numbers of predictives of consecutive batches."""

    def __init__(self, device: torch.device) -> None:
        self._slabs, self._kind, self._kept = _Slabs(device), "", 0
        self._logs: list[Tensor] = []
        self._parts: list[Any] = []

    def add(self, predictive: Any) -> None:
        self._kind = _kind(predictive)
        if self._kind == "averages":
            self._parts.append(_Storing(self._slabs, True)(predictive))
            return
        if self._kind == "classes":
            self._logs.append(self._slabs.kept(predictive.log_probs))
        whole = self._kept <= KEPT and self._kind != "labels"
        if predictive.mean.shape[-1] > WIDE:
            whole, self._kept = False, KEPT + 1
        if whole or self._kind != "classes":
            storing = _Storing(self._slabs, whole)
            self._parts.append(storing(predictive))
            self._kept += storing.nbytes if whole else 0
        if whole and self._kept > KEPT:  # no covariance is kept from now on
            self._parts = [] if self._logs else [_Storing(self._slabs, False)(part) for part in self._parts]

    def value(self) -> Any:
        if self._kind == "averages":
            return AveragedClasses.joined(self._parts)
        if self._kind == "classes":
            return JoinedClasses(joined_rows(self._logs), tuple(self._parts))
        return (JoinedLabels if self._kind == "labels" else JoinedNumbers)(tuple(self._parts))


def _kind(predictive: Any) -> str:
    """Return what a predictive is about, by the members of its contract."""
    if isinstance(predictive, AveragedClasses):
        return "averages"
    for member, kind in (("log_probs", "classes"), ("probs", "labels"), ("quantile", "numbers")):
        if hasattr(type(predictive), member):
            return kind
    raise UnsupportedError(
        f"{type(predictive).__name__} has neither log_probs, probs nor quantile, which the predictive of a loader "
        "needs; expected a class that inherits from one of the contracts. Predict the batches one by one."
    )


class _Slabs:
    """Memory for numbers that are kept, in large pieces on the CPU.

    Small tensors that stay between large temporary ones that go would leave the C library with memory in fragments, ten
    times as much as the numbers take.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._slab, self._used = device, torch.empty(0, dtype=torch.uint8), 0

    def kept(self, t: Tensor) -> Tensor:
        """Return the tensor on the device, in a slab if it is small."""
        t = t.detach()
        size = -(-t.nbytes // ALIGNED) * ALIGNED
        if self._device.type != "cpu" or size > SLAB // 8:
            return t.to(self._device)
        if self._used + size > len(self._slab):  # a few numbers take a small one
            room = min(SLAB, max(2 * len(self._slab), 16 * size))
            self._slab, self._used = torch.empty(room, dtype=torch.uint8), 0
        place = self._slab[self._used : self._used + t.nbytes].view(t.dtype).view(t.shape)
        self._used += size
        return place.copy_(t)


class _Storing:
    """A walk through a predictive that moves its tensors and leaves out results that can be computed again.

    Beliefs that compute their covariance later get it now, or, unless ``whole``, the variances alone.
    """

    def __init__(self, slabs: _Slabs, whole: bool) -> None:
        self._slabs, self._whole, self.nbytes = slabs, whole, 0
        self._done: dict[int, tuple[Any, Any]] = {}  # with the values, so that no address is used twice

    def __call__(self, value: Any) -> Any:
        if id(value) not in self._done:
            self._done[id(value)] = (value, self._stored(value))
        return self._done[id(value)][1]

    def _stored(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.nbytes += value.nbytes
            return self._slabs.kept(value)
        if isinstance(value, FunctionGaussian):
            return self._belief(value)
        if is_dataclass(value) and not isinstance(value, type):
            result = object.__new__(type(value))
            result.__dict__.update({each.name: self(getattr(value, each.name)) for each in fields(value)})
            return result
        return rebuilt(value, [self(part) for part in value]) if isinstance(value, tuple | list) else value

    def _belief(self, belief: FunctionGaussian) -> FunctionGaussian:
        mean = self(belief.mean)
        if self._whole:
            return FunctionGaussian(mean, self(belief.cov))
        variance, outputs = self(belief.variance), mean.shape[-1]
        return FunctionGaussian(mean, Deferred(partial(_itself, variance), partial(_refuse, outputs)))


def _itself(t: Tensor) -> Tensor:
    return t


def _refuse(outputs: int) -> Tensor:
    raise UnsupportedError(
        f"this needs the covariances between the {outputs} outputs of each row, which were not kept for all rows of "
        f"the loader: they take more than {KEPT // 2**20} MiB, or there are more than {WIDE} outputs. Predict the "
        "batches one by one."
    )


def joined_rows(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Return tensors joined along a dimension; the list is emptied, so that the parts are not held twice."""
    first = parts[0]
    shape = lambda t: (*t.shape[:dim], *t.shape[dim + 1 :])
    for part in parts:
        if shape(part) != shape(first):
            raise DataError(
                f"outputs of shapes {tuple(first.shape)} and {tuple(part.shape)} in two batches; expected one shape "
                "without the rows. Predict the batches one by one, or pad all inputs alike."
            )
    if len(parts) == 1:
        return parts.pop()
    out = first.new_empty(*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :])
    del first
    parts.reverse()
    start = 0
    while parts:
        part = parts.pop()
        out.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return out
