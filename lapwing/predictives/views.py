"""Predictives of consecutive batches as one, and predictives of pixels (B, H W, C) as those of images (B, C, H, W).

A view has the members of other predictives, put together and reshaped. The predictive of a loader keeps the numbers
that all members follow from: log-probabilities of classes, and means and variances of everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from lapwing.data.processes import Processes
from lapwing.errors import DataError, UnsupportedError
from lapwing.predictives.base import (
    ClassPredictive,
    MultilabelPredictive,
    NumberPredictive,
    Predictive,
    check_numbers,
    to_tensor,
)
from lapwing.predictives.labels import AveragedClasses
from lapwing.predictives.numbers import NumberDistribution
from lapwing.predictives.scores import NumberScoring
from lapwing.runtime.settings import change_parts, on_device
from lapwing.values.gaussian import Deferred, FunctionGaussian, ImageForm

P = TypeVar("P", bound=Predictive)
T = TypeVar("T")


def concat_rows(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Return tensors one after another along a dimension; the list is emptied, so that the parts are not held twice."""
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


@dataclass(frozen=True, eq=False, repr=False)
class PredictiveView(Predictive, Generic[P]):
    """Predictives of consecutive batches as one, or of pixels as images: their members, put together and reshaped.

    Every member is computed batch by batch, so that a temporary is as large as for one batch. A pixel is a datum: its
    channels are joint, and different pixels are independent given the belief about each. Members of images that have a
    number for each datum, such as entropies, are (B, H, W).

    Args:
        parts: The predictives of the batches; of images those of their pixels, (B, H W, C).
        form: The height and width of images; None for other outputs.
    """

    parts: tuple[P, ...]
    form: ImageForm | None = None

    @property
    def pixels(self) -> Predictive:
        """The predictive of the pixels (B, H W, C) of images."""
        return self.parts[0] if len(self.parts) == 1 else replace(self, form=None)

    @classmethod
    def concat(cls, views: Sequence[PredictiveView[P]]) -> PredictiveView[P]:
        """Return the predictive of all rows, from those of consecutive rows."""
        return replace(views[0], parts=tuple(part for view in views for part in view.parts))

    def rows(self, member: Callable[[P], Tensor], dim: int = 0) -> Tensor:
        """Return a member of all parts, one after another."""
        return concat_rows([member(part) for part in self.parts], dim)

    def rows_at(self, member: Callable[..., Tensor], *targets: Tensor) -> Tensor:
        """Return ``member(part, *targets)`` of all parts, each at its rows of the targets."""
        sizes = [len(part.mean) for part in self.parts]
        cut = zip(*(each.split(sizes) for each in targets), strict=True)
        return concat_rows([member(part, *own) for part, own in zip(self.parts, cut, strict=True)])

    def as_outputs(self, flat: Tensor) -> Tensor:
        """Return numbers of each output, (..., B, H W, C) of images, in the shape of the mean."""
        return flat if self.form is None else self.form.outputs(flat)

    def as_data(self, flat: Tensor) -> Tensor:
        """Return numbers of each datum, (..., B, H W) of images, as (..., B, H, W)."""
        return flat if self.form is None else self.form.labels(flat)

    def flat(self, y: object) -> Any:
        """Return targets of images as those of pixels; a single number, and other targets, as they are."""
        y = to_tensor(y)
        return self.form.targets(y) if self.form is not None and isinstance(y, Tensor) and y.ndim else y

    @property
    def distribution(self) -> Any:
        """The targets of one input, or of each pixel (B, H W), as a ``torch.distributions`` object."""
        return super().distribution if self.form is None else self.pixels.distribution

    def log_prob(self, y: Tensor) -> Tensor:
        y = check_numbers(self.flat(y), self.rows(lambda part: part.mean), one=False)
        return self.as_data(self.rows_at(lambda part, own: part.log_prob(own), y))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the targets, (n, B, C), or (n, B, C, H, W) of images."""
        return self.as_outputs(self.rows(lambda part: part.sample(n, generator), 1))


def of_outputs(member: Callable[[Any], Tensor]) -> cached_property[Tensor]:
    """Return a member of a view that has a number for each output."""
    return cached_property(lambda view: view.as_outputs(view.rows(member)))


def of_data(member: Callable[[Any], Tensor]) -> cached_property[Tensor]:
    """Return a member of a view that has a number for each datum."""
    return cached_property(lambda view: view.as_data(view.rows(member)))


class ClassView(PredictiveView[ClassPredictive], ClassPredictive):
    """The predictive of the class of each pixel; of batches see ``ClassesOfBatches``."""

    log_probs = of_outputs(lambda part: part.log_probs)
    integrated_probs = of_outputs(lambda part: part.integrated_probs)
    standard_error = of_outputs(lambda part: part.standard_error)
    entropy = of_data(lambda part: part.entropy)
    aleatoric = of_data(lambda part: part.aleatoric)
    mutual_information = of_data(lambda part: part.mutual_information)

    @classmethod
    def concat(cls, views: Sequence[PredictiveView[Any]]) -> ClassView:
        pixels = [view.parts[0] for view in views]
        return cls((type(pixels[0]).concat(pixels),), views[0].form)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of the targets of each pixel, (B, H, W).

        Args:
            y: Class numbers (B, H, W), or probabilities of the classes (B, C, H, W).

        Raises:
            DataError: ``y`` has another shape, or a label is not one of the classes.
        """
        return self.as_data(self.pixels.log_prob(self.flat(y)))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the class of each pixel, (n, B, H, W)."""
        return self.as_data(self.rows(lambda part: part.sample(n, generator), 1))


class LabelView(PredictiveView[MultilabelPredictive], MultilabelPredictive):
    """The predictive of the binary labels of each row of a loader, or of each channel of each pixel."""

    probs = of_outputs(lambda part: part.probs)
    integrated_probs = of_outputs(lambda part: part.integrated_probs)
    entropy = of_data(lambda part: part.entropy)
    aleatoric = of_data(lambda part: part.aleatoric)
    mutual_information = of_data(lambda part: part.mutual_information)

    def known_log_prob(self, y: Tensor, known: Tensor) -> Tensor:
        each = lambda part, own, mask: part.known_log_prob(own, mask)
        return self.as_data(self.rows_at(each, self.flat(y), self.flat(known)))


class NumberView(PredictiveView[NumberPredictive], NumberPredictive):
    """The predictive of the numbers of each row of a loader, or of each channel of each pixel."""

    mean = of_outputs(lambda part: part.mean)
    epistemic_variance = of_outputs(lambda part: part.epistemic_variance)
    aleatoric_variance = of_outputs(lambda part: part.aleatoric_variance)
    entropy = of_data(lambda part: part.entropy)
    known_entropy = of_data(lambda part: part.known_entropy)

    @property
    def distribution(self) -> Distribution:
        return NumberDistribution(self) if self.form is None else self.pixels.distribution

    @property
    def scoring(self) -> NumberScoring:
        return self.parts[0].scoring

    def cdf(self, y: Tensor | float) -> Tensor:
        y = check_numbers(self.flat(y), self.rows(lambda part: part.mean))
        if not y.ndim:
            return self.as_outputs(self.rows(lambda part: part.cdf(y)))
        return self.as_outputs(self.rows_at(lambda part, own: part.cdf(own), y))

    def quantile(self, level: float) -> Tensor:
        return self.as_outputs(self.rows(lambda part: part.quantile(level)))


VIEWS = {"log_probs": ClassView, "probs": LabelView, "quantile": NumberView}  # by the member that tells a contract


def view_of(predictive: Predictive) -> type[PredictiveView[Any]] | None:
    """Return the kind of view that has the contract of a predictive; None if it has the members of none."""
    return next((view for member, view in VIEWS.items() if hasattr(type(predictive), member)), None)


def as_images(pixels: Any, form: ImageForm) -> PredictiveView[Any]:
    """Return a predictive of pixels (B, H W, C) as one of images."""
    view = pixels if isinstance(pixels, PredictiveView) else (view_of(pixels) or NumberView)((pixels,))
    return replace(view, form=form)


@dataclass(frozen=True, eq=False, repr=False)
class ClassesOfBatches(ClassPredictive):
    """The predictive of the class of each row of a loader.

    Log-probabilities are computed with the batch, on its device, and kept; the predictives are kept for the rest.

    Args:
        logs: Log-probabilities (N, C).
        parts: The predictives of the batches, for ``epistemic`` and ``aleatoric``; none if they were too large.
    """

    logs: Tensor
    parts: tuple[ClassPredictive, ...]

    @property
    def log_probs(self) -> Tensor:
        return self.logs

    @cached_property
    def integrated_probs(self) -> Tensor:
        return self._rows(lambda part: part.integrated_probs)

    @cached_property
    def aleatoric(self) -> Tensor:
        return self._rows(lambda part: part.aleatoric)

    @classmethod
    def concat(cls, predictives: Sequence[ClassesOfBatches]) -> ClassesOfBatches:
        """Return the predictive of all rows, from those of consecutive rows."""
        parts = [each.parts for each in predictives]
        logs = concat_rows([each.logs for each in predictives])
        return cls(logs, tuple(part for each in parts for part in each) if all(parts) else ())

    def _rows(self, member: Callable[[ClassPredictive], Tensor]) -> Tensor:
        if not self.parts:
            _refuse(self.logs.shape[-1])
        return concat_rows([member(part) for part in self.parts])


COVARIANCE_BYTES = 2**28  # bytes of covariances that are kept
SLAB_BYTES = 2**25 + 2**16  # bytes; the C library takes pieces of more than 32 MiB from the system, and gives them back
ALIGNMENT = 64  # bytes
COVARIANCE_OUTPUTS = 32  # outputs above which no covariance between them is kept


def concat_batches(predictives: Iterable[Predictive], device: torch.device) -> Predictive:
    """Return the predictives of consecutive batches as one, on the device. Each is dropped once its numbers are kept.

    The numbers that all members follow from are kept: log-probabilities of classes, and means and variances of
    everything else; covariances between outputs while they take at most ``COVARIANCE_BYTES`` bytes, for up to
    ``COVARIANCE_OUTPUTS`` outputs.

    Raises:
        UnsupportedError: If the predictives have neither ``log_probs``, ``probs`` nor ``quantile``.
        DataError: If outputs of several batches have different shapes.
    """
    slabs, nbytes = _Slabs(device), 0
    logs: list[Tensor] = []
    parts: list[Any] = []
    form, kind = None, None
    for predictive in predictives:
        flat: Any = predictive.pixels if isinstance(predictive, PredictiveView) else predictive
        form = same_form([form, _form(predictive)])
        kind = _kind(flat)
        if kind is AveragedClasses:
            parts.append(_Storage(slabs, True).copy(flat))
            continue
        if kind is ClassView:
            logs.append(slabs.copy(flat.log_probs))
        if flat.mean.shape[-1] > COVARIANCE_OUTPUTS:
            nbytes = COVARIANCE_BYTES + 1
        covariances = nbytes <= COVARIANCE_BYTES and kind is not LabelView
        if covariances or kind is not ClassView:
            storage = _Storage(slabs, covariances)
            parts.append(storage.copy(flat))
            nbytes += storage.nbytes if covariances else 0
        if covariances and nbytes > COVARIANCE_BYTES:  # no covariance is kept from now on
            parts = [] if kind is ClassView else [_Storage(slabs, False).copy(part) for part in parts]
    if kind in (AveragedClasses, ClassView):
        classes = AveragedClasses.concat(parts) if not logs else ClassesOfBatches(concat_rows(logs), tuple(parts))
        return classes if form is None else as_images(classes, form)
    return (LabelView if kind is LabelView else NumberView)(tuple(parts), form)


def concat_processes(own: Predictive | None, processes: Processes, device: torch.device) -> Predictive:
    """Return the predictives of several processes as one, on the device, in the order of the processes.

    Args:
        own: What ``concat_batches`` returned in this process, on the CPU; None if it has no rows.
        processes: Those with the other rows.
        device: Where the answer shall be.

    Raises:
        DataError: If no process has rows, or the processes have images of different sizes.
    """
    given: list[Any] = [each for each in processes.gather_values(own) if each is not None]
    if not given:
        raise DataError("the loader is empty in all processes: no batch was yielded; expected at least one.")
    same_form(map(_form, given))
    return on_device(type(given[0]).concat(given), device)


def concat_beliefs(beliefs: Iterable[FunctionGaussian], device: torch.device) -> FunctionGaussian:
    """Return the beliefs about consecutive batches as one, on the device; above 32 outputs with variances alone."""
    means: list[Tensor] = []
    spreads: list[Tensor] = []
    form, dim = None, -1
    for belief in beliefs:
        form, dim = same_form([form, belief.form]), belief.outputs_dim
        wide = belief.mean.shape[dim] > COVARIANCE_OUTPUTS
        means.append(belief.mean.to(device))
        spreads.append((belief.variance if wide else belief.cov).to(device))
    mean, spread = concat_rows(means), concat_rows(spreads)
    if spread.ndim > mean.ndim:
        return FunctionGaussian(mean, spread, outputs_dim=dim)
    deferred = Deferred(partial(_itself, spread), partial(_refuse, mean.shape[dim]))
    return FunctionGaussian(mean, deferred, outputs_dim=dim)


def same_form(forms: Iterable[ImageForm | None]) -> ImageForm | None:
    """Return the form of the images of several batches, None without images; raise if it differs."""
    found = None
    for form in forms:
        if form is not None and found not in (None, form):
            raise DataError(
                f"images of {found} and of {form} in two batches; expected one size for one answer. Ask for the "
                "batches one by one, or pad all inputs alike."
            )
        found = form or found
    return found


def _form(predictive: Predictive) -> ImageForm | None:
    return predictive.form if isinstance(predictive, PredictiveView) else None


def _kind(predictive: Predictive) -> type[Predictive]:
    """Return how predictives of batches are joined: as averages, or by the view that has their contract."""
    kind = AveragedClasses if isinstance(predictive, AveragedClasses) else view_of(predictive)
    if kind is None:
        raise UnsupportedError(
            f"{type(predictive).__name__} has neither log_probs, probs nor quantile, which the predictive of a loader "
            "needs; expected a class that inherits from one of the contracts. Predict the batches one by one."
        )
    return kind


class _Slabs:
    """Memory for numbers that are kept, in large pieces on the CPU.

    Small tensors that stay between large temporary ones that go would leave the C library with memory in fragments, ten
    times as much as the numbers take.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._slab, self._used = device, torch.empty(0, dtype=torch.uint8), 0

    def copy(self, t: Tensor) -> Tensor:
        """Return the tensor on the device, in a slab if it is small."""
        t = t.detach()
        size = -(-t.nbytes // ALIGNMENT) * ALIGNMENT
        if self._device.type != "cpu" or size > SLAB_BYTES // 8:
            return t.to(self._device)
        if self._used + size > len(self._slab):  # a few numbers take a small one
            room = min(SLAB_BYTES, max(2 * len(self._slab), 16 * size))
            self._slab, self._used = torch.empty(room, dtype=torch.uint8), 0
        place = self._slab[self._used : self._used + t.nbytes].view(t.dtype).view(t.shape)
        self._used += size
        return place.copy_(t)


class _Storage:
    """A walk through a predictive that copies its tensors and leaves out results that can be computed again.

    Covariances that were deferred are computed now; without ``covariances`` the variances alone are kept.
    """

    def __init__(self, slabs: _Slabs, covariances: bool) -> None:
        self._slabs, self._covariances, self.nbytes = slabs, covariances, 0
        self._done: dict[int, tuple[Any, Any]] = {}  # with the values, so that no address is used twice

    def copy(self, value: T) -> T:
        """Return the value with copies of its tensors; one that is reached twice is copied once."""
        if id(value) not in self._done:
            self._done[id(value)] = (value, self._copy(value))
        return self._done[id(value)][1]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.nbytes += value.nbytes
            return self._slabs.copy(value)
        if isinstance(value, FunctionGaussian):
            return self._belief(value)
        return change_parts(value, self.copy, cached=False)

    def _belief(self, belief: FunctionGaussian) -> FunctionGaussian:
        mean = self.copy(belief.mean)
        if self._covariances:
            return FunctionGaussian(mean, self.copy(belief.cov))
        variance, outputs = self.copy(belief.variance), mean.shape[-1]
        return FunctionGaussian(mean, Deferred(partial(_itself, variance), partial(_refuse, outputs)))


def _itself(t: Tensor) -> Tensor:
    return t


def _refuse(outputs: int) -> Tensor:
    raise UnsupportedError(
        f"this needs the covariances between the {outputs} outputs of each row, which were not kept for all rows of "
        f"the loader: they take more than {COVARIANCE_BYTES // 2**20} MiB, or there are more than "
        f"{COVARIANCE_OUTPUTS} outputs. Predict the batches one by one."
    )
