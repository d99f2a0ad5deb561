"""What a pass over a loader has read, in a few numbers that depend neither on the order of rows nor on the batches.

Two passes over the same data have the same numbers, shuffled or not. Random augmentation, other rows or fewer of them
change the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.core.known_rows import Sketching
from lapwing.core.random import normal

TOLERANCE = 1e-9  # relative gap between two sums of the same rows in another order
NUMBERS = 2**22  # numbers that are converted to float64 at a time


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
        tables = [_table(t) for t in tensors if t.layout == torch.strided and not t.is_quantized]
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
            each = torch.cat([part.double() @ pattern for part in table.split(max(1, NUMBERS // max(1, len(pattern))))])
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
        return f"gave other rows, by {gap:.2g} of their size" if gap > TOLERANCE else ""


def _table(t: Tensor) -> Tensor:
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

    def add(self, reading: Reading) -> None:
        """Keep the first pass, and how a later one differs from it."""
        self.passes += 1
        if self.first is None:
            self.first = reading
        else:
            self.difference = self.difference or reading.difference(self.first)
