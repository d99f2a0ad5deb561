"""Inputs whose samples are not the rows of tensors: graphs, sequences of several lengths, one sample of many tokens.

``core/inputs.py`` takes them as one leaf of the inputs: it asks them how many samples there are, and for some of them.
``Part`` is the sampler of a loader for several processes, ``weighted`` gives samples weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lapwing.core.parts import Part as Part
from lapwing.core.weights import Weighted as Weighted
from lapwing.core.weights import weighted as weighted
from lapwing.errors import DataError

__all__ = ["OneSample", "Part", "SampleSet", "Weighted", "unpacked", "weighted"]


class SampleSet(ABC):
    """Inputs that say themselves how many samples they hold, how some are taken, and what the model is called with.

    A class inherits from it and defines the first four members. ``docs/graphs.md`` has examples.

    >>> class Sets(SampleSet):  # sets of numbers, of which the model takes the sums
    ...     def __init__(self, members): self.members = members
    ...     def __len__(self): return len(self.members)
    ...     def take(self, rows): return Sets([self.members[int(row)] for row in rows])
    ...     def changed(self, change): return Sets([change(each) for each in self.members])
    ...     def arguments(self): return torch.stack([each.sum(0) for each in self.members])
    >>> import lapwing as lw
    >>> inputs = Sets([torch.ones(n, 2) for n in (1, 3, 2)])
    >>> posterior = lw.fit(torch.nn.Linear(2, 1), [(inputs, torch.zeros(3, 1))], "regression", prior=1.0)
    >>> posterior.predict(inputs).mean.shape
    torch.Size([3, 1])
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def take(self, rows: Tensor) -> SampleSet:
        """Return the samples with these numbers (n,), in this order; a number may repeat."""

    @abstractmethod
    def changed(self, change: Callable[[Tensor], Tensor]) -> SampleSet:
        """Return the same samples with ``change`` applied to every tensor: another device, another dtype."""

    @abstractmethod
    def arguments(self) -> Any:
        """Return what the model is called with: one object, a tuple by position, or a mapping by keyword."""

    def outputs(self, out: Tensor) -> Tensor:
        """Return the outputs of the model as (B, C), (B, T, C) or (B, C, H, W), with a row for each sample."""
        return out


@dataclass(frozen=True, eq=False)
class OneSample(SampleSet):
    """A batch of one sample, whose tokens are the rows of the outputs: one graph with a target for each node.

    The outputs (T, C) of the model count as (1, T, C), and the targets are (1, T). Nodes may depend on each other.

    Args:
        values: The arguments of the model, by position.

    >>> inputs = OneSample((torch.zeros(5, 3), torch.zeros(2, 8)))
    >>> len(inputs), inputs.outputs(torch.zeros(5, 4)).shape
    (1, torch.Size([1, 5, 4]))
    """

    values: tuple[Any, ...]

    def __len__(self) -> int:
        return 1

    def take(self, rows: Tensor) -> OneSample:
        if rows.tolist() != [0]:
            raise DataError(f"OneSample holds one sample; samples {rows.tolist()} were asked for. Give one at a time.")
        return self

    def changed(self, change: Callable[[Tensor], Tensor]) -> OneSample:
        return OneSample(tuple(change(value) if isinstance(value, Tensor) else value for value in self.values))

    def arguments(self) -> tuple[Any, ...]:
        return self.values

    def outputs(self, out: Tensor) -> Tensor:
        return out.unsqueeze(0)


@dataclass(frozen=True, eq=False)
class Packed(SampleSet):
    """A ``PackedSequence``, kept as padded sequences (B, T, ...) and their lengths (B,), which stay on the CPU."""

    padded: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, packed: PackedSequence) -> Packed:
        """Return the sequences of a packed one, in the order before they were sorted."""
        return cls(*pad_packed_sequence(packed, batch_first=True))

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: Tensor) -> Packed:
        return Packed(self.padded[rows.to(self.padded.device)], self.lengths[rows.cpu()])

    def changed(self, change: Callable[[Tensor], Tensor]) -> Packed:
        return Packed(change(self.padded), self.lengths)

    def arguments(self) -> PackedSequence:
        return pack_padded_sequence(self.padded, self.lengths, batch_first=True, enforce_sorted=False)


@dataclass(frozen=True, eq=False)
class Nested(SampleSet):
    """A nested tensor, kept as the tensors of its samples."""

    parts: tuple[Tensor, ...]
    layout: torch.layout

    def __len__(self) -> int:
        return len(self.parts)

    def take(self, rows: Tensor) -> Nested:
        return Nested(tuple(self.parts[row] for row in rows.tolist()), self.layout)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Nested:
        return Nested(tuple(map(change, self.parts)), self.layout)

    def arguments(self) -> Tensor:
        return torch.nested.as_nested_tensor(list(self.parts), layout=self.layout)


def tensors_of(samples: SampleSet) -> list[Tensor]:
    """Return every tensor of a set of samples."""
    tensors: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    samples.changed(keep)
    return tensors


def standard(leaf: Any) -> Any:
    """Return a packed sequence or a nested tensor as a sample set; other leaves as they are."""
    if isinstance(leaf, PackedSequence):
        return Packed.of(leaf)
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return Nested(tuple(leaf.unbind()), leaf.layout)
    return leaf


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A loader whose items are unpacked by a function; made by ``unpacked``."""

    loader: Iterable[Any]
    unpack: Callable[[Any], tuple[Any, Any]]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(self.unpack, iter(self.loader))

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


def unpacked(loader: Iterable[Any], unpack: Callable[[Any], tuple[Any, Any]]) -> Unpacked:
    """Return a loader whose batches are what ``unpack`` makes of each item: ``(inputs, targets)``.

    Args:
        loader: Anything that can be iterated again and again.
        unpack: Takes one item of the loader.

    >>> from torch import nn
    >>> import lapwing as lw
    >>> items = [{"pixels": torch.randn(4, 3), "answer": torch.randn(4, 2), "id": [1, 2, 3, 4]}]
    >>> loader = lw.samples.unpacked(items, lambda item: (item["pixels"], item["answer"]))
    >>> lw.fit(nn.Linear(3, 2), loader, lw.Gaussian(0.1), prior=1.0).network.selection.size
    8
    """
    return Unpacked(loader, unpack)
