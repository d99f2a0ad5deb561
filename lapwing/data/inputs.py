"""Inputs of a network (nestings of tensors and sets of samples), and batches of inputs, targets and weights.

How many samples a batch has and which rows are whose is decided here, for the whole library. Inputs may hold tensors
with a row for each sample beside tensors that all samples share (a context beside x). The rule: **a tensor has a row
for each sample if its first dimension is the number of samples and no other batch has shown that all samples share
it.** The number of samples is that of the targets in a batch of data, and that of the outputs where a model has run. A
set of samples says both itself: a ``SampleSet``, such as graphs, sequences of several lengths, or one sample of many
tokens, is one leaf of the inputs.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lapwing.errors import DataError
from lapwing.runtime.settings import describe_kind, is_array, is_data, rebuild


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


Inputs = Any  # a tensor or a set of samples, or a tuple, list or mapping of those
Leaf = Tensor | SampleSet
LEAVES = (Tensor, SampleSet, PackedSequence)


def map_leaves(
    tree: Inputs, change: Callable[[Any], Any], of_array: Callable[[Any], Any] = lambda array: array
) -> Inputs:
    """Return the same nesting with ``change`` applied to every leaf: a tensor, or a set of samples.

    Arrays that are not tensors become what ``of_array`` returns. Other values stay as they are.
    """
    if isinstance(tree, LEAVES):
        return change(tree)
    if is_array(tree):
        return of_array(tree)
    if isinstance(tree, Mapping):
        return {key: map_leaves(value, change, of_array) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return rebuild(tree, [map_leaves(value, change, of_array) for value in tree])
    return tree


def map_tensors(tree: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return the same nesting with ``change`` applied to every tensor, those of sets of samples too."""
    return map_leaves(tree, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf.changed(change))


def as_tensors(tree: Inputs, dtype: torch.dtype, what: str = "inputs") -> Inputs:
    """Return the same nesting with every NumPy array and data frame as a tensor; everything else as it is.

    Floating-point numbers get the dtype, which is that of the model; whole numbers stay whole, for embeddings. NumPy is
    not imported here: an array exists only where its user has imported it. ``what`` names them in errors.

    Raises:
        DataError: If an array holds text, objects or complex numbers, or has masked entries.
    """
    return map_leaves(tree, lambda leaf: leaf, lambda array: _from_array(array, dtype, what))


def _from_array(given: Any, dtype: torch.dtype, name: str) -> Tensor:
    """Return a copy of an array as a tensor."""
    array = given.__array__()
    kind = {"b": torch.bool, "i": torch.int64, "u": torch.int64, "f": dtype}.get(array.dtype.kind)
    masked = isinstance(given, sys.modules["numpy"].ma.MaskedArray)
    if kind is None or masked:
        what = "masked entries" if masked else f"the dtype {array.dtype}"
        raise DataError(
            f"the {name} are a {type(given).__name__} with {what}; expected numbers. Encode text and categories as "
            "numbers, fill in what is missing, and give the values as one array."
        )
    plain = array.astype({torch.bool: "bool", torch.int64: "int64"}.get(kind, "float64"), order="C")
    return torch.from_numpy(plain).to(kind)


def tensors_in(tree: Inputs) -> Iterator[Tensor]:
    """Yield every tensor of a nesting, in order, those of sets of samples too."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, SampleSet):
        yield from tensors_of(tree)
    elif isinstance(tree, Mapping | tuple | list):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(part)


def has_sets(inputs: Inputs) -> bool:
    """Return whether there are leaves that are not tensors: sets of samples."""
    return any(not isinstance(leaf, Tensor) for _, leaf in named_leaves(inputs))


def plain_tensors(inputs: Inputs) -> list[Tensor]:
    """Return every leaf of a nesting that is a tensor, in order, without those of sets of samples."""
    return [leaf for _, leaf in named_leaves(inputs) if isinstance(leaf, Tensor)]


def wants_slopes(tree: Inputs) -> bool:
    """Return whether results are to be differentiable in these inputs: one requires a gradient, and grad mode is on."""
    if isinstance(tree, Tensor):
        return tree.requires_grad and torch.is_grad_enabled()
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(tree))


def named_leaves(inputs: Inputs, place: str = "inputs") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a nesting in order, with a name for its place.

    The number of dimensions is part of the name: a context for each sample has one more than a context for all samples.
    """
    if isinstance(inputs, LEAVES):
        yield f"{place}: {inputs.ndim if isinstance(inputs, Tensor) else 'set'}", inputs
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from named_leaves(value, f"{place}[{key!r}]")
    elif isinstance(inputs, tuple | list):
        for number, value in enumerate(inputs):
            yield from named_leaves(value, f"{place}[{number}]")


