"""The rows of data that a posterior knows, as a sketch of hashes, so that data that are used twice are noticed.

A row is the inputs and the target of one sample. Its mark has 40 bits of a hash of the inputs, 22 of one of the target,
and a bit that says whether the row repeats. A sketch keeps the rows whose inputs have the smallest hashes, at most
65,536 of them, a random part of all: the share of known rows among those is that among all.

Rows of a table of few discrete columns repeat by themselves. How often a new row is known is estimated from the rows
themselves: by the share of those that are there once (Good 1953). Only what goes beyond that is reuse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.data.inputs import Inputs, n_rows, named_leaves
from lapwing.data.processes import Processes
from lapwing.errors import DataError, warn_caller
from lapwing.runtime.states import Array, Maybe, PartOf, Stored, Whole, distinct, saved, stored

TRAINING, VALIDATION = 2**16, 2**15  # rows of a sketch, of 8 bytes each
INPUT_BITS, TARGET_BITS = 40, 22
MAX_HASHED_WORDS = 2**14  # words of a row that are hashed; a wider one is added up to so many
SHORT_TYPES = {torch.bool, torch.uint8, torch.int8, torch.int16}  # whole numbers that float32 holds
CHUNK_NUMBERS = 2**18  # numbers that are hashed at a time
MIXED_NUMBERS = 2**14  # numbers of small batches that are mixed at once, at most
MIXED_BATCHES = 16  # of the size of the first
MAX_MARKS = 4 * TRAINING  # marks of a pass that goes on
TOTAL = 2**53
MIN_SHARE = 0.1  # share of reused rows that is worth a remark
SHARE_ERRORS = 4.0  # standard errors by which the share must exceed the expected one
MIN_SURPRISE = 7.0  # minus the log-probability below which it is no coincidence that all rows are known
MIN_DIFFERENT_ROWS = 10  # different rows from which two data sets with the same rows are no coincidence


@saved
@dataclass(frozen=True, eq=False)
class RowSketch(Stored):
    """The marks of some rows, those of the smallest hashes, and sums over all rows.

    Args:
        marks: The marks (m,), ascending and distinct.
        rows: The number of all rows.
        total: A sum over all rows that does not depend on their order.
        inputs: The same for inputs without their targets.
        limit: Hashes of inputs below which all rows are kept; 2⁴⁰ if none was left out.
    """

    marks: Tensor = stored(Array((None,), 0, 2**63 - 1, whole=True, also=distinct))
    rows: int = stored(Whole())
    total: int = stored(Whole(0, TOTAL - 1))
    inputs: int = stored(Whole(0, TOTAL - 1))
    limit: int = stored(Whole(0, 2**INPUT_BITS), 2**INPUT_BITS)

    @classmethod
    def of(cls, parts: list[Tensor], rows: int, totals: tuple[int, int], limit: int, size: int) -> RowSketch:
        """Return the sketch of these marks, at most ``size`` of them; a mark that is there twice repeats."""
        marks = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        marks = marks[_inputs_of(marks) < limit].sort().values
        if bool((marks[1:] >> 1 == marks[:-1] >> 1).any()):
            keys, place, counts = torch.unique_consecutive(marks >> 1, return_inverse=True, return_counts=True)
            repeats = counts > 1
            repeats[place[marks & 1 == 1]] = True
            marks = (keys << 1) | repeats
        if len(marks) > size:
            limit = int(_inputs_of(marks[size]))
            marks = marks[_inputs_of(marks) < limit]
        return cls(marks, rows, *totals, limit)

    @property
    def totals(self) -> tuple[int, int]:
        """Both sums."""
        return self.total, self.inputs

    def __add__(self, other: RowSketch) -> RowSketch:
        """Return the sketch of both sets of rows, of the size of the first one."""
        totals = ((self.totals[0] + other.totals[0]) % TOTAL, (self.totals[1] + other.totals[1]) % TOTAL)
        limit = min(self.limit, other.limit)
        return self.of([self.marks, other.marks], self.rows + other.rows, totals, limit, TRAINING)

    def cut(self, size: int) -> RowSketch:
        """Return the sketch with at most this many marks."""
        return self.of([self.marks], self.rows, self.totals, self.limit, size)

    def everywhere(self, processes: Processes) -> RowSketch:
        """Return the sketch of the rows of all processes."""
        if processes.is_single_process:
            return self
        facts = processes.gather_values((self.rows, self.totals, self.limit))
        marks = processes.gather_rows(self.marks)
        assert marks is not None
        totals = (sum(each[1][0] for each in facts) % TOTAL, sum(each[1][1] for each in facts) % TOTAL)
        rows, limit = sum(each[0] for each in facts), min(each[2] for each in facts)
        return self.of([marks], rows, totals, limit, TRAINING)

    def singles(self, of_inputs: bool) -> tuple[Tensor, int]:
        """Return the keys of the rows, and how many rows are there once."""
        if not of_inputs:
            return self.marks >> 1, int((self.marks & 1 == 0).sum())
        keys, counts = _inputs_of(self.marks).unique_consecutive(return_counts=True)
        repeated = _inputs_of(self.marks[self.marks & 1 == 1]).unique_consecutive()
        return keys, int((counts == 1).sum()) - int(torch.isin(keys[counts == 1], repeated).sum())

    def reuse(self, other: RowSketch, of_inputs: bool = False) -> Reuse | None:
        """Return how much of other data is among these rows, beyond what repeats by itself; None if little is.

        Args:
            other: The sketch of the other data.
            of_inputs: Whether to compare inputs without their targets.
        """
        (known, single), (asked, _) = self.singles(of_inputs), other.singles(of_inputs)
        limit = min(self.limit, other.limit)
        asked = asked[(asked if of_inputs else asked >> TARGET_BITS) < limit]
        tested, n = len(asked), self.rows * self.limit / 2**INPUT_BITS
        if not tested or not self.rows:
            return None
        found = int(torch.isin(asked, known).sum())
        same = self.rows == other.rows and self.totals[of_inputs] == other.totals[of_inputs]
        if same and len(self.marks) >= MIN_DIFFERENT_ROWS:  # the same rows, in any order
            return Reuse(1.0, True, self.rows)
        expected = min(1.0, max(0.0, 1 - single / n))
        inside = min(max(expected, 1 / n), max(1 - 1 / n, 1 / n))  # an estimate of zero or one is not certain
        error = math.sqrt(max(0.0, inside * (1 - inside)) * (tested + tested**2 / n))
        share = (found / tested - expected) / max(1 - expected, 1e-12)
        if share < MIN_SHARE or found - tested * expected <= SHARE_ERRORS * error:
            return None
        most = min(1.0, expected + SHARE_ERRORS * math.sqrt(expected * (1 - expected) / n) + 3 / n)
        whole = found == tested and tested * -math.log(most) > MIN_SURPRISE
        return Reuse(share, whole and (limit == 2**INPUT_BITS or tested >= 20), other.rows)


@dataclass(frozen=True)
class Reuse:
    """The part of some data that was used before: the share of their rows, whether all were, and their number."""

    share: float
    whole: bool
    rows: int


@dataclass(eq=False)
class Sketching:
    """The sketch of a pass while it goes on.

    What waits and the marks so far are written into memory that is seldom taken: small pieces that outlive a batch
    would lie between its large tensors, and the memory of these could not be used again.
    """

    rows: int = 0
    totals: tuple[int, int] = (0, 0)
    limit: int = 2**INPUT_BITS
    marks: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    kept: int = 0  # of ``marks``
    sums: Tensor | None = None  # of the inputs of batches that wait: many are mixed at once
    targets: Tensor | None = None  # of these batches, unless they have none
    waiting: int = 0  # rows that wait
    comparable: bool = True  # whether rows of all batches could be hashed

    def add(self, inputs: Inputs, targets: Tensor | None, count: int) -> None:
        """Add the rows of a batch."""
        sums = _sums(inputs, count) if self.comparable else None
        if sums is None or (targets is not None and n_rows(targets) != count):
            self.comparable = False
            return
        self.rows += count
        if self.sums is None or not _same_form(targets, self.targets):
            self._mix_waiting()
            most = MIXED_NUMBERS // (1 + (0 if targets is None else targets[:1].numel()))
            room = min(most, MIXED_BATCHES * count)
            self.sums = sums.new_empty(room)
            self.targets = None if targets is None else targets.new_empty((room, *targets.shape[1:]))
        if self.waiting + count > len(self.sums):
            self._mix_waiting()
        if count > len(self.sums):
            self._mix(sums, targets)
            return
        here = slice(self.waiting, self.waiting + count)
        self.sums[here] = sums
        if targets is not None and self.targets is not None:
            self.targets[here] = targets
        self.waiting += count

    def _mix_waiting(self) -> None:
        """Turn the rows that wait into marks."""
        if self.waiting and self.sums is not None:
            self._mix(self.sums[: self.waiting], None if self.targets is None else self.targets[: self.waiting])
        self.waiting = 0

    def _mix(self, of_inputs: Tensor, targets: Tensor | None) -> None:
        """Turn rows into marks, from the sums of their inputs (n,) and their targets."""
        of_targets = of_inputs * 0 if targets is None else _products(targets, 20_014).to(of_inputs)
        of_inputs, of_targets = _mix_bits(of_inputs), _mix_bits(of_targets)
        joint = _mix_bits(of_inputs + 31 * of_targets)
        sums = [int((h & (TOTAL - 1)).sum()) for h in (joint, of_inputs)]
        self.totals = ((self.totals[0] + sums[0]) % TOTAL, (self.totals[1] + sums[1]) % TOTAL)
        top = _shift_right(of_inputs, 64 - INPUT_BITS)
        marks = (top << (TARGET_BITS + 1)) | (_shift_right(of_targets, 64 - TARGET_BITS) << 1)
        for part in marks[top < self.limit].split(TRAINING):
            if self.kept + len(part) > MAX_MARKS:
                self._cut()
            if self.kept + len(part) > len(self.marks):
                longer = torch.empty(min(MAX_MARKS, 4 * (self.kept + len(part))), dtype=torch.int64)
                longer[: self.kept] = self.marks[: self.kept]
                self.marks = longer
            self.marks[self.kept : self.kept + len(part)] = part
            self.kept += len(part)

    def _cut(self) -> None:
        """Leave out the marks of the largest hashes."""
        sketch = RowSketch.of([self.marks[: self.kept]], self.rows, self.totals, self.limit, TRAINING)
        self.kept, self.limit = len(sketch.marks), sketch.limit
        self.marks[: self.kept] = sketch.marks

    def value(self) -> RowSketch | None:
        """Return the sketch; None if some rows cannot be compared."""
        if not self.comparable:
            return None
        self._mix_waiting()
        return RowSketch.of([self.marks[: self.kept]], self.rows, self.totals, self.limit, TRAINING)


def _same_form(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether the rows of two tensors have the same shape and dtype; None has no rows."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape[1:] == other.shape[1:]


@saved
@dataclass(frozen=True, eq=False)
class KnownRows(Stored):
    """The rows that a posterior was fitted to and validated on, each as a sketch; None where there is none."""

    training: RowSketch | None = stored(Maybe(PartOf(RowSketch)), None)
    validation: RowSketch | None = stored(Maybe(PartOf(RowSketch)), None)

    def with_training(self, more: RowSketch | None) -> KnownRows:
        """Return the rows with more training data."""
        both = self.training is not None and more is not None
        return replace(self, training=self.training + more if both else None)  # type: ignore[operator]

    def with_validation(self, more: RowSketch | None) -> KnownRows:
        """Return the rows with validation data."""
        if more is None:
            return self
        whole = more if self.validation is None else self.validation + more
        return replace(self, validation=whole.cut(VALIDATION))

    def warn_reused(
        self, data: RowSketch | None, name: str, remedy: str, refuses: bool, of_inputs: bool = False
    ) -> tuple[str, ...]:
        """Warn of each use of the data before, and return the remarks; if it ``refuses``, raise if all were used."""
        remarks = []
        for use, rows in (("training", self.training), ("validation", self.validation)):
            reuse = None if rows is None or data is None else rows.reuse(data, of_inputs)
            if reuse is not None:
                remark = (
                    f"{reuse.share:.0%} of the {name} are {use} data of this fit too, beyond what repeats by chance; "
                    f"expected data that were not used before. {remedy}"
                )
                if refuses and reuse.whole:
                    raise DataError(remark)
                warn_caller(remark)
                remarks.append(remark)
        return tuple(remarks)


def row_marks(inputs: Inputs, count: int) -> Tensor | None:
    """Return a hash of the inputs of each sample, (n,); None where samples are not rows."""
    sums = _sums(inputs, count)
    return None if sums is None else _mix_bits(sums.clone())


def _sums(inputs: Inputs, count: int) -> Tensor | None:
    """Return a sum (n,) over the inputs of each sample, to be mixed; None where samples are not rows.

    It does not depend on the dtype: numbers are rounded to float32, and 1 is 1.0. Zeros at the end of a row change
    nothing, so that padding does not.
    """
    leaves = sorted(named_leaves(inputs), key=lambda pair: pair[0])
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    if len(tensors) < len(leaves) or any(t.is_quantized for t in tensors):
        return None
    sums = [_products(t, 2 * i) for i, t in enumerate(t for t in tensors if n_rows(t) == count)]
    return reduce(torch.add, sums) if sums else None


def _products(t: Tensor, seed: int) -> Tensor:
    """Return the product of the words of each row with fixed random odd numbers, modulo 2⁶⁴: (n,)."""
    t = torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
    t = t.reshape(len(t), -1)
    parts = [t] if t.numel() <= CHUNK_NUMBERS else t.split(max(1, CHUNK_NUMBERS // t.shape[1]))
    products = [_product(part, seed) for part in parts]
    return products[0] if len(products) == 1 else torch.cat(products)


def _product(t: Tensor, seed: int) -> Tensor:
    near = t.float()
    pairs = F.pad(near, (0, 1)) if t.shape[1] % 2 else near.contiguous()
    if pairs.storage_offset() % 2:
        pairs = pairs.clone()
    product = _times(pairs.view(torch.int64), seed)  # words of two numbers each
    if t.is_floating_point() or t.dtype in SHORT_TYPES:
        return product
    return product + _times(t.long() - near.double().long(), seed + 1)  # what float32 does not hold


def _times(words: Tensor, seed: int) -> Tensor:
    if words.shape[1] > MAX_HASHED_WORDS:
        words = torch.stack(
            [F.pad(part, (0, MAX_HASHED_WORDS - part.shape[1])) for part in words.split(MAX_HASHED_WORDS, 1)]
        ).sum(0)
    pattern = _pattern(seed, words.device)[: words.shape[1]]
    return words @ pattern if words.is_cpu else (words * pattern).sum(1)  # GPUs have no such product of integers


@lru_cache(maxsize=64)
def _pattern(seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-(2**63), 2**63 - 1, (MAX_HASHED_WORDS,), generator=generator) | 1).to(device)


def _mix_bits(h: Tensor) -> Tensor:
    """Return integers whose bits depend on all bits of h, one to one."""
    h = (h ^ _shift_right(h, 30)).mul_(-0x40A7B892E31B1A47)
    h = h.bitwise_xor_(_shift_right(h, 27)).mul_(-0x6B2FB644ECCEEE15)
    return h.bitwise_xor_(_shift_right(h, 31))


def _shift_right(h: Tensor, bits: int) -> Tensor:
    """Return h shifted to the right, with zeros from the left."""
    return (h >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _inputs_of(marks: Tensor) -> Tensor:
    return marks >> (TARGET_BITS + 1)
