"""The only data loop: it unpacks batches, checks them, moves them to the device, counts them and shows progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lapwing.core.batches import Batch, digest
from lapwing.core.inputs import SampleRows, check_finite, moved, placed, take, tensors_in
from lapwing.core.interrupts import at_once
from lapwing.core.known_rows import RowSketch, Sketching
from lapwing.core.parts import Share, refuse_copies, share_of
from lapwing.core.processes import ALONE, Processes
from lapwing.core.progress import ProgressBar
from lapwing.core.random import Stream, undisturbed
from lapwing.core.reading import Reading, Readings
from lapwing.core.settings import KEY
from lapwing.core.sources import as_source, batch_of
from lapwing.core.weights import checked_weights
from lapwing.errors import DataError, UnsupportedError

LOOKED = 3  # batches that are looked at for one with several samples


def read(source: Iterable[Any], drawing: Callable[[], AbstractContextManager[None]]) -> Iterator[Any]:
    """Yield what the source yields. Ctrl-C is raised at once while it is read, which may take any time."""
    ended = object()
    with drawing(), at_once():
        items = iter(source)
    while True:
        with drawing(), at_once():
            item = next(items, ended)
        if item is ended:
            return
        yield item


@dataclass(frozen=True, eq=False)
class Data:
    """Re-iterable batches on one device, checked as they pass.

    ``source`` is a DataLoader, a list of ``(inputs, targets)``, a list of mappings that hold their target
    under ``target_key``, one ``(inputs, targets)`` pair, or a Dataset of single samples; see ``core/sources.py``. With
    several processes it is the part of this one; a Dataset is the whole, of which each process reads its part.
    """

    source: Iterable[Any]
    device: torch.device
    target_key: str | None = None
    progress: bool = False
    name: str = "data"  # in messages
    same_rows: bool = False  # whether every pass must give the rows of the first one, in any order
    readings: Readings = field(default_factory=Readings, repr=False)
    stream: Stream | None = None  # the random numbers that the source draws, if not from the global generators as is
    processes: Processes = ALONE  # those that read the other parts
    arranged: Callable[[Batch], Batch] | None = None  # applied to every batch, see ``Network.arranging``
    dtype: torch.dtype | None = None  # of the tensors that arrays of inputs become; None refuses arrays
    sketched: bool = False  # whether the first complete pass leaves a sketch of its rows in ``readings``

    def __post_init__(self) -> None:
        KEY.check("target_key", self.target_key)
        object.__setattr__(self, "source", as_source(self.source, self.name, self.processes, self.dtype))
        if self.share is not None and not self.processes.alone:
            self.share.refuse_other(self.processes, self.name)

    @cached_property
    def share(self) -> Share | None:
        """What the sampler of the source says about the part that it gives, if it says anything."""
        return None if self.in_memory else share_of(self.source, self.name)

    def beside(self, source: Iterable[Any], name: str) -> Data:
        """Return other data, read in the same way and by the same processes."""
        return Data(
            source, self.device, self.target_key, self.progress, name, processes=self.processes, dtype=self.dtype,
            sketched=self.sketched,
        )  # fmt: skip

    def sketch(self) -> RowSketch | None:
        """Return the sketch of the rows of all processes; None if they cannot be compared. Read the data if needed."""
        if self.readings.sketching is None:
            for _ in replace(self, sketched=True, arranged=None).batches("", weighted=True):
                pass
        assert self.readings.sketching is not None
        sketch = self.readings.sketching.value()
        if not self.processes.all(sketch is not None):
            return None
        return None if sketch is None else sketch.everywhere(self.processes)

    @property
    def weighted(self) -> bool:
        """Whether a batch that was read had weights."""
        return self.readings.weighted

    @property
    def in_memory(self) -> bool:
        """Whether the source is a list or tuple, the same at every pass, and not a loader."""
        return isinstance(self.source, list | tuple)

    def batches(self, label: str, weighted: bool = False) -> Iterator[Batch]:
        """Yield the batches in order, with a bar if ``progress`` is set, the label not empty and tqdm installed.

        Data with weights are refused unless the caller is ``weighted``: it uses them, or needs none.
        """
        reading = None if self.in_memory else Reading()
        sketching = Sketching() if self.sketched and self.readings.sketching is None else None
        rows, share = 0, self.share
        items = ProgressBar(self.source, label, visible=True) if self.progress and label else self.source
        for position, item in enumerate(self._read(items)):
            batch = batch_of(item, self.target_key, self.dtype)
            if batch.targets.numel() == 0 and any(t.numel() == 0 for t in tensors_in(batch.inputs)):
                continue  # a sampler or a filter may leave a batch without rows
            batch = self._checked(batch, position)
            if batch.weights is not None:
                self._note_weights(weighted, label)
            if share is not None and share.rows is not None and rows + batch.n_samples > share.rows:
                batch = self._without_repeated(batch, rows, share)
                if not batch.n_samples:
                    continue
            rows += batch.n_samples
            if sketching is not None:
                sketching.add(batch.inputs, batch.targets, batch.n_samples)
            if reading is not None:
                leaves = (leaf for _, leaf in placed(batch.inputs) if isinstance(leaf, Tensor))
                tensors = (*leaves, batch.targets, batch.weights)
                reading.add((t for t in tensors if t is not None), batch.n_samples)
                self._refuse_more(reading)
            yield self._in_form(batch, position)
        if not rows and self.processes.alone:
            raise DataError(
                f"{self.name} is empty: no batch was yielded; expected at least one with rows, (inputs, targets)."
            )
        if sketching is not None:
            self.readings.sketching = sketching
        if reading is not None:
            self.readings.add(reading)
            self._refuse_other()

    def _note_weights(self, weighted: bool, label: str) -> None:
        """Remember that there are weights; raise if the caller does not take them."""
        self.readings.weighted = True
        if not weighted:
            raise UnsupportedError(
                f"the {self.name} have weights, which are not taken here ({label}); expected data without weights. "
                "Weights are taken by Full, Diagonal, Kron, EKron, LowRank, KernelSpace and Sampled, by the evidence, "
                "Budget and Integrate, and by train and updated; for others repeat the samples with a large weight."
            )

    def _in_form(self, batch: Batch, position: int) -> Batch:
        """Return the batch as ``arranged`` makes it; an error says which one it was."""
        try:
            return batch if self.arranged is None else self.arranged(batch)
        except DataError as error:
            raise DataError(f"{self._where(position)}: {error}") from error

    def _where(self, position: int) -> str:
        return f"batch {position}" if self.name == "data" else f"batch {position} of {self.name}"

    def _without_repeated(self, batch: Batch, before: int, share: Share) -> Batch:
        """Return the last batch of a pass without the data that a DistributedSampler repeats after its part."""
        assert share.rows is not None
        if before + batch.n_samples > share.rows + share.repeated:
            raise DataError(
                f"the DistributedSampler of the {self.name} gives {share.rows + share.repeated} data, the last of them "
                f"repeated, and the loader makes more samples of them; expected one of each. Use "
                "sampler=lw.samples.Part(dataset, process_group), which repeats none."
            )
        flags = SampleRows().per_sample(batch.inputs, batch.n_samples)
        rows = slice(share.rows - before)
        return Batch(take(batch.inputs, flags, rows), batch.targets[rows], batch.key, batch.weights_of(rows))

    def steady(self) -> Data:
        """Return the same data, refused from now on if a pass does not give the rows of the first one.

        For methods that compare numbers of several passes. A list in memory is the same at every pass.
        """
        data = self if self.in_memory else replace(self, same_rows=True)
        data._refuse_other()
        return data

    def repeats(self) -> bool:
        """Return whether two passes give the same rows, in any order; read a loader until two were complete."""
        while not self.in_memory and self.readings.passes < 2:
            for _ in self.batches("reading again", weighted=True):
                pass
        return not self.readings.difference

    @property
    def findings(self) -> tuple[str, ...]:
        """Remarks if passes gave different rows, for results that are sums over one pass or another, or too few."""
        return (*self._missing(), *self._changed())

    def _missing(self) -> tuple[str, ...]:
        share = self.share
        if share is not None and share.parts > self.processes.size:
            return (
                f"the sampler of the {self.name} gives one of {share.parts} parts, and this fit reads no other: give "
                "process_group=torch.distributed.group.WORLD to fit all of them.",
            )
        if share is not None and share.dropped:
            return (
                f"the DistributedSampler of the {self.name} drops {share.dropped} of them (drop_last=True), so no "
                "process reads these. Use sampler=lw.samples.Part(dataset, process_group).",
            )
        return ()

    def _changed(self) -> tuple[str, ...]:
        if not self.readings.difference:
            return ()
        return (
            f"a later pass over the {self.name} {self.readings.difference}: numbers that come from different passes "
            "(noise, bases, curvature) belong to different data. Use no random augmentation, and drop_last=False.",
        )

    def _refuse_more(self, reading: Reading) -> None:
        """Raise before rows beyond those of the first pass are used, if passes must agree."""
        first = self.readings.first
        if self.same_rows and first is not None and reading.rows > first.rows:
            self.readings.difference = f"gave more than the {first.rows} rows of the first one"
            self._refuse_other()

    def _refuse_other(self) -> None:
        if self.same_rows and self.readings.difference:
            raise DataError(
                f"a second reading of the {self.name} {self.readings.difference}; expected the same rows in any order. "
                "Use no random augmentation, and drop_last=False."
            )

    def _read(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield what the source yields, and draw its random numbers from the stream if there is one."""
        if self.in_memory:  # a list draws no random numbers
            return read(source, nullcontext)
        return read(source, undisturbed if self.stream is None else self.stream.drawing)

    def look(self) -> tuple[Batch, Batch]:
        """Return the first batch, and the first batch with several samples, if one of the first three has several.

        Otherwise both are the first batch. With one sample alone, nothing shows whether samples mix. The source is
        opened once, and not read further than needed. A process without data gets the batches of another one.

        Raises:
            DataError: If no process has data, or several have the same first batch: each must read its own part.

        >>> x = torch.arange(4.0)[:, None]
        >>> first, several = Data([(x[:1], x[:1]), (x[1:], x[1:])], torch.device("cpu")).look()
        >>> first.n_samples, several.n_samples
        (1, 3)
        """
        batches = list[Batch]()
        for batch in islice(self.batches("", weighted=True), LOOKED):
            batches.append(batch)
            if batch.n_samples > 1:
                break
        if not self.processes.alone:
            batches = self._lent(batches)
        return batches[0], batches[-1] if batches[-1].n_samples > 1 else batches[0]

    def refuse_same_parts(self) -> None:
        """Raise if two processes have read the same rows, in whatever order; asked after passes until one is complete.

        A loader that shuffles shows it only then.
        """
        if self.processes.alone or self.readings.compared:
            return
        first = None if self.share is not None else self.readings.first
        complete = self.in_memory or self.readings.first is not None
        facts = self.processes.every((complete, None if first is None else first.mark()))
        self.readings.compared = all(each for each, _ in facts)
        refuse_copies([mark for _, mark in facts], self.name, lambda one, other: not one.difference(other))

    def _lent(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches; those of the first process that has data where this one has none.

        Raise if two processes have the same first batch: their data would count twice. A batch of one sample may be the
        same by chance, and a sampler that gives parts is known to give others.
        """
        known = self.share is not None or not batches or batches[0].n_samples < 2
        facts = self.processes.every((bool(batches), None if known else digest(batches[0])))
        refuse_copies([mark for _, mark in facts], self.name)
        if all(has for has, _ in facts):
            return batches
        lent = self.processes.lent([batch.to(torch.device("cpu")) for batch in batches] or None)
        if lent is None:
            raise DataError(
                f"{self.name} is empty in all processes: no batch was yielded; expected at least one with rows, "
                "(inputs, targets)."
            )
        return batches or [batch.to(self.device) for batch in lent]

    def _checked(self, batch: Batch, position: int) -> Batch:
        if batch.targets.is_complex():
            raise DataError(f"targets are {batch.targets.dtype}; expected real numbers. Give real and imaginary parts.")
        move = lambda t: (t.detach() if t.requires_grad else t).to(self.device, non_blocking=True)
        inputs, targets = moved(batch.inputs, move), moved(batch.targets, move)
        where = self._where(position)
        check_finite(inputs, f"inputs of {where}")
        check_finite(targets, f"targets of {where}")
        weights = None
        if batch.weights is not None:
            weights = checked_weights(batch.weights, batch.n_samples, self.device, where)
        return Batch(inputs, targets, batch.key, weights)
