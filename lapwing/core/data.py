"""The only data loop: it unpacks batches, checks them, moves them to the device, counts them and shows progress."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lapwing.core.progress import ProgressBar
from lapwing.errors import DataError

Inputs = Any  # a tensor, or a tuple, list or mapping of tensors
LOOKED = 3  # batches that are looked at for one with several samples
TARGET_KEYS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch: the inputs of the network, and the targets."""

    inputs: Inputs
    targets: Tensor

    @property
    def n_samples(self) -> int:
        """The number of samples: that of the targets."""
        return len(self.targets) if self.targets.ndim else 1


def map_tensors(tree: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return the same nesting with ``change`` applied to every tensor; other leaves stay as they are."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return rebuilt(tree, [map_tensors(value, change) for value in tree])
    return tree


def rebuilt(sequence: Inputs, values: list[Inputs]) -> Inputs:
    """Return the same kind of tuple or list with other values; named tuples take them one by one."""
    return type(sequence)(*values) if hasattr(sequence, "_fields") else type(sequence)(values)


def tensors_in(tree: Inputs) -> Iterator[Tensor]:
    """Yield every tensor of a nesting, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors_in(value)


def call(model: Callable[..., Any], inputs: Inputs) -> Any:
    """Call the model as its signature asks: mappings by keyword, tuples by position, anything else as one argument."""
    if isinstance(inputs, Mapping):
        if accepts(model, (), inputs):
            return model(**inputs)
        _refuse_other_keys(model, inputs)
        return model(inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs) if accepts(model, tuple(inputs)) else model(inputs)
    return model(inputs)


def _refuse_other_keys(model: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    """Raise if the model takes some of these keys by name: then the others are too many, or some are missing."""
    names = [*inspect.signature(getattr(model, "forward", model)).parameters]
    if set(names) & set(inputs):
        raise DataError(
            f"a batch has the input keys {sorted(map(str, inputs))}; the model takes {', '.join(names)}. Leave the "
            "others out of the batch, or wrap the model in a module that takes them."
        )


def accepts(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether the model's signature takes these arguments."""
    try:
        inspect.signature(getattr(model, "forward", model)).bind(*args, **(kwargs or {}))
    except TypeError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class Data:
    """Re-iterable batches on one device, checked as they pass.

    ``source`` is a DataLoader, a list of ``(inputs, targets)``, a list of mappings that hold their target
    under ``target_key``, or one ``(inputs, targets)`` pair of tensors.
    """

    source: Iterable[Any]
    device: torch.device
    target_key: str | None = None
    progress: bool = False
    name: str = "data"  # in messages

    def __post_init__(self) -> None:
        if not hasattr(self.source, "__iter__") and not hasattr(self.source, "__getitem__"):
            raise DataError(
                f"{self.name} is a {type(self.source).__name__}; expected a DataLoader or a list of batches."
            )
        # Only iterators are tested: opening a loader may start worker processes.
        if hasattr(self.source, "__next__") and iter(self.source) is self.source:
            raise DataError(
                f"{self.name} is a one-shot iterator; some methods pass over the data twice. "
                "Give a DataLoader, a list of batches, or any object that can be iterated again."
            )

    def batches(self, label: str) -> Iterator[Batch]:
        """Yield the batches in order, with a progress bar if ``progress`` is set and tqdm is installed."""
        source = self.source
        if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Tensor):
            source = [source]
        empty = True
        for position, item in enumerate(ProgressBar(source, label, self.progress)):
            batch = self._unpacked(item)
            if batch.targets.numel() == 0 and any(t.numel() == 0 for t in tensors_in(batch.inputs)):
                continue  # a sampler or a filter may leave a batch without rows
            empty = False
            yield self._checked(batch, position)
        if empty:
            raise DataError(
                f"{self.name} is empty: no batch was yielded; expected at least one with rows, (inputs, targets)."
            )

    def look(self) -> tuple[Batch, Batch]:
        """Return the first batch, and the first batch with several samples, if one of the first three has several.

        Otherwise both are the first batch. With one sample alone, nothing shows whether samples mix. The source is
        opened once, and not read further than needed.

        >>> x = torch.arange(4.0)[:, None]
        >>> first, several = Data([(x[:1], x[:1]), (x[1:], x[1:])], torch.device("cpu")).look()
        >>> first.n_samples, several.n_samples
        (1, 3)
        """
        batches = list[Batch]()
        for batch in islice(replace(self, progress=False).batches("first batch"), LOOKED):
            batches.append(batch)
            if batch.n_samples > 1:
                return batches[0], batch
        return batches[0], batches[0]

    def _unpacked(self, item: Any) -> Batch:
        if isinstance(item, Mapping):
            keys = [self.target_key] if self.target_key else [k for k in TARGET_KEYS if k in item]
            if not keys or keys[0] not in item:
                raise DataError(
                    f"a batch with the keys {sorted(map(str, item))} has no target; "
                    f"pass target_key=..., or use one of {', '.join(TARGET_KEYS)}."
                )
            return Batch({k: v for k, v in item.items() if k != keys[0]}, torch.as_tensor(item[keys[0]]))
        if isinstance(item, tuple | list) and len(item) == 2:
            if isinstance(item[0], Mapping) and self.target_key and self.target_key in item[0]:
                raise DataError(f"the target key {self.target_key!r} names an input of an (inputs, targets) batch.")
            return Batch(item[0], torch.as_tensor(item[1]))
        seen = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise DataError(
            f"a batch is a {seen}; expected (inputs, targets) or a mapping with a target key. "
            "Several inputs go into a tuple: ((x1, x2), y); arrays become tensors with torch.as_tensor."
        )

    def _checked(self, batch: Batch, position: int) -> Batch:
        move = lambda t: (t.detach() if t.requires_grad else t).to(self.device, non_blocking=True)
        inputs, targets = map_tensors(batch.inputs, move), move(batch.targets)
        where = f"batch {position}" if self.name == "data" else f"batch {position} of {self.name}"
        check_finite(inputs, f"inputs of {where}")
        check_finite(targets, f"targets of {where}")
        return Batch(inputs, targets)


