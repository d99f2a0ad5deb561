"""Some of the training data, drawn without regard to how they came in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Batch, Data, Inputs, batch_size, map_tensors, tensors_in
from lapwing.core.random import uniform
from lapwing.errors import DataError

KEPT = 2**28  # bytes of a loader's data that are kept to draw rows from


@dataclass(frozen=True, eq=False)
class Pool:
    """Rows of the data: inputs (N, ...), targets (N, ...), and how many there were in all.

    ``shared`` tells which tensors of the inputs have no row for each sample (a context for all of them).
    """

    inputs: Inputs
    targets: Tensor
    total: int
    shared: tuple[bool, ...]

    @classmethod
    def drawn(cls, data: Data, most: int, generator: torch.Generator | None = None) -> Pool:
        """At most so many rows, without replacement and in their order; all of them where there are no more.

        Two passes over the data, none through the network. The same rows whatever the batch size.
        """
        total = 0
        shared: tuple[bool, ...] = ()
        for batch in data.batches("counting"):
            found = uncut(batch)
            total += len(batch.targets)
            shared = either(shared, found)
        order = uniform((total,), generator, torch.empty(0, dtype=torch.float64)).argsort()
        chosen = order[:most].sort().values
        inputs: list[Inputs] = []
        targets: list[Tensor] = []
        start = 0
        for batch in data.batches("choosing"):
            size = len(batch.targets)
            if targets and batch.targets.shape[1:] != targets[0].shape[1:]:
                shapes = f"{tuple(targets[0].shape[1:])} and {tuple(batch.targets.shape[1:])}"
                raise DataError(f"targets of shapes {shapes} in two batches; expected one shape.")
            mine = chosen[(chosen >= start) & (chosen < start + size)] - start
            if len(mine):
                rows = mine.to(batch.targets.device)
                inputs.append(cut(batch.inputs, rows, shared))
                targets.append(batch.targets[rows])
            start += size
        return cls(joined(inputs, shared), torch.cat(targets), total, shared)

    def __len__(self) -> int:
        return len(self.targets)

    def rows(self, index: Tensor) -> Inputs:
        """The inputs with these numbers, which may repeat."""
        return cut(self.inputs, index.to(self.targets.device), self.shared)


def uncut(batch: Batch) -> tuple[bool, ...]:
    """For each tensor of the inputs, whether it has no row for each sample; refused where none has."""
    size = len(batch.targets) if batch.targets.ndim else 1
    found = tuple(t.ndim == 0 or t.shape[0] != size for t in tensors_in(batch.inputs))
    if all(found) or not batch.targets.ndim:
        raise DataError(f"{batch_size(batch.inputs)} inputs with {size} targets; expected one target for each.")
    return found


def either(one: tuple[bool, ...], other: tuple[bool, ...]) -> tuple[bool, ...]:
    """What is shared in one batch is shared in all: in others it may have as many rows as the batch by chance."""
    if one and len(one) != len(other):
        raise DataError(f"batches of {len(one)} and of {len(other)} input tensors; expected as many in all of them.")
    return tuple(a or b for a, b in zip(one, other, strict=True)) if one else other


def cut(inputs: Inputs, rows: Tensor, shared: Sequence[bool]) -> Inputs:
    """These rows of all tensors but the shared ones."""
    flags = iter(shared)
    return map_tensors(inputs, lambda t: t if next(flags) else t[rows.to(t.device)])


def joined(inputs: list[Inputs], shared: Sequence[bool] = ()) -> Inputs:
    """Batches of inputs of one form as one; of what all samples share, one copy."""
    if any(_form(one) != _form(inputs[0]) for one in inputs):
        raise DataError("batches of inputs with different keys or nestings; expected the same in all, in one order.")
    columns = list(zip(*(tensors_in(one) for one in inputs), strict=True))
    flags = shared or (False,) * len(columns)
    found = iter([_same(parts) if flag else _stacked(parts) for parts, flag in zip(columns, flags, strict=True)])
    return map_tensors(inputs[0], lambda _: next(found))


def _stacked(parts: tuple[Tensor, ...]) -> Tensor:
    if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise DataError(
            "inputs of different shapes (padded text, images of several sizes) cannot be put into one batch of "
            "inducing points; expected one shape. Pad all batches alike."
        )
    return torch.cat(parts)


def _same(parts: tuple[Tensor, ...]) -> Tensor:
    first = parts[0]
    if not all(_equal(part, first) for part in parts):
        raise DataError(
            f"a tensor of the inputs of shape {tuple(first.shape)} has no row for each sample, and is not the same in "
            "all batches; inducing points from several batches cannot share it. Expected one for all data, or a row "
            "for each sample: expand it along the first dimension."
        )
    return first


def shuffled(
    data: Data, size: int, generator: torch.Generator, kept: int = KEPT, fresh: bool = False
) -> Iterator[Batch]:
    """Batches of about ``size`` rows without end, each a random part of the data however those are cut and ordered.

    Rows are drawn from all data that are a list in memory or take at most ``kept`` bytes; of others from as many
    consecutive batches as do, which should come in random order. Batches whose rows do not fit together (text padded
    to several lengths) are cut and never joined. Fewer than half of ``size`` rows that a pass has left over wait for
    the next: they would stand for all data in a step. ``fresh``: a loader is read again for every pass, and may draw
    anew what it gives (augmentation).
    """
    again = fresh and not isinstance(data.source, list | tuple)
    while True:
        blocks = 0
        for block in _blocks(data, kept):
            yield from block.passed(size, generator, data.device)
            blocks += 1
        while blocks == 1 and not again:  # all of them: they need not be read again
            yield from block.passed(size, generator, data.device)


def _blocks(data: Data, kept: int) -> Iterator[Block]:
    """Consecutive batches that fit, of at most so many bytes; a list, which is in memory already, has no limit."""
    listed = isinstance(data.source, list | tuple)
    home = next((t.device for t in tensors_in(data.source)), data.device) if listed else data.device
    held: list[Batch] = []
    taken = 0
    shared: tuple[bool, ...] = ()  # of all batches so far: one alone may have as many rows as a context by chance
    for batch in Data(data.source, home, data.target_key).batches("batches"):
        more = sum(t.numel() * t.element_size() for t in (*tensors_in(batch.inputs), batch.targets))
        fits = not held or _fits(held[-1], batch, shared)
        if held and ((taken + more > kept and not listed) or not fits):
            yield Block.of(held, shared, copied=taken <= kept)
            held, taken = [], 0
        held.append(batch)
        taken += more
        shared = _alike(shared, uncut(batch))
    yield Block.of(held, shared, copied=taken <= kept)


def _alike(shared: tuple[bool, ...], found: tuple[bool, ...]) -> tuple[bool, ...]:
    """What is shared so far; batches of another form, which are never joined, begin anew."""
    return either(shared, found) if len(shared) == len(found) else found


def _fits(one: Batch, other: Batch, shared: tuple[bool, ...]) -> bool:
    """Whether their rows can be in one batch."""
    if _form(one.inputs) != _form(other.inputs) or one.targets.shape[1:] != other.targets.shape[1:]:
        return False
    pairs = zip(tensors_in(one.inputs), tensors_in(other.inputs), strict=True)
    flags = either(_alike(shared, uncut(one)), uncut(other))
    return all(_equal(a, b) if flag else a.shape[1:] == b.shape[1:] for (a, b), flag in zip(pairs, flags, strict=True))


def _form(tree: Inputs) -> Any:
    """The nesting without its tensors."""
    if isinstance(tree, Mapping):
        return tuple((key, _form(value)) for key, value in tree.items())
    return tuple(_form(value) for value in tree) if isinstance(tree, tuple | list) else isinstance(tree, Tensor)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)


@dataclass(frozen=True, eq=False)
class Block:
    """Batches whose rows are numbered through."""

    batches: list[Batch]
    ends: Tensor
    shared: tuple[bool, ...]

    @classmethod
    def of(cls, batches: list[Batch], shared: tuple[bool, ...], copied: bool) -> Block:
        """``copied`` into one batch where they are small: rows of many are gathered one by one."""
        if copied and len(batches) > 1:
            inputs, targets = [batch.inputs for batch in batches], tuple(batch.targets for batch in batches)
            batches = [Batch(joined(inputs, shared), _stacked(targets))]
        return cls(batches, torch.tensor(list(accumulate(len(batch.targets) for batch in batches))), shared)

    def passed(self, size: int, generator: torch.Generator, device: torch.device) -> Iterator[Batch]:
        """The rows in random order, in batches."""
        count = int(self.ends[-1])
        draws = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float32)
        for rows in draws.argsort().cpu().split(size):
            if 2 * len(rows) >= min(size, count):
                yield self.rows(rows, device)

    def rows(self, index: Tensor, device: torch.device) -> Batch:
        """Those with these numbers, in their order; no others are touched."""
        where = torch.bucketize(index, self.ends, right=True)
        inputs, targets, places = [], [], []
        for number in where.unique().tolist():
            batch, mine = self.batches[number], (where == number).nonzero()[:, 0]
            rows = index[mine] - (int(self.ends[number - 1]) if number else 0)
            inputs.append(cut(batch.inputs, rows, self.shared))
            targets.append(batch.targets[rows.to(batch.targets.device)])
            places.append(mine)
        order = torch.cat(places).argsort()
        found = Batch(cut(joined(inputs, self.shared), order, self.shared), _stacked(tuple(targets)))
        move = lambda t: t.to(device, non_blocking=True)
        return Batch(map_tensors(found.inputs, move), move(found.targets[order.to(found.targets.device)]))


def class_labels(targets: Tensor, outputs: int) -> Tensor | None:
    """Class numbers, where the targets are some."""
    flat = targets.squeeze(-1) if targets.ndim == 2 and targets.shape[1] == 1 else targets
    if flat.is_floating_point() or flat.ndim != 1 or outputs < 2:
        return None
    return flat.long().clamp(0, outputs - 1)
