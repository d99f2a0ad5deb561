"""Parts of a data set for several processes: a sampler that neither repeats nor drops data, and what samplers say."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from lapwing.core.processes import Processes
from lapwing.core.settings import FLAG, Rule, require_integer
from lapwing.errors import DataError


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

    def __init__(self, dataset: Sized, process_group: Any, shuffle: bool = False, seed: int = 0) -> None:
        Rule("a data set with a length", lambda v: len(v) >= 0).check("dataset", dataset)
        FLAG.check("shuffle", shuffle)
        require_integer("seed", seed, least=0)
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


def _samplers(source: Any) -> Iterator[Part | DistributedSampler[Any]]:
    """Yield the samplers of a loader that give parts."""
    source = getattr(source, "loader", source)  # of lw.samples.unpacked
    batches = getattr(source, "batch_sampler", None)
    for sampler in (getattr(source, "sampler", None), batches, getattr(batches, "sampler", None)):
        if isinstance(sampler, Part | DistributedSampler):
            yield sampler


def share_of(source: Any, name: str = "data") -> Share | None:
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


def next_epoch(source: Any, epoch: int) -> None:
    """Tell the sampler of a loader the number of the epoch, as PyTorch asks for one that shuffles parts."""
    for sampler in _samplers(source):
        sampler.set_epoch(epoch)


def refuse_copies(marks: Sequence[Any], name: str, same: Callable[[Any, Any], bool] = operator.eq) -> None:
    """Raise if two processes have the same mark of their data; None stands for no mark."""
    known = [(rank, mark) for rank, mark in enumerate(marks) if mark is not None]
    for (one, first), (other, second) in combinations(known, 2):
        if same(first, second):
            raise DataError(
                f"{name}: processes {one} and {other} read the same rows, which would count twice; expected a part for "
                "each process. Give the Dataset itself, or a loader with "
                "sampler=lw.samples.Part(dataset, process_group), or cut a list: batches[rank::size]."
            )
