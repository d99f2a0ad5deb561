"""How many samples a batch has, and which of its tensors have a row for each sample.

This is the only place that decides it. Inputs may hold tensors with a row for each sample beside tensors that all
samples share (a context beside x). The rule: **a tensor has a row for each sample if its first dimension is the
number of samples and no other batch has shown that all samples share it.** The number of samples is that of the
targets in a batch of data, and that of the outputs where a model has run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lapwing.core.data import Inputs, map_tensors
from lapwing.errors import DataError


def placed(inputs: Inputs, place: str = "inputs") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a nesting in order, with a name for its place.

    The number of dimensions is part of the name: a context for each sample has one more than a context for all samples.
    """
    if isinstance(inputs, Tensor):
        yield f"{place}: {inputs.ndim}", inputs
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from placed(value, f"{place}[{key!r}]")
    elif isinstance(inputs, tuple | list):
        for number, value in enumerate(inputs):
            yield from placed(value, f"{place}[{number}]")


def place_name(key: str) -> str:
    """Return the name of a place without the number of dimensions, for messages."""
    return key.rpartition(":")[0]


def n_rows(tensor: Tensor) -> int:
    """Return the first dimension of a tensor; 0 for a single number, which has no rows."""
    return tensor.shape[0] if tensor.ndim else 0


@dataclass(frozen=True)
class SampleRows:
    """The knowledge from earlier batches about each tensor: whether it has a row for each sample.

    ``known`` maps places (see ``placed``) to answers. A tensor of one row shows nothing: it may be shared in some
    batches and have a row for each sample in others.

    >>> import torch
    >>> x, context = torch.zeros(4, 2), torch.zeros(6, 3)
    >>> rows = SampleRows().learned((x, context), 4)
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
        leaves = list(placed(inputs))
        if not any(t.ndim for _, t in leaves):
            raise DataError(
                f"the inputs are {type(inputs).__name__} and hold no tensor with a batch dimension; expected (B, ...). "
                "Turn arrays into tensors with torch.as_tensor, and give the batches of a loader one by one."
            )
        rows = {key: n_rows(t) for key, t in leaves}
        sizes = {n for key, n in rows.items() if self.known.get(key)} or {
            n for key, n in rows.items() if n and key not in self.known
        }
        return sizes.pop() if len(sizes) == 1 else None

    def per_sample(self, inputs: Inputs, n_samples: int) -> tuple[bool, ...]:
        """Return for each tensor, in order, whether it has a row for each sample."""
        return tuple(n_rows(t) == n_samples and self.known.get(key, True) for key, t in placed(inputs))

    def is_open(self, inputs: Inputs, n_samples: int) -> bool:
        """Return whether a tensor met for the first time may have as many rows as there are samples by chance."""
        flags = self.per_sample(inputs, n_samples)
        new = any(flag and key not in self.known for flag, (key, _) in zip(flags, placed(inputs), strict=True))
        return new and n_samples > 1 and sum(flags) > 1

    def refuse_change(self, inputs: Inputs, n_samples: int) -> None:
        """Raise if a tensor that had a row for each sample has another number of rows now."""
        for key, t in placed(inputs):
            if self.known.get(key) and n_rows(t) not in (1, n_samples):  # one row is spread over all samples
                raise DataError(
                    f"{place_name(key)} has {n_rows(t)} rows for {n_samples} samples and had one for each sample in an "
                    "earlier batch; expected the same kind of tensor in all. Use another batch size for the first "
                    "batch if all samples share it, or give each sample its row."
                )

    def learned(self, inputs: Inputs, n_samples: int) -> SampleRows:
        """Return the knowledge after a batch of this many samples."""
        flags = self.per_sample(inputs, n_samples)
        answers = {key: flag for flag, (key, t) in zip(flags, placed(inputs), strict=True) if n_rows(t) != 1}
        return SampleRows({**self.known, **answers})


def in_both(one: tuple[bool, ...], other: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which tensors have a row for each sample in two batches: what is shared in one is shared in both.

    An empty tuple stands for no batch.
    """
    if one and len(one) != len(other):
        raise DataError(f"batches of {len(one)} and of {len(other)} input tensors; expected as many in all of them.")
    return tuple(a and b for a, b in zip(one, other, strict=True)) if one else other


def take(inputs: Inputs, per_sample: Sequence[bool], rows: slice | Tensor) -> Inputs:
    """Return some samples of a batch: tensors with a row for each sample are cut, the others stay whole."""
    flags = iter(per_sample)
    return map_tensors(
        inputs, lambda t: t[rows if isinstance(rows, slice) else rows.to(t.device)] if next(flags) else t
    )
