"""The only data loop: it unpacks what users give into batches, checks, moves and counts them.

What is one pair of inputs and targets, and what is a list of batches, is decided here: **a tuple of two is a pair, one
data set, if its second part is a tensor, a NumPy array, a data frame or weighted targets. Any other tuple, and any
list, holds batches.** A pair is one batch, as for predictions: a pass takes as many rows at a time as memory allows.
Training takes a step for each batch, so there a pair is cut.

A ``Reading`` is what a pass over a loader has read, in a few numbers that depend neither on the order of rows nor on
the batches. Two passes over the same data have the same numbers, shuffled or not. Random augmentation, other rows or
fewer of them change the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lapwing.data.inputs import (
    Batch,
    Inputs,
    SampleRows,
    as_tensors,
    batch_digest,
    check_finite,
    is_numbers,
    move_inputs,
    plain_tensors,
    tensors_in,
)
from lapwing.data.known_rows import RowSketch, Sketching
from lapwing.data.processes import ALONE, Part, Processes, Share, refuse_copies, share_of
from lapwing.errors import DataError, UnsupportedError
from lapwing.runtime.settings import DATA, KEY, describe, describe_kind, is_array
from lapwing.runtime.threads import ProgressBar, Stream, allow_interrupts, normal, undisturbed

Loader = Iterable[object]  # yields batches in any form that a user has
TARGET_KEYS = ("labels", "label", "targets", "target", "y")
BATCH_SIZE = 256  # samples in a batch of a Dataset that comes without a DataLoader, and in a step of training on a pair


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
class Unpacked:
    """A loader whose items are unpacked by a function; made by ``weighted`` and ``unpacked``."""

    loader: Loader
    unpack: Callable[[Any], object]

    def __iter__(self) -> Iterator[object]:
        return map(self.unpack, iter(self.loader))

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


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
    batches = Unpacked(data, partial(_with_weights, key=key, target_key=target_key))
    return list(batches) if isinstance(data, list) else batches  # a list is the same at every pass


def _with_weights(item: object, key: str, target_key: str | None) -> object:
    """Return a batch with its weights beside the targets."""
    if isinstance(item, Mapping):
        if key not in item:
            raise DataError(
                f"a batch with the keys {sorted(map(str, item))} has no weights under {key!r}; say where they are: "
                "lw.samples.weighted(loader, key=...)."
            )
        name = target_name(item, target_key)
        rest = {each: value for each, value in item.items() if each != key}
        return {**rest, name: Weighted(item[name], item[key])}
    if isinstance(item, tuple | list) and len(item) == 3:
        return item[0], Weighted(item[1], item[2])
    raise DataError(
        f"a batch is {describe_kind(item)}; expected (inputs, targets, weights), or a mapping with {key!r}. Other "
        "items are unpacked by a function of yours: lw.samples.unpacked(loader, lambda item: (inputs, "
        "lw.samples.Weighted(targets, weights)))."
    )


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


def is_pair(source: object) -> TypeGuard[tuple[Inputs, Any]]:
    """Return whether the source is one pair of inputs and targets, and not a list of batches.

    >>> x, y = torch.zeros(4, 3), torch.zeros(4)
    >>> is_pair((x, y)), is_pair(((x, x), y.numpy())), is_pair([x, y]), is_pair(((x, y), (x, y)))
    (True, True, False, False)
    """
    return isinstance(source, tuple) and len(source) == 2 and (isinstance(source[1], Weighted) or is_array(source[1]))


def is_dataset(source: object) -> TypeGuard[Dataset[Any]]:
    """Return whether the source is a data set of single samples by their numbers."""
    return isinstance(source, Dataset) and not isinstance(source, IterableDataset)


def as_source(source: Any, name: str, processes: Processes, dtype: torch.dtype | None) -> Loader:
    """Return data as an object that yields its items at every pass; raise if it is not data.

    A data set of single samples becomes a loader, and each process reads one part. A pair becomes a list of one batch.
    """
    parts = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    if not parts or is_array(source) or isinstance(source, str | bytes | Mapping):
        mapping = " One batch that is a mapping goes into a list: [batch]." if isinstance(source, Mapping) else ""
        raise DataError(
            f"{name} is {describe(source)}; expected a DataLoader, a Dataset, a list of (inputs, targets) batches, or "
            f"one pair (inputs, targets) of tensors or arrays.{mapping}"
        )
    if is_dataset(source):
        return dataset_loader(source, processes)
    if is_pair(source):
        batch = to_batch(source, None, dtype)  # arrays become tensors once, and not at every pass
        refuse_unequal(batch.inputs, batch.targets, name)
        return [to_item(batch)]
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


def _refuse_half_pair(source: object, name: str) -> None:
    """Raise if a tuple is neither a list of batches, since its first part is an array, nor a pair."""
    if not isinstance(source, tuple) or not source:
        return
    last, count = source[-1], len(source)
    if count == 2 and (is_array(source[0]) or is_numbers(last)):
        what = f"a {type(last).__name__} of {len(last)}" if isinstance(last, tuple | list) else describe(last)
        convert = " Convert the list: np.asarray(targets), or torch.as_tensor(targets)." if is_numbers(last) else ""
        none = " For inputs without targets use predict." if last is None else ""
        raise DataError(
            f"{name} is a tuple whose second part, the targets, is {what}; expected (inputs, targets) of two tensors "
            f"or arrays.{convert}{none}"
        )
    if is_array(source[0]):
        raise DataError(
            f"{name} is a tuple of {count} whose first part is {describe_kind(source[0])}; expected (inputs, "
            "targets). Weights go into lw.samples.weighted((inputs, targets, weights)), several inputs into a tuple: "
            "((x1, x2), y)."
        )


def dataset_loader(dataset: Dataset[Any], processes: Processes) -> DataLoader[Any]:
    """Return a loader of a data set of single samples; of several processes, each reads its part of it.

    A loader draws a seed for workers at every pass, from a generator of its own here: the global one is the user's.
    """
    part = None if processes.is_single_process else Part(dataset, processes.group)  # type: ignore[arg-type]
    return DataLoader(dataset, BATCH_SIZE, sampler=part, generator=torch.Generator())


def cut_for_training(source: Any, dtype: torch.dtype) -> Any:
    """Return the data for training: a pair of more than 256 rows as batches in random order, or the data unchanged."""
    if not is_pair(source):
        return source
    batch = to_batch(source, None, dtype)
    per_sample = SampleRows().per_sample(batch.inputs, batch.n_samples)
    return ShuffledPair(batch, per_sample) if batch.n_samples > BATCH_SIZE and any(per_sample) else source


@dataclass(frozen=True, eq=False)
class ShuffledPair:
    """One pair of inputs and targets as batches of 256 rows, in an order that the global generator draws at each pass.

    A tensor has a row for each sample if it has as many rows as there are targets; see ``data/inputs.py``.
    """

    whole: Batch
    per_sample: tuple[bool, ...]

    def __iter__(self) -> Iterator[tuple[Inputs, object]]:
        for rows in torch.randperm(self.whole.n_samples).split(BATCH_SIZE):
            yield to_item(self.whole.take(self.per_sample, rows))

    def __len__(self) -> int:
        return -(-self.whole.n_samples // BATCH_SIZE)


def to_batch(item: object, target_key: str | None, dtype: torch.dtype | None) -> Batch:
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
    raise DataError(
        f"a batch is {describe_kind(item)}; expected (inputs, targets) or a mapping with a target key. One data set "
        "of two tensors or arrays is a tuple: (inputs, targets). Several inputs go into a tuple: ((x1, x2), y); "
        "weights need lw.samples.weighted(loader); other items are unpacked by a function of yours: "
        "lw.samples.unpacked(loader, lambda item: (inputs, targets))."
    )


def to_item(batch: Batch) -> tuple[Inputs, object]:
    """Return a batch as a user gives it: a pair, whose targets hold the weights if there are any."""
    return batch.inputs, batch.targets if batch.weights is None else Weighted(batch.targets, batch.weights)


def _batch(inputs: Inputs, targets: Any, dtype: torch.dtype | None, key: str | None = None) -> Batch:
    """Return the batch of inputs and targets as a user gives them, with weights or without."""
    inputs = inputs if dtype is None else as_tensors(inputs, dtype)
    if isinstance(targets, Weighted):
        weights = as_tensors(targets.weights, torch.float64, "weights")
        return Batch(inputs, _targets(targets.targets), key, weights)
    return Batch(inputs, _targets(targets), key)


def _targets(given: object) -> Tensor:
    """Return targets as a tensor, with all their digits; raise if they are not numbers."""
    given = as_tensors(given, torch.float64, "targets") if is_array(given) else given
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the targets of a batch are {describe(given)}; expected a tensor, or numbers that torch.as_tensor takes."
        ) from error


SUM_TOLERANCE = 1e-9  # relative gap between two sums of the same rows in another order
CHUNK_NUMBERS = 2**22  # numbers that are converted to float64 at a time


@dataclass(eq=False)
class Reading:
    """The number of rows of a pass, and sums over random projections of each row.

    Each row of inputs and target becomes one number; their sum, the sum of their squares and that of their magnitudes
    are kept. Rows of several lengths are only counted: padding depends on the other samples of a batch.
    """

    rows: int = 0
    sums: Tensor | None = None  # (3,); None if rows cannot be compared
    widths: tuple[int, ...] | None = None  # numbers of a row in each tensor, once a batch was read
    patterns: list[Tensor] = field(default_factory=list)

    def add(self, tensors: Iterable[Tensor], count: int) -> None:
        """Add a batch of ``count`` samples; a tensor with another number of rows belongs to all of them."""
        self.rows += count
        tables = [_rows_as_table(t) for t in tensors if t.layout == torch.strided and not t.is_quantized]
        widths = tuple(t.shape[1] for t in tables)
        if self.widths is None:
            self.widths, device = widths, tables[0].device if tables else torch.device("cpu")
            self.sums, generator = torch.zeros(3, dtype=torch.float64, device=device), torch.Generator().manual_seed(1)
            self.patterns = [normal((width,), generator, self.sums) for width in widths]
        if self.sums is None or widths != self.widths:
            self.sums = None
            return
        row = torch.zeros(count, dtype=torch.float64, device=self.sums.device)
        for table, pattern in zip(tables, self.patterns, strict=True):
            each = torch.cat(
                [part.double() @ pattern for part in table.split(max(1, CHUNK_NUMBERS // max(1, len(pattern))))]
            )
            row += each if len(each) == count else each.sum()
        self.sums += torch.stack([row.sum(), row.square().sum(), row.abs().sum()])

    def mark(self) -> Reading | None:
        """Return what another process needs to compare its rows with these; None if too few can be compared."""
        return None if self.sums is None or self.rows < 2 else Reading(self.rows, self.sums.cpu(), self.widths)

    def difference(self, first: Reading) -> str:
        """Return in words how this pass differs from the first one; empty if it has the same rows."""
        if self.rows != first.rows:
            return f"gave {self.rows} rows and the first one {first.rows}"
        if self.sums is None or first.sums is None or self.widths != first.widths:
            return ""
        scale = torch.maximum(self.sums, first.sums)[[2, 1]].clamp_min(torch.finfo(torch.float64).tiny)
        gap = float(((self.sums - first.sums)[:2].abs() / scale).max())
        return f"gave other rows, by {gap:.2g} of their size" if gap > SUM_TOLERANCE else ""


def _rows_as_table(t: Tensor) -> Tensor:
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return t.reshape(len(t) if t.ndim else 1, -1) if t.numel() else t.reshape(len(t) if t.ndim else 1, 0)


@dataclass(eq=False)
class Readings:
    """The complete passes over a loader so far; mutable, and no part of the value of the data."""

    first: Reading | None = None
    passes: int = 0
    difference: str = ""  # of a later pass to the first, in words
    weighted: bool = False  # whether a batch had weights
    compared: bool = False  # whether the first passes of several processes were compared
    sketching: Sketching | None = None  # the rows of the first complete pass, if they were to be kept
    # Called in the next pass of a curvature.
    take_outputs: Callable[[Tensor, Tensor, Tensor | None], None] | None = None

    def add(self, reading: Reading) -> None:
        """Keep the first pass, and how a later one differs from it."""
        self.passes += 1
        if self.first is None:
            self.first = reading
        else:
            self.difference = self.difference or reading.difference(self.first)


PEEKED_BATCHES = 3  # batches that are looked at for one with several samples


def read_items(source: Loader, drawing: Callable[[], AbstractContextManager[None]]) -> Iterator[object]:
    """Yield what the source yields. Ctrl-C is raised at once while it is read, which may take any time."""
    ended = object()
    with drawing(), allow_interrupts():
        items = iter(source)
    while True:
        with drawing(), allow_interrupts():
            item = next(items, ended)
        if item is ended:
            return
        yield item


@dataclass(frozen=True, eq=False)
class Data:
    """Re-iterable batches on one device, checked as they pass.

    ``source`` is a DataLoader, a list of ``(inputs, targets)``, a list of mappings that hold their target
    under ``target_key``, one ``(inputs, targets)`` pair, or a Dataset of single samples; see ``data/batches.py``. With
    several processes it is the part of this one; a Dataset is the whole, and each process reads one part.
    """

    source: Loader
    device: torch.device
    target_key: str | None = None
    progress: bool = False
    name: str = "data"  # in messages
    same_rows: bool = False  # whether every pass must give the rows of the first one, in any order
    readings: Readings = field(default_factory=Readings, repr=False)
    stream: Stream | None = None  # the random numbers that the source draws, if not from the global generators as is
    processes: Processes = ALONE  # those that read the other parts
    arrange: Callable[[Batch], Batch] | None = None  # applied to every batch, see ``Network.arrange_data``
    dtype: torch.dtype | None = None  # of the tensors that arrays of inputs become; None refuses arrays
    keep_sketch: bool = False  # whether the first complete pass leaves a sketch of its rows in ``readings``

    def __post_init__(self) -> None:
        KEY.check("target_key", self.target_key)
        object.__setattr__(self, "source", as_source(self.source, self.name, self.processes, self.dtype))
        if self.share is not None and not self.processes.is_single_process:
            self.share.refuse_other(self.processes, self.name)

    @cached_property
    def share(self) -> Share | None:
        """The part of the data that the sampler of the source gives; None if it does not say."""
        return None if self.in_memory else share_of(self.source, self.name)

    def with_source(self, source: Loader, name: str) -> Data:
        """Return other data, read in the same way and by the same processes."""
        return Data(
            source, self.device, self.target_key, self.progress, name, processes=self.processes, dtype=self.dtype,
            keep_sketch=self.keep_sketch,
        )  # fmt: skip

    def sketch(self) -> RowSketch | None:
        """Return the sketch of the rows of all processes; None if they cannot be compared. Read the data if needed."""
        if self.readings.sketching is None:
            for _ in replace(self, keep_sketch=True, arrange=None).batches("", weighted=True):
                pass
        assert self.readings.sketching is not None
        sketch = self.readings.sketching.value()
        if not self.processes.all_true(sketch is not None):
            return None
        return None if sketch is None else sketch.everywhere(self.processes)

    @property
    def has_weights(self) -> bool:
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
        sketching = Sketching() if self.keep_sketch and self.readings.sketching is None else None
        rows, share = 0, self.share
        items = ProgressBar(self.source, label, self.progress) if label else self.source
        for position, item in enumerate(self._read(items)):
            batch = to_batch(item, self.target_key, self.dtype)
            if batch.targets.numel() == 0 and any(t.numel() == 0 for t in tensors_in(batch.inputs)):
                continue  # a sampler or a filter may leave a batch without rows
            batch = self._check_and_move(batch, position)
            if batch.weights is not None:
                self._note_weights(weighted, label)
            if share is not None and share.rows is not None and rows + batch.n_samples > share.rows:
                batch = self._cut_repeated(batch, rows, share)
                if not batch.n_samples:
                    continue
            rows += batch.n_samples
            if sketching is not None:
                sketching.add(batch.inputs, batch.targets, batch.n_samples)
            if reading is not None:
                tensors = (*plain_tensors(batch.inputs), batch.targets, batch.weights)
                reading.add((t for t in tensors if t is not None), batch.n_samples)
                self._refuse_more(reading)
            yield self._arrange_batch(batch, position)
        if not rows and self.processes.is_single_process:
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

    def _arrange_batch(self, batch: Batch, position: int) -> Batch:
        """Return the batch as ``arrange`` makes it; an error says which one it was."""
        try:
            return batch if self.arrange is None else self.arrange(batch)
        except DataError as error:
            raise DataError(f"{self._where(position)}: {error}") from error

    def _where(self, position: int) -> str:
        return f"batch {position}" if self.name == "data" else f"batch {position} of {self.name}"

    def _cut_repeated(self, batch: Batch, before: int, share: Share) -> Batch:
        """Return the last batch of a pass without the data that a DistributedSampler repeats after its part."""
        assert share.rows is not None
        if before + batch.n_samples > share.rows + share.repeated:
            raise DataError(
                f"the DistributedSampler of the {self.name} gives {share.rows + share.repeated} data, the last of them "
                f"repeated, and the loader makes more samples of them; expected one of each. Use "
                "sampler=lw.samples.Part(dataset, process_group), which repeats none."
            )
        return batch.take(SampleRows().per_sample(batch.inputs, batch.n_samples), slice(share.rows - before))

    def requiring_same_rows(self) -> Data:
        """Return the same data, refused from now on if a pass does not give the rows of the first one.

        For methods that compare numbers of several passes. A list in memory is the same at every pass.
        """
        data = self if self.in_memory else replace(self, same_rows=True)
        data._refuse_other()
        return data

    def is_repeatable(self) -> bool:
        """Return whether two passes give the same rows, in any order; read a loader until two were complete."""
        while not self.in_memory and self.readings.passes < 2:
            for _ in self.batches("reading again", weighted=True):
                pass
        return not self.readings.difference

    @property
    def findings(self) -> tuple[str, ...]:
        """Remarks if passes gave different rows, for results that are sums over one pass or another, or too few."""
        share, findings = self.share, []
        if share is not None and share.parts > self.processes.size:
            findings.append(
                f"the sampler of the {self.name} gives one of {share.parts} parts, and this fit reads no other: give "
                "process_group=torch.distributed.group.WORLD to fit all of them."
            )
        elif share is not None and share.dropped:
            findings.append(
                f"the DistributedSampler of the {self.name} drops {share.dropped} of them (drop_last=True), so no "
                "process reads these. Use sampler=lw.samples.Part(dataset, process_group)."
            )
        if self.readings.difference:
            findings.append(
                f"a later pass over the {self.name} {self.readings.difference}: numbers that come from different "
                "passes (noise, bases, curvature) belong to different data. Use no random augmentation, and "
                "drop_last=False."
            )
        return tuple(findings)

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

    def _read(self, source: Loader) -> Iterator[object]:
        """Yield what the source yields, and draw its random numbers from the stream if there is one."""
        if self.in_memory:  # a list draws no random numbers
            return read_items(source, nullcontext)
        return read_items(source, undisturbed if self.stream is None else self.stream.drawing)

    def peek(self) -> tuple[Batch, Batch]:
        """Return the first batch, and the first batch with several samples, if one of the first three has several.

        Otherwise both are the first batch. With one sample alone, nothing shows whether samples mix. The source is
        opened once, and not read further than needed. A process without data gets the batches of another one.

        Raises:
            DataError: If no process has data, or several have the same first batch: each must read its own part.

        >>> x = torch.arange(4.0)[:, None]
        >>> first, several = Data([(x[:1], x[:1]), (x[1:], x[1:])], torch.device("cpu")).peek()
        >>> first.n_samples, several.n_samples
        (1, 3)
        """
        batches = list[Batch]()
        for batch in islice(self.batches("", weighted=True), PEEKED_BATCHES):
            batches.append(batch)
            if batch.n_samples > 1:
                break
        if not self.processes.is_single_process:
            batches = self._with_first_available(batches)
        return batches[0], batches[-1] if batches[-1].n_samples > 1 else batches[0]

    def refuse_same_parts(self) -> None:
        """Raise if two processes have read the same rows, in whatever order; asked after passes until one is complete.

        A loader that shuffles shows it only then.
        """
        if self.processes.is_single_process or self.readings.compared:
            return
        first = None if self.share is not None else self.readings.first
        complete = self.in_memory or self.readings.first is not None
        facts = self.processes.gather_values((complete, None if first is None else first.mark()))
        self.readings.compared = all(each for each, _ in facts)
        refuse_copies([mark for _, mark in facts], self.name, lambda one, other: not one.difference(other))

    def _with_first_available(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches; those of the first process that has data where this one has none.

        Raise if two processes have the same first batch: their data would count twice. A batch of one sample may be the
        same by chance, and a sampler that gives parts is known to give others.
        """
        known = self.share is not None or not batches or batches[0].n_samples < 2
        facts = self.processes.gather_values((bool(batches), None if known else batch_digest(batches[0])))
        refuse_copies([mark for _, mark in facts], self.name)
        if all(has for has, _ in facts):
            return batches
        lent = self.processes.first_available([batch.to(torch.device("cpu")) for batch in batches] or None)
        if lent is None:
            raise DataError(
                f"{self.name} is empty in all processes: no batch was yielded; expected at least one with rows, "
                "(inputs, targets)."
            )
        return batches or [batch.to(self.device) for batch in lent]

    def _check_and_move(self, batch: Batch, position: int) -> Batch:
        if batch.targets.is_complex():
            raise DataError(f"targets are {batch.targets.dtype}; expected real numbers. Give real and imaginary parts.")
        move = lambda t: (t.detach() if t.requires_grad else t).to(self.device, non_blocking=True)
        inputs, targets = move_inputs(batch.inputs, move), move_inputs(batch.targets, move)
        where = self._where(position)
        check_finite(inputs, f"inputs of {where}")
        check_finite(targets, f"targets of {where}")
        weights = None
        if batch.weights is not None:
            weights = as_weights(batch.weights, batch.n_samples, self.device, where)
        return Batch(inputs, targets, batch.key, weights)
