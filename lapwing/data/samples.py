"""Samples of a data set: the part of each process, their weights, and inputs whose samples are not rows of tensors.

Graphs, sequences of several lengths, and one sample of many tokens are a ``SampleSet``. ``data/inputs.py`` takes a set
as one leaf of the inputs: it asks the set how many samples there are, and for some of them. ``Part`` is the sampler of
a loader for several processes, ``weighted`` gives samples weights.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from lapwing.data.processes import Processes
from lapwing.errors import DataError
from lapwing.runtime.settings import DATA, FLAG, KEY, Rule, describe, integer, is_array

__all__ = ["OneSample", "Part", "SampleSet", "Weighted", "unpacked", "weighted"]


T = TypeVar("T")
Loader = Iterable[object]  # yields batches in any form that a user has
TARGET_KEYS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True, eq=False)
class Weighted:
    """Targets with a weight for each sample, in the place of targets in a batch: ``(inputs, Weighted(y, w))``.

    A weight of 2 counts a sample twice, a weight of 0 leaves it out; weights need not be whole numbers, and their scale
    matters: with a mean of one the data count as often as without weights. All tokens or pixels of a sample have its
    weight.

    Args:
        targets: The targets of a batch, as they would be without weights.
        weights: Numbers that are not negative, one for each sample, (B,).

    >>> import lapwing as lw
    >>> x, net = torch.linspace(-1, 1, 4).unsqueeze(1), torch.nn.Linear(1, 1)
    >>> weights = torch.tensor([2.0, 1.0, 1.0, 0.0])
    >>> lw.fit(net, [(x, lw.samples.Weighted(x, weights))], lw.Gaussian(0.1), prior=1.0).base.statistics.data
    4
    """

    targets: Any
    weights: Any


@dataclass(frozen=True, eq=False)
class WeightedBatches:
    """A loader whose items hold weights; made by ``weighted``."""

    loader: Loader
    key: str
    target_key: str | None

    def __iter__(self) -> Iterator[Any]:
        return map(self._item, iter(self.loader))

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def _item(self, item: Any) -> Any:
        """Return the batch with its weights beside the targets."""
        if isinstance(item, Mapping):
            if self.key not in item:
                raise DataError(
                    f"a batch with the keys {sorted(map(str, item))} has no weights under {self.key!r}; say where they "
                    "are: lw.samples.weighted(loader, key=...)."
                )
            name = target_name(item, self.target_key)
            rest = {key: value for key, value in item.items() if key != self.key}
            return {**rest, name: Weighted(item[name], item[self.key])}
        if isinstance(item, tuple | list) and len(item) == 3:
            return item[0], Weighted(item[1], item[2])
        what = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise DataError(
            f"a batch is a {what}; expected (inputs, targets, weights), or a mapping with {self.key!r}. Other items "
            "are unpacked by a function of yours: lw.samples.unpacked(loader, lambda item: (inputs, "
            "lw.samples.Weighted(targets, weights)))."
        )


def weighted(data: Loader, key: str = "weights", target_key: str | None = None) -> Loader:
    """Return data whose batches hold a weight for each sample, for ``fit``, ``train`` and ``updated``.

    A sample of weight w counts w times: in the loss, the curvature, the evidence, the number of data and the noise that
    is estimated from them.

    Args:
        data: A loader or a list with batches ``(inputs, targets, weights)`` or mappings, or one such batch of three
            tensors or arrays. Weights are (B,), finite and not negative.
        key: The key of the weights in batches that are mappings.
        target_key: The key of the targets in these, as for ``fit``.

    Raises:
        DataError: If the data are not batches; while they are read, if a batch has no weights.

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 6).unsqueeze(1)
    >>> loader = DataLoader(TensorDataset(x, x.sin(), torch.tensor([1.0, 1, 1, 3, 3, 3])), batch_size=4)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), lw.samples.weighted(loader), lw.Gaussian(0.1), prior=1.0)
    >>> posterior.base.statistics.data
    12
    """
    DATA.check("data", data)
    KEY.check("key", key)
    KEY.check("target_key", target_key)
    if isinstance(data, tuple) and len(data) == 3 and is_array(data[1]):
        return data[0], Weighted(data[1], data[2])
    if not hasattr(data, "__iter__"):
        raise DataError(
            f"data is a {type(data).__name__} of single samples; expected batches. Wrap it in a DataLoader first."
        )
    if hasattr(data, "__next__"):
        raise DataError("data is a one-shot iterator; expected a DataLoader or a list, which is read several times.")
    batches = WeightedBatches(data, key, target_key)
    return list(batches) if isinstance(data, list) else batches  # a list is the same at every pass


def target_name(item: Mapping[str, Any], target_key: str | None) -> str:
    """Return the key of the targets in a batch that is a mapping; raise if there is none."""
    keys = [target_key] if target_key else [key for key in TARGET_KEYS if key in item]
    if not keys or keys[0] not in item:
        raise DataError(
            f"a batch with the keys {sorted(map(str, item))} has no target; "
            f"pass target_key=..., or use one of {', '.join(TARGET_KEYS)}."
        )
    return keys[0]


def as_weights(given: object, n_samples: int, device: torch.device, where: str) -> Tensor:
    """Return the weights (B,) in float64; raise unless they are ``n_samples`` weights."""
    try:
        weights = torch.as_tensor(given).detach().to(device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the weights of {where} are {describe(given)}; expected a tensor (B,).") from error
    if tuple(weights.shape) != (n_samples,) or weights.is_complex():
        raise DataError(
            f"the weights of {where} are {describe(weights)} for {n_samples} samples; expected a real number for each "
            "sample, (B,). Tokens and pixels have the weight of their sample: mark those that do not count by "
            "ignore_index."
        )
    weights = weights.double()
    if not bool(((weights >= 0) & weights.isfinite()).all()):
        raise DataError(
            f"the weights of {where} run from {float(weights.min()):g} to {float(weights.max()):g}; expected "
            "finite numbers from zero."
        )
    return weights


class Part(Sampler[int]):
    """The part of a data set that this process reads: consecutive rows, every datum in one process exactly once.

    In contrast to ``torch.utils.data.DistributedSampler`` no datum is repeated or dropped to make the parts equal:
    their sizes differ by at most one, and with fewer data than processes some are empty. Without ``shuffle`` the parts
    of all processes, one after another, are the data set in its order.

    Args:
        dataset: The whole data set, the same in all processes.
        process_group: The group of ``torch.distributed``; None is this process alone.
        shuffle: Whether to draw the rows of all parts anew in every epoch; ``set_epoch`` changes the order, and
            ``lw.train`` calls it.
        seed: The seed of the order, the same in all processes.

    Raises:
        UnsupportedError: If the data set has no length, or a setting is out of range.

    >>> import lapwing as lw
    >>> data = torch.utils.data.TensorDataset(torch.arange(5.0))
    >>> list(lw.samples.Part(data, process_group=None))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, dataset: Sized, process_group: object, shuffle: bool = False, seed: int = 0) -> None:
        Rule("a data set with a length", lambda v: len(v) >= 0).check("dataset", dataset)
        FLAG.check("shuffle", shuffle)
        integer(0).check("seed", seed)
        processes = Processes.of(process_group)
        self.rank, self.parts, self.total = processes.rank, processes.size, len(dataset)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    @property
    def rows(self) -> range:
        """The positions of this part in the order of all data."""
        return range(self.total * self.rank // self.parts, self.total * (self.rank + 1) // self.parts)

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(self.rows)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.total, generator=generator).tolist()
        return iter(order[self.rows.start : self.rows.stop])

    def __len__(self) -> int:
        return len(self.rows)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, which decides on the order if the data are shuffled."""
        self.epoch = epoch


@dataclass(frozen=True)
class Share:
    """What the sampler of a loader says about the part of the data that it gives."""

    number: int  # of the part
    parts: int
    rows: int | None = None  # data that are its own, if the sampler repeats some after them
    repeated: int = 0  # data after those
    dropped: int = 0  # data of the whole set that no process reads
    mixed: bool = False  # whether consecutive data are in different parts

    def refuse_other(self, processes: Processes, name: str) -> None:
        """Raise unless this is the part of this process."""
        if (self.number, self.parts) != (processes.rank, processes.size):
            raise DataError(
                f"the sampler of the {name} gives part {self.number} of {self.parts}, and this is process "
                f"{processes.rank} of {processes.size}; expected its own part. Build the loader with "
                "sampler=lw.samples.Part(dataset, process_group)."
            )

    def refuse_order(self, name: str) -> None:
        """Raise if the parts, one after another, are not the data in their order."""
        if self.mixed:
            raise DataError(
                f"the sampler of the {name} deals the data out to the processes or shuffles them, so its parts, one "
                "after another, are in another order; expected sampler=lw.samples.Part(dataset, process_group)."
            )


def _samplers(source: object) -> Iterator[Part | DistributedSampler[Any]]:
    """Yield the samplers of a loader that give parts."""
    source = getattr(source, "loader", source)  # of lw.samples.unpacked
    batches = getattr(source, "batch_sampler", None)
    for sampler in (getattr(source, "sampler", None), batches, getattr(batches, "sampler", None)):
        if isinstance(sampler, Part | DistributedSampler):
            yield sampler


def share_of(source: object, name: str = "data") -> Share | None:
    """Return the part that a loader gives, or None if its sampler does not say; raise if a repeated row is not last."""
    sampler = next(_samplers(source), None)
    if isinstance(sampler, Part):
        return Share(sampler.rank, sampler.parts, mixed=sampler.shuffle)
    if not isinstance(sampler, DistributedSampler):
        return None
    total, parts = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]
    if sampler.drop_last:
        return Share(sampler.rank, parts, dropped=total - sampler.total_size, mixed=True)
    rows = len(range(sampler.rank, total, parts))
    if rows == sampler.num_samples:
        return Share(sampler.rank, parts, mixed=True)
    source = getattr(source, "loader", source)
    if type(getattr(source, "batch_sampler", None)) is not BatchSampler or not getattr(source, "in_order", True):
        raise DataError(
            f"the DistributedSampler of the {name} repeats data to make {parts} equal parts of {total}, and its "
            "batches come in another order, so the repeated ones cannot be left out. Use "
            "sampler=lw.samples.Part(dataset, process_group), which repeats none."
        )
    return Share(sampler.rank, parts, rows, sampler.num_samples - rows, mixed=True)


def next_epoch(source: object, epoch: int) -> None:
    """Tell the sampler of a loader the number of the epoch, as PyTorch asks for one that shuffles parts."""
    for sampler in _samplers(source):
        sampler.set_epoch(epoch)


def refuse_copies(marks: Sequence[T | None], name: str, same: Callable[[T, T], bool] = operator.eq) -> None:
    """Raise if two processes have the same mark of their data; None stands for no mark."""
    known = [(rank, mark) for rank, mark in enumerate(marks) if mark is not None]
    for (one, first), (other, second) in combinations(known, 2):
        if same(first, second):
            raise DataError(
                f"{name}: processes {one} and {other} read the same rows, which would count twice; expected a part for "
                "each process. Give the Dataset itself, or a loader with "
                "sampler=lw.samples.Part(dataset, process_group), or cut a list: batches[rank::size]."
            )


class SampleSet(ABC):
    """Inputs that say themselves how many samples they hold, how some are taken, and what the model is called with.

    A class inherits from it and defines the first four members. ``docs/howto/graphs.md`` has examples.

    >>> class Sets(SampleSet):  # sets of numbers; the model takes their sums
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


def to_sample_set(leaf: Any) -> Any:
    """Return a packed sequence or a nested tensor as a sample set. Return other leaves unchanged."""
    if isinstance(leaf, PackedSequence):
        return Packed.of(leaf)
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return Nested(tuple(leaf.unbind()), leaf.layout)
    return leaf


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A loader whose items are unpacked by a function; made by ``unpacked``."""

    loader: Loader
    unpack: Callable[[Any], tuple[Any, Any]]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(self.unpack, iter(self.loader))

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


def unpacked(loader: Loader, unpack: Callable[[Any], tuple[Any, Any]]) -> Unpacked:
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
