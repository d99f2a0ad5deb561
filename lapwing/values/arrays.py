"""The inputs of scores: tensors and NumPy arrays, checked, in float64 and on one device.

NumPy is never imported here: an array can exist only where its user has imported NumPy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from lapwing.errors import DataError
from lapwing.runtime.memory import even_chunks
from lapwing.runtime.settings import INTEGER, Rule, describe
from lapwing.runtime.threads import uniform
from lapwing.values.gaussian import pixels


class NumpyArray(Protocol):
    """A NumPy array, as type checkers see it without NumPy."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""

    def __array__(self) -> Any:
        """Return itself."""


Values: TypeAlias = Tensor | NumpyArray

NUMBERS = Rule(
    "a tensor or a NumPy array of real numbers without NaN",
    lambda v: isinstance(v, Tensor) and not v.is_complex() and not bool(v.isnan().any()),
    DataError,
)
KINDS = {"b": "bool", "i": "int64", "u": "int64", "f": "float64"}  # of NumPy's dtypes: what an array is turned into


def numbers(name: str, value: Values) -> Tensor:
    """Return the value as a tensor without gradient, in its own dtype; raise unless it holds real numbers without NaN.

    >>> numbers("y", torch.ones(2, requires_grad=True))
    tensor([1., 1.])
    """
    tensor = _tensor(value)
    NUMBERS.check(name, tensor)
    return tensor.detach()


def same_shape(**values: Values) -> tuple[Tensor, ...]:
    """Return the values in float64 on the device of the first; raise unless their shapes agree.

    Shapes (B, 1) and (B,) would broadcast to (B, B).
    """
    tensors = [numbers(name, value) for name, value in values.items()]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) != 1 or not math.prod(shapes[0]):
        raise DataError(
            f"{', '.join(values)} have the shapes {', '.join(map(str, shapes))}; expected the same, with at least one "
            "entry. Reshape one of them."
        )
    return tuple(tensor.to(tensors[0].device).double() for tensor in tensors)


def vectors(**values: Values) -> tuple[Tensor, ...]:
    """Return the values in float64; raise unless they all have one shape (B,)."""
    tensors = same_shape(**values)
    if tensors[0].ndim != 1:
        raise DataError(f"{', '.join(values)} have the shape {tuple(tensors[0].shape)}; expected (B,). Flatten them.")
    return tensors


def normal(mean: Values, std: Values, y: Values) -> tuple[Tensor, ...]:
    """Return mean, standard deviation and targets in float64; raise if a standard deviation is not positive."""
    mean, std, y = same_shape(mean=mean, std=std, y=y)
    positive(std)
    return mean, std, y


def positive(std: Tensor) -> None:
    """Raise unless all standard deviations are positive."""
    if not bool((std > 0).all()):
        raise DataError(f"std is as low as {std.min():.3g}; expected positive numbers. Is it a variance, or the mean?")


def draws(samples: Values, y: Values) -> tuple[Tensor, Tensor]:
    """Return draws (S, ...) and targets (...) in float64; raise unless they fit and are finite."""
    samples, y = numbers("samples", samples), numbers("y", y)
    if samples.shape[1:] != y.shape or not samples.ndim or not samples.numel():
        raise DataError(
            f"samples have the shape {tuple(samples.shape)}, y has {tuple(y.shape)}; expected (S, ...) draws of "
            "targets (...), none of them empty."
        )
    if not bool(samples.isfinite().all()) or not bool(y.isfinite().all()):
        raise DataError("samples or y are infinite; expected finite numbers.")
    return samples.double(), y.to(samples.device).double()