def place_name(key: str) -> str:
    """Return the name of a place without the number of dimensions, for messages."""
    return key.rpartition(":")[0]


def is_loader(x: object, places: frozenset[str]) -> bool:
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
    return places <= {place_name(key) for key, _ in named_leaves(inputs)}


def is_numbers(value: object) -> bool:
    """Return whether the value is a list or tuple of numbers, nested or not, without any tensor.

    >>> is_numbers([[0.5, 1.0], [2.0, 3.0]]), is_numbers([(0.5, torch.zeros(2))]), is_numbers([])
    (True, False, False)
    """
    first = value
    while isinstance(first, tuple | list) and first:
        first = first[0]
    return first is not value and isinstance(first, int | float) and not any(named_leaves(value))


def is_real_tensor(inputs: object) -> TypeGuard[Tensor]:
    """Return whether the inputs are one tensor of real numbers."""
    return isinstance(inputs, Tensor) and inputs.is_floating_point()


def n_rows(leaf: Leaf) -> int:
    """Return the number of rows of a tensor, 0 for a single number, or the number of samples of a set."""
    if isinstance(leaf, Tensor):
        return leaf.shape[0] if leaf.ndim else 0
    return len(leaf)


def call_model(model: Callable[..., Any], inputs: Inputs, **more: Any) -> Any:
    """Call the model as its signature asks: mappings by keyword, tuples by position, anything else as one argument.

    ``more`` are further arguments by keyword.
    """
    if not isinstance(inputs, Tensor) and any(isinstance(leaf, SampleSet) for _, leaf in named_leaves(inputs)):
        inputs = map_leaves(inputs, lambda leaf: leaf if isinstance(leaf, Tensor) else leaf.arguments())
    if isinstance(inputs, Mapping):
        if accepts_arguments(model, (), inputs):
            return model(**inputs, **more)
        names = [*_signature(model).parameters]
        if set(names) & set(inputs):  # it takes some of these keys by name: others are too many, or some are missing
            raise DataError(
                f"a batch has the input keys {sorted(map(str, inputs))}; the model takes {', '.join(names)}. Leave the "
                "others out of the batch, or wrap the model in a module that takes them."
            )
        return model(inputs, **more)
    if isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence):
        return model(*inputs, **more) if accepts_arguments(model, tuple(inputs)) else model(inputs, **more)
    return model(inputs, **more)


def has_argument(model: Callable[..., object], name: str) -> bool:
    """Return whether the model's signature has an argument of this name."""
    return name in _signature(model).parameters


def _signature(model: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(getattr(model, "forward", model))


def accepts_arguments(
    model: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object] | None = None
) -> bool:
    """Return whether the model's signature takes these arguments."""
    try:
        _signature(model).bind(*args, **(kwargs or {}))
    except TypeError:
        return False
    return True


def refuse_meta(*trees: Inputs) -> None:
    """Raise if a tensor is on the meta device: it has a shape and no numbers."""
    if any(tree.is_meta if isinstance(tree, Tensor) else any(t.is_meta for t in tensors_in(tree)) for tree in trees):
        raise DataError("a tensor is on the meta device and has no numbers; expected data on a CPU or a GPU.")


def move_inputs(inputs: Inputs, move: Callable[[Tensor], Tensor]) -> Inputs:
    """Return the inputs with every tensor moved; packed sequences and nested tensors become sets of samples.

    Raises:
        DataError: If a tensor has no numbers.
    """
    if type(inputs) is Tensor and not inputs.is_nested and not inputs.is_meta:
        return move(inputs)
    inputs = map_leaves(inputs, to_sample_set)
    refuse_meta(inputs)
    return map_tensors(inputs, move)