def merged(batches: Iterable[Batch], rows: int) -> Iterator[Batch]:
    """Yield consecutive batches of plain tensors, joined until they hold at least ``rows`` samples.

    The result of a pass does not depend on the batch size, but its cost does: each call has a fixed cost.
    Batches that are not tensors of one shape stay as they are.
    """
    waiting: list[Batch] = []
    count = 0
    for batch in batches:
        if waiting and not _alike(waiting[-1], batch):
            yield _joined(waiting)
            waiting, count = [], 0
        waiting.append(batch)
        count += batch.n_samples
        if count >= rows or not isinstance(batch.inputs, Tensor):
            yield _joined(waiting)
            waiting, count = [], 0
    if waiting:
        yield _joined(waiting)


def _alike(one: Batch, other: Batch) -> bool:
    """Return whether two batches are plain tensors that can be joined."""
    pairs = ((one.inputs, other.inputs), (one.targets, other.targets))
    return all(
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.ndim > 0
        and a.shape[1:] == b.shape[1:]
        and a.dtype == b.dtype
        for a, b in pairs
    ) and all(len(batch.inputs) == len(batch.targets) for batch in (one, other))


def _joined(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return Batch(torch.cat([batch.inputs for batch in batches]), torch.cat([batch.targets for batch in batches]))


def check_finite(tree: Inputs, what: str) -> None:
    """Raise if any floating-point tensor holds NaN or infinity."""
    for tensor in tensors_in(tree):
        # A sum is finite only if every term is, and is ten times cheaper than a test of each. It may overflow where
        # no term does, so the terms are tested where the sum is not finite.
        if not tensor.is_floating_point() or math.isfinite(tensor.sum()):
            continue
        if not bool(torch.isfinite(tensor).all()):
            bad = (~torch.isfinite(tensor)).sum().item()
            raise DataError(
                f"{what}: {bad} of {tensor.numel()} entries are NaN or infinite; expected finite numbers. "
                "Clean the data, or check the network for overflow."
            )