def labels(probs: Values, y: Values, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return probabilities (B, C) in float64 and labels (B,), without the ignored ones; raise if they do not fit.

    Those of images, (B, C, H, W) and (B, H, W), become those of their pixels.
    """
    INTEGER.check("ignore_index", ignore_index)
    probs, y = numbers("probs", probs), numbers("y", y)
    if probs.ndim > 3 and y.shape == (*probs.shape[:1], *probs.shape[2:]):
        probs, y = pixels(probs).flatten(0, 1), y.flatten()
    if probs.ndim != 2 or y.shape != probs.shape[:1] or not len(y) or y.is_floating_point():
        raise DataError(
            f"probs is {describe(probs)}, y is {describe(y)}; expected probabilities (B, C) and whole class numbers "
            "(B,), or "
            "(B, C, H, W) and (B, H, W) of images."
        )
    probs, y = probs.double(), y.long().to(probs.device)
    if not within_one(probs) or not bool(((probs.sum(1) - 1).abs() < 1e-3).all()):
        raise DataError("rows of probs do not sum to one; expected class probabilities. Take logits.softmax(-1).")
    probs, y = probs.clamp_min(0)[y != ignore_index], y[y != ignore_index]
    if not len(y) or not 0 <= int(y.min()) <= int(y.max()) < probs.shape[1]:
        seen_labels = f"labels run from {int(y.min())} to {int(y.max())}" if len(y) else "every label is ignored"
        raise DataError(f"{seen_labels}; expected 0..{probs.shape[1] - 1}, or ignore_index={ignore_index} for some.")
    return probs, y


def binary_labels(probs: Values, y: Values, ignore_index: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return probabilities of one, labels of zero and one, and whether each counts, (B, L) in float64 each.

    None where these are classes: where y has no entry for each probability. Probabilities are (B,) or (B, L) of L
    labels; one label may be (B, 1) with y (B,).
    """
    INTEGER.check("ignore_index", ignore_index)
    probs, y = numbers("probs", probs), numbers("y", y)
    if not probs.numel() or probs.shape not in (y.shape, (*y.shape, 1)):
        return None
    probs, y = probs.double(), y.to(probs.device).double().reshape(probs.shape)
    known = y != ignore_index
    if not within_one(probs) or not bool(((y == 0) | (y == 1) | ~known).all()) or not bool(known.any()):
        raise DataError(
            f"probs runs from {float(probs.min()):.3g} to {float(probs.max()):.3g} and y from {float(y.min()):.3g} to "
            f"{float(y.max()):.3g} in the same shape; expected probabilities of one and labels of zero and one, or "
            f"ignore_index={ignore_index} for some. Take logits.sigmoid() for logits; classes have probs (B, C)."
        )
    one = probs.ndim == 1
    probs, y, known = ((t.unsqueeze(1) if one else t.flatten(0, -2)) for t in (probs.clamp(0, 1), y, known))
    return probs, y.masked_fill(~known, 0), known


def within_one(probs: Tensor) -> bool:
    """Return whether all numbers are between 0 and 1, up to rounding."""
    return bool((probs >= -1e-6).all()) and bool((probs <= 1 + 1e-6).all())


def mean_of_ties(keys: Tensor, values: Tensor) -> Tensor:
    """Return the values (B,), each replaced by the mean of those with an equal key, so that their order has no effect.

    >>> mean_of_ties(torch.tensor([2.0, 1.0, 2.0]), torch.tensor([1.0, 5.0, 0.0]))
    tensor([0.5000, 5.0000, 0.5000])
    """
    _, place, counts = keys.unique(return_inverse=True, return_counts=True)
    return (torch.zeros_like(counts, dtype=values.dtype).index_add_(0, place, values) / counts)[place]


def _tensor(value: object) -> Any:
    """Return a copy of a NumPy array of numbers as a tensor; every other value as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or isinstance(value, numpy.ma.MaskedArray):
        return value
    dtype = KINDS.get(value.dtype.kind)
    # A copy in row order: PyTorch refuses negative strides and foreign byte orders, and warns of read-only memory.
    return value if dtype is None else torch.from_numpy(value.astype(dtype, order="C"))


def resampled_weights(count: int, resamples: int, generator: torch.Generator, most: int) -> Iterator[Tensor]:
    """Yield how often each of ``count`` rows is drawn with replacement, (R, count) in float64.

    At most ``most`` resamples are yielded at a time; together they are as many as asked for.
    """
    like = torch.empty(0, dtype=torch.float64, device=generator.device)
    for part in even_chunks(resamples, most):
        number = part.stop - part.start
        rows = (uniform((number, count), generator, like) * count).long()
        yield torch.zeros(number, count, dtype=torch.float64).scatter_add_(
            1, rows.cpu(), torch.ones(number, count, dtype=torch.float64)
        )