def check_finite(tree: Inputs, what: str) -> None:
    """Raise if any floating-point tensor holds NaN or infinity."""
    refuse_meta(tree)
    for each in (tree,) if isinstance(tree, Tensor) else tensors_in(tree):
        tensor = each.detach()
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


@dataclass(frozen=True)
class SampleRows:
    """The knowledge from earlier batches about each tensor: whether it has a row for each sample.

    ``known`` maps places (see ``named_leaves``) to answers. A tensor of one row shows nothing: it may be shared in some
    batches and have a row for each sample in others.

    >>> import torch
    >>> x, context = torch.zeros(4, 2), torch.zeros(6, 3)
    >>> rows = SampleRows().with_batch((x, context), 4)
    >>> rows.per_sample((torch.zeros(6, 2), context), 6)
    (True, False)
    >>> rows.count((torch.zeros(5, 2), context))
    5
    """

    known: Mapping[str, bool] = field(default_factory=dict)

    def count(self, inputs: Inputs) -> int | None:
        """Return the number of samples, or None where only the outputs of a model can say it."""
        if isinstance(inputs, Tensor) and inputs.ndim:
            return inputs.shape[0]
        leaves = list(named_leaves(inputs))
        for _, leaf in leaves:
            if not isinstance(leaf, Tensor):
                return len(leaf)
        if not any(n_rows(t) or t.ndim for _, t in leaves if isinstance(t, Tensor)):
            if is_numbers(inputs):
                raise DataError(
                    f"the inputs are {describe_kind(inputs)} with numbers in it; expected a tensor "
                    "or an array. Make one of them: np.asarray(inputs), or torch.as_tensor(inputs)."
                )
            raise DataError(
                f"the inputs are {type(inputs).__name__} and hold no tensor with a batch dimension; expected (B, ...). "
                "Of a loader give one batch: next(iter(loader))."
            )
        rows = {key: n_rows(t) for key, t in leaves}
        sizes = {n for key, n in rows.items() if self.known.get(key)} or {
            n for key, n in rows.items() if n and key not in self.known
        }
        return sizes.pop() if len(sizes) == 1 else None

    def per_sample(self, inputs: Inputs, n_samples: int) -> tuple[bool, ...]:
        """Return for each tensor, in order, whether it has a row for each sample."""
        return tuple(n_rows(t) == n_samples and self.known.get(key, True) for key, t in named_leaves(inputs))

    def is_undecided(self, inputs: Inputs, n_samples: int) -> bool:
        """Return whether a tensor met for the first time may have as many rows as there are samples by chance."""
        flags = self.per_sample(inputs, n_samples)
        new = any(flag and key not in self.known for flag, (key, _) in zip(flags, named_leaves(inputs), strict=True))
        return new and n_samples > 1 and sum(flags) > 1

    def refuse_change(self, inputs: Inputs, n_samples: int) -> None:
        """Raise if a tensor that had a row for each sample has another number of rows now."""
        for key, t in named_leaves(inputs):
            if self.known.get(key) and n_rows(t) not in (1, n_samples):  # one row is spread over all samples
                raise DataError(
                    f"{place_name(key)} has {n_rows(t)} rows for {n_samples} samples and had one for each sample in an "
                    "earlier batch; expected the same kind of tensor in all. Use another batch size for the first "
                    "batch if all samples share it, or give each sample its row."
                )

    def with_batch(self, inputs: Inputs, n_samples: int) -> SampleRows:
        """Return the knowledge after a batch of this many samples."""
        flags = self.per_sample(inputs, n_samples)
        answers = {key: flag for flag, (key, t) in zip(flags, named_leaves(inputs), strict=True) if n_rows(t) != 1}
        return SampleRows({**self.known, **answers})


