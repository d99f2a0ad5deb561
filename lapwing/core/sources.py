"""What users give as data, and its items as batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lapwing.core.batches import Batch
from lapwing.core.inputs import Inputs
from lapwing.core.parts import Part
from lapwing.core.processes import Processes
from lapwing.core.settings import seen
from lapwing.core.weights import Weighted, target_name
from lapwing.errors import DataError

BATCH = 256  # samples in a batch of a Dataset that comes without a DataLoader


def whole_loader(dataset: Dataset[Any], processes: Processes) -> DataLoader[Any]:
    """Return a loader of a data set of single samples; of several processes, each reads its part of it.

    A loader draws a seed for workers at every pass, from a generator of its own here: the global one is the user's.
    """
    part = None if processes.alone else Part(dataset, processes.group)  # type: ignore[arg-type]
    return DataLoader(dataset, BATCH, sampler=part, generator=torch.Generator())


def batch_of(item: Any, target_key: str | None) -> Batch:
    """Return an item of a source as a batch; its weights, if there are any, are not checked yet."""
    if isinstance(item, Mapping):
        name = target_name(item, target_key)
        return _batch({k: v for k, v in item.items() if k != name}, item[name], name)
    if isinstance(item, tuple | list) and len(item) == 2:
        if isinstance(item[0], Mapping) and target_key and target_key in item[0]:
            raise DataError(f"the target key {target_key!r} names an input of an (inputs, targets) batch.")
        return _batch(item[0], item[1])
    what = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
    raise DataError(
        f"a batch is a {what}; expected (inputs, targets) or a mapping with a target key. "
        "Several inputs go into a tuple: ((x1, x2), y); weights need lw.samples.weighted(loader); arrays become "
        "tensors with torch.as_tensor; other items "
        "are unpacked by a function of yours: lw.samples.unpacked(loader, lambda item: (inputs, targets))."
    )


def _batch(inputs: Inputs, targets: Any, key: str | None = None) -> Batch:
    """Return the batch of targets as a user gives them, with weights or without."""
    if isinstance(targets, Weighted):
        return Batch(inputs, _targets(targets.targets), key, targets.weights)
    return Batch(inputs, _targets(targets), key)


def _targets(given: Any) -> Tensor:
    """Return targets as a tensor; raise if they are no numbers."""
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the targets of a batch are {seen(given)}; expected a tensor, or numbers that torch.as_tensor takes."
        ) from error
