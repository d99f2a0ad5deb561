"""Some of the training data, drawn without regard to how they came in batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.data import Data, Inputs, map_tensors, take, tensors_in
from lapwing.core.errors import DataError
from lapwing.core.random import uniform
from lapwing.networks.forward import batch_size


@dataclass(frozen=True, eq=False)
class Pool:
    """Rows of the data: inputs (N, ...), targets (N, ...), and how many there were in all."""

    inputs: Inputs
    targets: Tensor
    total: int

    @classmethod
    def drawn(cls, data: Data, most: int, generator: torch.Generator | None = None) -> Pool:
        """At most so many rows, without replacement and in their order; all of them where there are no more.

        Two passes over the data, none through the network. The same rows whatever the batch size.
        """
        total = sum(batch_size(batch.inputs) for batch in data.batches("counting"))
        order = uniform((total,), generator, torch.empty(0, dtype=torch.float64)).argsort()
        chosen = order[:most].sort().values
        inputs, targets, start = [], [], 0
        for batch in data.batches("choosing"):
            size = batch_size(batch.inputs)
            if batch.targets.shape[:1] != (size,):
                count = batch.targets.shape[0] if batch.targets.ndim else 1
                raise DataError(f"{size} inputs with {count} targets; expected one target for each.")
            mine = chosen[(chosen >= start) & (chosen < start + size)] - start
            if len(mine):
                rows = mine.to(batch.targets.device)
                inputs.append(take(batch.inputs, size, rows))
                targets.append(batch.targets[rows])
            start += size
        return cls(joined(inputs), torch.cat(targets), total)

    def __len__(self) -> int:
        return len(self.targets)

    def rows(self, index: Tensor) -> Inputs:
        """The inputs with these numbers, which may repeat."""
        return take(self.inputs, len(self), index.to(self.targets.device))


def joined(inputs: list[Inputs]) -> Inputs:
    """Batches of inputs of one form as one."""
    flat = [list(tensors_in(one)) for one in inputs]
    if any(t.shape[1:] != first.shape[1:] for one in flat for t, first in zip(one, flat[0], strict=True)):
        raise DataError(
            "inputs of different shapes (padded text, images of several sizes) cannot be put into one batch of "
            "inducing points; expected one shape. Pad all batches alike."
        )
    columns = iter([torch.cat(parts) for parts in zip(*flat, strict=True)])
    return map_tensors(inputs[0], lambda _: next(columns))