def per_sample_in_both(one: tuple[bool, ...], other: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which tensors have a row for each sample in two batches: what is shared in one is shared in both.

    An empty tuple stands for no batch.
    """
    if one and len(one) != len(other):
        raise DataError(f"batches of {len(one)} and of {len(other)} input tensors; expected as many in all of them.")
    return tuple(a and b for a, b in zip(one, other, strict=True)) if one else other


def take(inputs: Inputs, per_sample: Sequence[bool], rows: slice | Tensor) -> Inputs:
    """Return some samples of a batch: tensors with a row for each sample are cut, the others stay whole."""
    flags = iter(per_sample)
    return map_leaves(inputs, lambda leaf: _take_rows(leaf, rows) if next(flags) else leaf)


def _take_rows(leaf: Any, rows: slice | Tensor) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[rows if isinstance(rows, slice) else rows.to(leaf.device)]
    return leaf.take(torch.arange(len(leaf))[rows] if isinstance(rows, slice) else rows)


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch: the inputs of the network, and the targets."""

    inputs: Inputs
    targets: Tensor
    key: str | None = None  # of the targets, in a batch that is a mapping
    weights: Tensor | None = None  # of the samples, (B,) in float64; None if each counts once

    @property
    def targets_are_labels(self) -> bool:
        """Whether the targets are what a model takes as ``labels``: they have that name, or are one of its inputs."""
        same = lambda t: t.shape == self.targets.shape and bool(((t == self.targets) | (self.targets < 0)).all())
        return self.key == "labels" or any(same(t) for t in tensors_in(self.inputs) if not t.is_floating_point())

    @property
    def n_samples(self) -> int:
        """The number of samples: that of the targets."""
        return len(self.targets) if self.targets.ndim else 1

    def to(self, device: torch.device) -> Batch:
        """Return the batch on another device."""
        weights = None if self.weights is None else self.weights.to(device)
        return Batch(map_tensors(self.inputs, lambda t: t.to(device)), self.targets.to(device), self.key, weights)

    def weights_of(self, rows: slice | Tensor) -> Tensor | None:
        """Return the weights of some samples; None if each counts once."""
        return None if self.weights is None else _take_rows(self.weights, rows)

    def take(self, per_sample: Sequence[bool], rows: slice | Tensor) -> Batch:
        """Return some samples; ``per_sample`` says which tensors of the inputs have a row for each."""
        inputs, targets = take(self.inputs, per_sample, rows), _take_rows(self.targets, rows)
        return Batch(inputs, targets, self.key, self.weights_of(rows))


def batch_digest(batch: Batch) -> bytes:
    """Return a few bytes that two batches share only if all their numbers are the same."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in (*tensors_in(batch.inputs), batch.targets):
        total.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.digest()


def merge_batches(batches: Iterable[Batch], rows: int | Callable[[Inputs], int]) -> Iterator[Batch]:
    """Yield consecutive batches of plain tensors, joined until they hold at least ``rows`` samples.

    ``rows`` is a number, or a function from the inputs of a batch to the number for samples like these.

    The result of a pass does not depend on the batch size, but its cost does: each call has a fixed cost.
    Batches that are not tensors of one shape stay as they are.
    """
    waiting: list[Batch] = []
    count, form, enough = 0, None, 0
    for batch in batches:
        before, form = form, _row_form(batch)
        if waiting and form != before:
            yield _concat(waiting)
            waiting, count = [], 0
        if form is not None and form != before:
            enough = rows(batch.inputs) if callable(rows) else rows
        waiting.append(batch)
        count += batch.n_samples
        if form is None or count >= enough:
            yield _concat(waiting)
            waiting, count = [], 0
    if waiting:
        yield _concat(waiting)


def _row_form(batch: Batch) -> tuple[object, ...] | None:
    """Return shapes and dtypes of the rows of inputs and targets; None if the inputs are not one tensor of rows."""
    x, y = batch.inputs, batch.targets
    if not isinstance(x, Tensor) or not x.ndim or not y.ndim or len(x) != len(y):
        return None
    return x.shape[1:], x.dtype, y.shape[1:], y.dtype, batch.weights is None


def _concat(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    inputs, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("inputs", "targets"))
    weights = [batch.weights for batch in batches if batch.weights is not None]
    return Batch(inputs, targets, weights=torch.cat(weights) if weights else None)
