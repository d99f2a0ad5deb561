"""What users give as data, and its items as batches.

What is one pair of inputs and targets, and what is a list of batches, is decided here: **a tuple of two is a pair, one
data set, if its second part is a tensor, a NumPy array, a data frame or weighted targets. Any other tuple, and any
list, holds batches.** A pair is one batch, as for predictions: a pass takes as many rows at a time as memory allows.
Training takes a step for each batch, so there a pair is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lapwing.core.batches import Batch
from lapwing.core.inputs import Inputs, SampleRows, as_tensors, is_numbers, take
from lapwing.core.parts import Part
from lapwing.core.processes import Processes
from lapwing.core.settings import is_array, seen
from lapwing.core.weights import Weighted, target_name
from lapwing.errors import DataError

BATCH = 256  # samples in a batch of a Dataset that comes without a DataLoader, and in a step of training on a pair


def is_pair(source: Any) -> bool:
    """Return whether the source is one pair of inputs and targets, and not a list of batches.

    >>> x, y = torch.zeros(4, 3), torch.zeros(4)
    >>> is_pair((x, y)), is_pair(((x, x), y.numpy())), is_pair([x, y]), is_pair(((x, y), (x, y)))
    (True, True, False, False)
    """
    pair = isinstance(source, tuple) and len(source) == 2
    return pair and (isinstance(source[1], Weighted) or is_array(source[1]))


def as_source(source: Any, name: str, processes: Processes, dtype: torch.dtype | None) -> Iterable[Any]:
    """Return data as an object that yields its items at every pass; raise if they are none.

    A data set of single samples becomes a loader, of which each process reads its part, and a pair a list of one batch.
    """
    parts = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    if not parts or is_array(source) or isinstance(source, str | bytes | Mapping):
        mapping = " One batch that is a mapping goes into a list: [batch]." if isinstance(source, Mapping) else ""
        raise DataError(
            f"{name} is {seen(source)}; expected a DataLoader, a Dataset, a list of (inputs, targets) batches, or one "
            f"pair (inputs, targets) of tensors or arrays.{mapping}"
        )
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        return whole_loader(source, processes)
    if is_pair(source):
        batch = batch_of(source, None, dtype)  # arrays become tensors once, and not at every pass
        refuse_unequal(batch.inputs, batch.targets, name)
        return [(batch.inputs, batch.targets if batch.weights is None else Weighted(batch.targets, batch.weights))]
    _refuse_half_pair(source, name)
    # Only iterators are tested: opening a loader may start worker processes.
    if hasattr(source, "__next__") and iter(source) is source:
        raise DataError(
            f"{name} is a one-shot iterator; some methods pass over the data twice. "
            "Give a DataLoader, a list of batches, or any object that can be iterated again."
        )
    return source  # type: ignore[no-any-return]


def refuse_unequal(inputs: Inputs, targets: Any, name: str) -> None:
    """Raise if a pair of two tensors or arrays has unequal lengths; inputs of another form say their number later.

    Targets without a dimension are those of one sample, which lacks its batch dimension.
    """
    known = isinstance(inputs, Tensor) or is_array(inputs)
    if not known or getattr(inputs, "is_nested", False):
        return
    targets = targets.targets if isinstance(targets, Weighted) else targets
    rows, count = (t.shape if hasattr(t, "shape") else t.__array__().shape for t in (inputs, targets))
    if rows and count and rows[0] != count[0]:
        raise DataError(
            f"{name}: {rows[0]} inputs with {count[0]} targets, of the shapes {tuple(rows)} and {tuple(count)}; "
            "expected one target for each. Take the same rows of both. One sample alone needs a batch dimension: "
            "(x[None], y[None])."
        )


def _refuse_half_pair(source: Any, name: str) -> None:
    """Raise if a tuple is no list of batches, since its first part is an array, and no pair either."""
    if not isinstance(source, tuple) or not source:
        return
    last, count = source[-1], len(source)
    if count == 2 and (is_array(source[0]) or is_numbers(last)):
        what = f"a {type(last).__name__} of {len(last)}" if isinstance(last, tuple | list) else seen(last)
        convert = " Convert the list: np.asarray(targets), or torch.as_tensor(targets)." if is_numbers(last) else ""
        none = " For inputs without targets use predict." if last is None else ""
        raise DataError(
            f"{name} is a tuple whose second part, the targets, is {what}; expected (inputs, targets) of two tensors "
            f"or arrays.{convert}{none}"
        )
    if is_array(source[0]):
        raise DataError(
            f"{name} is a tuple of {count} whose first part is {_kind(source[0])}; expected (inputs, targets). Weights "
            "go into lw.samples.weighted((inputs, targets, weights)), several inputs into a tuple: ((x1, x2), y)."
        )


def _kind(value: Any) -> str:
    return seen(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def whole_loader(dataset: Dataset[Any], processes: Processes) -> DataLoader[Any]:
    """Return a loader of a data set of single samples; of several processes, each reads its part of it.

    A loader draws a seed for workers at every pass, from a generator of its own here: the global one is the user's.
    """
    part = None if processes.alone else Part(dataset, processes.group)  # type: ignore[arg-type]
    return DataLoader(dataset, BATCH, sampler=part, generator=torch.Generator())


def in_steps(source: Any, dtype: torch.dtype) -> Any:
    """Return the data for training: a pair of more than 256 rows as batches in random order; others as they are."""
    if not is_pair(source):
        return source
    batch = batch_of(source, None, dtype)
    per_sample = SampleRows().per_sample(batch.inputs, batch.n_samples)
    return ShuffledPair(batch, per_sample) if batch.n_samples > BATCH and any(per_sample) else source


@dataclass(frozen=True, eq=False)
class ShuffledPair:
    """One pair of inputs and targets as batches of 256 rows, in an order that the global generator draws at each pass.

    A tensor has a row for each sample if it has as many rows as there are targets; see ``core/inputs.py``.
    """

    whole: Batch
    per_sample: tuple[bool, ...]

    def __iter__(self) -> Iterator[tuple[Inputs, Any]]:
        whole = self.whole
        for rows in torch.randperm(whole.n_samples).split(BATCH):
            targets = whole.targets[rows.to(whole.targets.device)]
            weights = None if whole.weights is None else whole.weights[rows.to(whole.weights.device)]
            yield take(whole.inputs, self.per_sample, rows), targets if weights is None else Weighted(targets, weights)

    def __len__(self) -> int:
        return -(-self.whole.n_samples // BATCH)


def batch_of(item: Any, target_key: str | None, dtype: torch.dtype | None) -> Batch:
    """Return an item of a source as a batch; its weights, if there are any, are not checked yet.

    Arrays become tensors, floating-point ones of inputs with this dtype; None leaves arrays of inputs as they are.
    """
    if isinstance(item, Mapping):
        name = target_name(item, target_key)
        return _batch({k: v for k, v in item.items() if k != name}, item[name], dtype, name)
    if isinstance(item, tuple | list) and len(item) == 2:
        if isinstance(item[0], Mapping) and target_key and target_key in item[0]:
            raise DataError(f"the target key {target_key!r} names an input of an (inputs, targets) batch.")
        return _batch(item[0], item[1], dtype)
    what = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
    raise DataError(
        f"a batch is a {what}; expected (inputs, targets) or a mapping with a target key. One data set of two tensors "
        "or arrays is a tuple: (inputs, targets). "
        "Several inputs go into a tuple: ((x1, x2), y); weights need lw.samples.weighted(loader); other items "
        "are unpacked by a function of yours: lw.samples.unpacked(loader, lambda item: (inputs, targets))."
    )


def _batch(inputs: Inputs, targets: Any, dtype: torch.dtype | None, key: str | None = None) -> Batch:
    """Return the batch of inputs and targets as a user gives them, with weights or without."""
    inputs = inputs if dtype is None else as_tensors(inputs, dtype)
    if isinstance(targets, Weighted):
        weights = as_tensors(targets.weights, torch.float64, "weights")
        return Batch(inputs, _targets(targets.targets), key, weights)
    return Batch(inputs, _targets(targets), key)


def _targets(given: Any) -> Tensor:
    """Return targets as a tensor, with all their digits; raise if they are no numbers."""
    given = as_tensors(given, torch.float64, "targets") if is_array(given) else given
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the targets of a batch are {seen(given)}; expected a tensor, or numbers that torch.as_tensor takes."
        ) from error
