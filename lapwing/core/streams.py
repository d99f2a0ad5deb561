"""Inputs for predictions: one batch, or a loader of batches with or without targets.

What is a batch of inputs and what is a loader is decided here. A tensor, a mapping, a tuple and a set of samples are
inputs. Everything else that has parts is a loader: a DataLoader, a Dataset, a generator, a list of batches. A list is
one batch of inputs only if the network was fitted to inputs in that form. The same form says which part of an item
``(a, b)`` is the inputs: both, if the network takes two; otherwise the first, and the second are targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lapwing.core.data import read
from lapwing.core.inputs import (
    LEAVES,
    Inputs,
    as_tensors,
    check_finite,
    is_numbers,
    moved,
    n_rows,
    place_name,
    placed,
    tensors_in,
)
from lapwing.core.parts import share_of
from lapwing.core.processes import ALONE, Processes
from lapwing.core.progress import ProgressBar
from lapwing.core.random import undisturbed
from lapwing.core.settings import KEY, is_data, seen
from lapwing.core.sources import whole_loader
from lapwing.core.weights import TARGET_KEYS
from lapwing.errors import DataError


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

    source: Iterable[Any]
    device: torch.device
    places: frozenset[str] = frozenset()
    target_key: str | None = None
    progress: bool = False
    rows: int | Callable[[Inputs], int] = 1
    processes: Processes = ALONE
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        KEY.check("target_key", self.target_key)
        if isinstance(self.source, Dataset) and not isinstance(self.source, IterableDataset):
            object.__setattr__(self, "source", whole_loader(self.source, self.processes))
        share = None if self.processes.alone else share_of(self.source)
        if share is not None:
            share.refuse_other(self.processes, "loader")
            share.refuse_order("loader")

    def __iter__(self) -> Iterator[Inputs]:
        """Yield the inputs of all batches in order."""
        waiting: list[Tensor] = []
        for inputs in self._checked():
            if waiting and not (isinstance(inputs, Tensor) and _fit(waiting[-1], inputs)):
                yield _joined(waiting)
                waiting = []
            if not isinstance(inputs, Tensor) or not inputs.ndim:
                yield inputs
                continue
            waiting.append(inputs)
            if sum(map(len, waiting)) >= (self.rows(inputs) if callable(self.rows) else self.rows):
                yield _joined(waiting)
                waiting = []
        if waiting:
            yield _joined(waiting)

    def _moved(self, t: Tensor) -> Tensor:
        return (t.detach() if t.requires_grad else t).to(self.device, non_blocking=True)

    def _checked(self) -> Iterator[Inputs]:
        """Yield the inputs of all batches that have rows, on the device; raise if there are none."""
        empty = True
        items = ProgressBar(self.source, "predicting", visible=True) if self.progress else self.source
        for position, item in enumerate(read(items, undisturbed)):
            item = item if self.dtype is None else as_tensors(item, self.dtype)
            inputs = moved(self._inputs(item, position), self._moved)
            if any(n_rows(leaf) == 0 and getattr(leaf, "ndim", 1) for _, leaf in placed(inputs)):
                continue  # a sampler or a filter may leave a batch without rows
            check_finite(inputs, f"inputs of batch {position}")
            empty = False
            yield inputs
        if empty and self.processes.alone:
            raise DataError("the loader is empty: no batch was yielded; expected at least one batch of inputs.")

    def _inputs(self, item: Any, position: int) -> Inputs:
        """Return the inputs of one item."""
        if isinstance(item, Mapping):
            return self._without_target(item)
        if isinstance(item, LEAVES):
            return item
        if is_numbers(item):
            raise DataError(
                f"batch {position} is a {type(item).__name__} of {len(item)} with numbers in it; expected a tensor or "
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
        what = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else seen(item)
        form = f" with the tensors {', '.join(sorted(self.places))}" if self.places else ""
        raise DataError(
            f"batch {position} is a {what}; expected inputs{form}, or (inputs, targets), as in the fit. Other items "
            "are unpacked by a function of yours: lw.samples.unpacked(loader, lambda item: (inputs, targets))."
        )

    def _without_target(self, item: Mapping[Any, Any]) -> Inputs:
        """Return a mapping without its target, if it has one; a key that the network has as input is none."""
        names = (self.target_key,) if self.target_key else TARGET_KEYS
        known = [k for k in names if k in item and not _is_place(f"inputs[{k!r}]", self.places)]
        inputs = {k: v for k, v in item.items() if k not in known[:1]}
        return inputs if any(True for _ in tensors_in(inputs)) else dict(item)


def is_loader(x: Any, places: frozenset[str]) -> bool:
    """Return whether x is a loader and not one batch of inputs of a network whose inputs have these places.

    >>> is_loader([torch.zeros(3, 2), torch.zeros(4, 2)], frozenset())
    True
    >>> is_loader([torch.zeros(3, 2), torch.zeros(3, 5)], frozenset({"inputs[0]", "inputs[1]"}))
    False
    """
    if isinstance(x, (*LEAVES, Mapping, tuple)) or not is_data(x):
        return False
    if not isinstance(x, list):
        return True
    if places and has_places(x, places):
        return False
    nested = all(isinstance(item, tuple | list | Mapping) for item in x)
    return nested or (not places and all(isinstance(item, LEAVES) for item in x))


def has_places(inputs: Inputs, places: frozenset[str]) -> bool:
    """Return whether there is a tensor at each of these places."""
    return places <= {place_name(key) for key, _ in placed(inputs)}


def _is_place(name: str, places: frozenset[str]) -> bool:
    return any(place == name or place.startswith(f"{name}[") for place in places)


def _fit(one: Tensor, other: Tensor) -> bool:
    """Return whether rows of both can be in one batch."""
    return one.shape[1:] == other.shape[1:] and one.dtype == other.dtype and one.ndim > 0 and other.ndim > 0


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
