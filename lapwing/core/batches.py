"""Batches of data: inputs, targets and weights of some samples, and small batches joined into larger ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.core.inputs import Inputs, map_tensors, tensors_in


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch: the inputs of the network, and the targets."""

    inputs: Inputs
    targets: Tensor
    key: str | None = None  # of the targets, in a batch that is a mapping
    weights: Tensor | None = None  # of the samples, (B,) in float64; None if each counts once

    @property
    def labels(self) -> bool:
        """Whether the targets are what a model takes as ``labels``: they have that name, or are one of its inputs."""
        same = lambda t: t.shape == self.targets.shape and bool(((t == self.targets) | (self.targets < 0)).all())
        return self.key == "labels" or any(same(t) for t in tensors_in(self.inputs) if not t.is_floating_point())

    @property
    def n_samples(self) -> int:
        """The number of samples: that of the targets."""
        return len(self.targets) if self.targets.ndim else 1

    def to(self, device: torch.device) -> Batch:
        """Return the batch on another device."""
        weights = None if self.weights is None else self.weights.to(device)
        return Batch(map_tensors(self.inputs, lambda t: t.to(device)), self.targets.to(device), self.key, weights)

    def weights_of(self, rows: slice) -> Tensor | None:
        """Return the weights of some samples; None if each counts once."""
        return None if self.weights is None else self.weights[rows]


def digest(batch: Batch) -> bytes:
    """Return a few bytes that two batches share only if all their numbers are the same."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in (*tensors_in(batch.inputs), batch.targets):
        total.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.digest()


def merged(batches: Iterable[Batch], rows: int | Callable[[Inputs], int]) -> Iterator[Batch]:
    """Yield consecutive batches of plain tensors, joined until they hold at least ``rows`` samples.

    ``rows`` is a number, or a function from the inputs of a batch to the number for samples like these.

    The result of a pass does not depend on the batch size, but its cost does: each call has a fixed cost.
    Batches that are not tensors of one shape stay as they are.
    """
    waiting: list[Batch] = []
    count, form = 0, None
    for batch in batches:
        before, form = form, _plain_rows(batch)
        if waiting and form != before:
            yield _joined(waiting)
            waiting, count = [], 0
        waiting.append(batch)
        count += batch.n_samples
        if form is None or count >= (rows(batch.inputs) if callable(rows) else rows):
            yield _joined(waiting)
            waiting, count = [], 0
    if waiting:
        yield _joined(waiting)


def _plain_rows(batch: Batch) -> tuple[Any, ...] | None:
    """Return shapes and dtypes of the rows of inputs and targets; None if the inputs are not one tensor of rows."""
    x, y = batch.inputs, batch.targets
    if not isinstance(x, Tensor) or not x.ndim or not y.ndim or len(x) != len(y):
        return None
    return x.shape[1:], x.dtype, y.shape[1:], y.dtype, batch.weights is None


def _joined(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    inputs, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("inputs", "targets"))
    weights = [batch.weights for batch in batches if batch.weights is not None]
    return Batch(inputs, targets, weights=torch.cat(weights) if weights else None)
