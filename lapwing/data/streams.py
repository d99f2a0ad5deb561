"""Inputs for predictions (one batch, or a loader with or without targets); rows of the training data drawn at random.

What is a batch of inputs and what is a loader is decided here. A tensor, a mapping, a tuple and a set of samples are
inputs. Everything else that has parts is a loader: a DataLoader, a Dataset, a generator, a list of batches. A list is
one batch of inputs only if the network was fitted to inputs in that form. The same form says which part of an item
``(a, b)`` is the inputs: both, if the network takes two; otherwise the first, and the second are targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lapwing.data.batches import TARGET_KEYS, Data, Loader, dataset_loader, is_dataset, read_items
from lapwing.data.inputs import (
    LEAVES,
    Batch,
    Inputs,
    Leaf,
    SampleRows,
    as_tensors,
    check_finite,
    has_places,
    is_numbers,
    map_leaves,
    map_tensors,
    merge_batches,
    move_inputs,
    n_rows,
    named_leaves,
    per_sample_in_both,
    place_name,
    take,
    tensors_in,
)
from lapwing.data.processes import ALONE, Processes, share_of
from lapwing.errors import DataError
from lapwing.runtime.settings import KEY, describe_kind
from lapwing.runtime.threads import ProgressBar, undisturbed, uniform

KEYS_AT_ONCE = 2**16  # random keys that are drawn at a time
KEPT_BYTES = 2**28  # bytes of a loader's data that are kept to draw rows from: with fewer, other rows would be drawn


@dataclass(frozen=True, eq=False)
class DrawnRows:
    """Rows of the data: inputs (N, ...), targets (N, ...), and how many rows the data have in all.

    ``per_sample`` says which tensors of the inputs have a row for each sample; all samples share the others.
    """

    inputs: Inputs
    targets: Tensor
    total: int
    per_sample: tuple[bool, ...]

    @classmethod
    def draw(cls, data: Data, most: int, generator: torch.Generator | None = None) -> DrawnRows:
        """Draw at most ``most`` rows without replacement, and keep them in the order of the data.

        Two passes over the data, none through the network. The rows do not depend on the batch size. Memory: the rows
        that are drawn, and those of one batch.
        """
        own = 0
        per_sample: tuple[bool, ...] = ()
        for batch in data.batches("counting"):
            per_sample = per_sample_in_both(per_sample, row_per_sample(batch))
            own += batch.n_samples
        start, total = data.processes.offset_and_total(own)
        per_sample = reduce(per_sample_in_both, filter(None, data.processes.gather_values(per_sample)), ())
        chosen = draw_numbers(total, most, generator)
        inputs: list[Inputs] = []
        targets: list[Tensor] = []
        for batch in data.batches("choosing"):
            size = batch.n_samples
            if targets and batch.targets.shape[1:] != targets[0].shape[1:]:
                shapes = f"{tuple(targets[0].shape[1:])} and {tuple(batch.targets.shape[1:])}"
                raise DataError(f"targets of shapes {shapes} in two batches; expected one shape.")
            rows = (chosen[(chosen >= start) & (chosen < start + size)] - start).to(batch.targets.device)
            if len(rows):
                inputs.append(take(batch.inputs, per_sample, rows))
                targets.append(batch.targets[rows])
            start += size
        inputs, targets = _gather_batches(inputs, targets, data)
        return cls(concat_inputs(inputs, per_sample), torch.cat(targets), total, per_sample)

    def __len__(self) -> int:
        return len(self.targets)

    def rows(self, index: Tensor) -> Inputs:
        """Return the inputs with these numbers, which may repeat."""
        return take(self.inputs, self.per_sample, index.to(self.targets.device))


def draw_numbers(total: int, most: int, generator: torch.Generator | None) -> Tensor:
    """Draw at most ``most`` of the numbers below ``total`` without replacement, and return them in increasing order.

    Every number gets a random key, and the smallest keys win. Keys are drawn in pieces, so memory does not grow with
    ``total``.
    """
    keys, numbers = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.long)
    for start in range(0, total, KEYS_AT_ONCE):
        new = torch.arange(start, min(start + KEYS_AT_ONCE, total))
        keys = torch.cat([keys, uniform((len(new),), generator, keys)])
        numbers = torch.cat([numbers, new])
        if len(keys) > most:
            keys, kept = keys.topk(most, largest=False)
            numbers = numbers[kept]
    return numbers.sort().values


def _gather_batches(inputs: list[Inputs], targets: list[Tensor], data: Data) -> tuple[list[Inputs], list[Tensor]]:
    """Return the batches of all processes, in their order."""
    if data.processes.group is None:
        return inputs, targets
    cpu = torch.device("cpu")
    own = [Batch(x, y).to(cpu) for x, y in zip(inputs, targets, strict=True)]
    everywhere = [batch.to(data.device) for part in data.processes.gather_values(own) for batch in part]
    return [batch.inputs for batch in everywhere], [batch.targets for batch in everywhere]


def row_per_sample(batch: Batch) -> tuple[bool, ...]:
    """Return for each tensor of the inputs whether it has a row for each target; raise if none has."""
    flags = SampleRows().per_sample(batch.inputs, batch.n_samples)
    if not any(flags) or not batch.targets.ndim:
        rows = next(filter(None, (n_rows(leaf) for _, leaf in named_leaves(batch.inputs))), 0)
        raise DataError(f"{rows} inputs with {batch.n_samples} targets; expected one target for each.")
    return flags


def concat_inputs(inputs: list[Inputs], per_sample: tuple[bool, ...] = ()) -> Inputs:
    """Return batches of inputs of one form as one batch, with one copy of what all samples share.

    Without ``per_sample``, every tensor has a row for each sample.
    """
    if any(_places(one) != _places(inputs[0]) for one in inputs):
        raise DataError("batches of inputs with different keys or nestings; expected the same in all, in one order.")
    columns = list(zip(*(_leaves(one) for one in inputs), strict=True))
    flags = per_sample or (True,) * len(columns)
    leaves = iter(
        [_concat_leaves(parts) if flag else _common_leaf(parts) for parts, flag in zip(columns, flags, strict=True)]
    )
    return map_leaves(inputs[0], lambda _: next(leaves))


def _leaves(inputs: Inputs) -> list[Leaf]:
    return [leaf for _, leaf in named_leaves(inputs)]


def _concat_leaves(parts: tuple[Any, ...]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if not all(isinstance(part, Tensor) for part in parts):
        raise DataError(
            f"samples of several batches of {type(parts[0]).__name__} cannot be put into one; expected tensors. Give "
            "all data in one batch, or use a method without inducing points."
        )
    if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise DataError(
            "inputs of different shapes (padded text, images of several sizes) cannot be put into one batch of "
            "inducing points; expected one shape. Pad all batches alike."
        )
    return torch.cat(parts)


def _common_leaf(parts: tuple[Any, ...]) -> Any:
    first = parts[0]
    if not all(_equal(part, first) for part in parts):
        raise DataError(
            f"a tensor of the inputs of shape {tuple(first.shape)} has no row for each sample, and is not the same in "
            "all batches; inducing points from several batches cannot share it. Expected one for all data, or a row "
            "for each sample: expand it along the first dimension."
        )
    return first


def steps_of_pass(data: Data, size: int) -> int:
    """Return how many batches of about ``size`` rows are one pass over the data, by a pass that counts their rows."""
    rows = sum(len(batch.targets) for batch in data.batches("counting"))
    return max(1, (2 * rows + size) // (2 * size))


def shuffle_batches(
    data: Data, size: int, generator: torch.Generator, kept: int = KEPT_BYTES, fresh: bool = False
) -> Iterator[Batch]:
    """Yield batches of about ``size`` rows without end, each a random part of the data.

    How the data are cut into batches, and their order, do not matter.

    Rows are drawn from all data if those are a list in memory or take at most ``kept`` bytes; otherwise from as many
    consecutive batches as fit into ``kept`` bytes, and the loader should then give its batches in random order.
    Batches whose rows do not fit together (text padded to several lengths) are cut and never joined. Fewer than half
    of ``size`` rows that are left at the end of a pass wait for the next pass: a step would take them for all data.
    With ``fresh``, a loader is read again for every pass, since it may give other rows each time (augmentation).
    """
    again = fresh and not data.in_memory
    while True:
        blocks = 0
        for block in _blocks(data, kept):
            yield from block.draw_batches(size, generator, data.device)
            blocks += 1
        while blocks == 1 and not again:  # one block holds all data: they need not be read again
            yield from block.draw_batches(size, generator, data.device)


def _blocks(data: Data, kept: int) -> Iterator[BatchBlock]:
    """Yield runs of consecutive batches that fit together, of at most ``kept`` bytes; a list in memory has no limit."""
    listed = data.in_memory
    home = next((t.device for t in tensors_in(data.source)), data.device) if listed else data.device
    waiting: list[Batch] = []
    taken = 0
    per_sample: tuple[bool, ...] = ()  # in all batches so far: one alone may have as many rows as a context by chance
    for batch in Data(data.source, home, data.target_key, arrange=data.arrange, dtype=data.dtype).batches("batches"):
        more = sum(t.numel() * t.element_size() for t in (*tensors_in(batch.inputs), batch.targets))
        flags = row_per_sample(batch)
        # Batches of another form are never joined: they start again.
        in_all = per_sample_in_both(per_sample, flags) if len(per_sample) == len(flags) else flags
        if waiting and ((taken + more > kept and not listed) or not _can_join(waiting[-1], batch, in_all)):
            yield BatchBlock.of(waiting, per_sample, copied=taken <= kept)
            waiting, taken = [], 0
        waiting.append(batch)
        taken += more
        per_sample = in_all
    yield BatchBlock.of(waiting, per_sample, copied=taken <= kept)


def _can_join(one: Batch, other: Batch, per_sample: tuple[bool, ...]) -> bool:
    """Return whether rows of both can be in one batch; ``per_sample`` says which tensors have a row for each sample."""
    if _places(one.inputs) != _places(other.inputs) or one.targets.shape[1:] != other.targets.shape[1:]:
        return False
    pairs = zip(_leaves(one.inputs), _leaves(other.inputs), strict=True)
    return all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape[1:] == b.shape[1:] if flag else _equal(a, b))
        for (a, b), flag in zip(pairs, per_sample, strict=True)
    )


def _places(tree: Inputs) -> list[str]:
    """Return the places of all tensors in a nesting."""
    return [place_name(key) for key, _ in named_leaves(tree)]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)


@dataclass(frozen=True, eq=False)
class BatchBlock:
    """Batches whose rows have consecutive numbers."""

    batches: list[Batch]
    ends: Tensor  # the number after the last row of each batch
    per_sample: tuple[bool, ...]

    @classmethod
    def of(cls, batches: list[Batch], per_sample: tuple[bool, ...], copied: bool) -> BatchBlock:
        """Return a block of these batches, ``copied`` into one where they are small: gathering from many is slow."""
        if copied and len(batches) > 1:
            inputs, targets = [batch.inputs for batch in batches], tuple(batch.targets for batch in batches)
            batches = [Batch(concat_inputs(inputs, per_sample), _concat_leaves(targets))]
        return cls(batches, torch.tensor(list(accumulate(batch.n_samples for batch in batches))), per_sample)

    def draw_batches(self, size: int, generator: torch.Generator, device: torch.device) -> Iterator[Batch]:
        """Yield the rows in random order, in batches."""
        count = int(self.ends[-1])
        draws = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float32)
        for rows in draws.argsort().cpu().split(size):
            if 2 * len(rows) >= min(size, count):
                yield self.rows(rows, device)

    def rows(self, index: Tensor, device: torch.device) -> Batch:
        """Return the rows with these numbers, in their order; no other rows are touched."""
        batch_of = torch.bucketize(index, self.ends, right=True)
        inputs, targets, places = [], [], []
        for number in batch_of.unique().tolist():
            batch, where = self.batches[number], (batch_of == number).nonzero()[:, 0]
            rows = index[where] - (int(self.ends[number - 1]) if number else 0)
            inputs.append(take(batch.inputs, self.per_sample, rows))
            targets.append(batch.targets[rows.to(batch.targets.device)])
            places.append(where)
        order = torch.cat(places).argsort()
        drawn = take(concat_inputs(inputs, self.per_sample), self.per_sample, order)
        drawn_targets = _concat_leaves(tuple(targets))
        move = lambda t: t.to(device, non_blocking=True)
        return Batch(map_tensors(drawn, move), move(drawn_targets[order.to(drawn_targets.device)]))


def class_labels(targets: Tensor, outputs: int) -> Tensor | None:
    """Return the targets as class numbers, or None where they are not class numbers."""
    flat = targets.squeeze(-1) if targets.ndim == 2 and targets.shape[1] == 1 else targets
    if flat.is_floating_point() or flat.ndim != 1 or outputs < 2:
        return None
    return flat.long().clamp(0, outputs - 1)


@dataclass(frozen=True, eq=False)
class InputStream:
    """Batches of inputs on one device, read once, checked as they pass. Targets are left out.

    Args:
        source: Yields batches: tensors, ``(inputs, targets)``, ``(inputs,)``, or mappings with or without a target.
        device: The device that the inputs are moved to.
        places: The names of the places of the input tensors, where the network has several.
        target_key: The key of the target in batches that are mappings.
        progress: Whether to show a bar.
        rows: Consecutive batches of plain tensors are joined until they have this many rows; a number, or a function
            from a batch to it.
        processes: Those that read the other parts, if the source is the part of this process; a Dataset is the whole.
        dtype: Of the tensors that batches of NumPy arrays become; None refuses arrays.
    """

    source: Loader
    device: torch.device
    places: frozenset[str] = frozenset()
    target_key: str | None = None
    progress: bool = False
    rows: int | Callable[[Inputs], int] = 1
    processes: Processes = ALONE
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        KEY.check("target_key", self.target_key)
        if is_dataset(self.source):
            object.__setattr__(self, "source", dataset_loader(self.source, self.processes))
        share = None if self.processes.is_single_process else share_of(self.source)
        if share is not None:
            share.refuse_other(self.processes, "loader")
            share.refuse_order("loader")

    def __iter__(self) -> Iterator[Inputs]:
        """Yield the inputs of all batches in order."""
        no_targets = lambda x: torch.empty(n_rows(x) if isinstance(x, Tensor) else 0, 0)
        batches = (Batch(inputs, no_targets(inputs)) for inputs in self._check_inputs())
        return (batch.inputs for batch in merge_batches(batches, self.rows))

    def _move(self, t: Tensor) -> Tensor:
        return (t.detach() if t.requires_grad else t).to(self.device, non_blocking=True)

    def _check_inputs(self) -> Iterator[Inputs]:
        """Yield the inputs of all batches that have rows, on the device; raise if there are none."""
        empty = True
        items = ProgressBar(self.source, "predicting", self.progress)
        for position, item in enumerate(read_items(items, undisturbed)):
            item = item if self.dtype is None else as_tensors(item, self.dtype)
            inputs = move_inputs(self._inputs(item, position), self._move)
            if any(n_rows(leaf) == 0 and getattr(leaf, "ndim", 1) for _, leaf in named_leaves(inputs)):
                continue  # a sampler or a filter may leave a batch without rows
            check_finite(inputs, f"inputs of batch {position}")
            empty = False
            yield inputs
        if empty and self.processes.is_single_process:
            raise DataError("the loader is empty: no batch was yielded; expected at least one batch of inputs.")

    def _inputs(self, item: Any, position: int) -> Inputs:
        """Return the inputs of one item."""
        if isinstance(item, Mapping):
            return self._without_target(item)
        if isinstance(item, LEAVES):
            return item
        if is_numbers(item):
            raise DataError(
                f"batch {position} is {describe_kind(item)} with numbers in it; expected a tensor or "
                "an array. Make one of nested lists: np.asarray(x), or torch.as_tensor(x)."
            )
        if isinstance(item, tuple | list):
            if self.places:
                choices = [item, *item[:1]] if len(item) <= 2 else [item]
            else:
                choices = [*item[:1]] if len(item) <= 2 else []
            for choice in choices:
                if not self.places or has_places(choice, self.places):
                    return choice
        form = f" with the tensors {', '.join(sorted(self.places))}" if self.places else ""
        raise DataError(
            f"batch {position} is {describe_kind(item)}; expected inputs{form}, or (inputs, targets), as in the fit. "
            "Other items are unpacked by a function of yours: lw.samples.unpacked(loader, lambda item: (inputs, "
            "targets))."
        )

    def _without_target(self, item: Mapping[str, Any]) -> Inputs:
        """Return a mapping without its target, if it has one; a key of an input of the network is not a target."""
        names = (self.target_key,) if self.target_key else TARGET_KEYS
        known = [k for k in names if k in item and not _is_place(f"inputs[{k!r}]", self.places)]
        inputs = {k: v for k, v in item.items() if k not in known[:1]}
        return inputs if any(True for _ in tensors_in(inputs)) else dict(item)


def _is_place(name: str, places: frozenset[str]) -> bool:
    return any(place == name or place.startswith(f"{name}[") for place in places)
