"""Weights and buffers of a model that several processes train: the same in all of them after every epoch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.core.processes import Processes


@dataclass(frozen=True, eq=False)
class Buffers:
    """The buffers of a model before an epoch, such as the running statistics of BatchNorm, which depend on the data."""

    model: nn.Module
    processes: Processes
    before: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: nn.Module, processes: Processes) -> Buffers:
        """Return a copy of the buffers as they are; none if there is one process."""
        copied = () if processes.group is None else tuple(buffer.clone() for buffer in model.buffers())
        return cls(model, processes, copied)

    @torch.no_grad()
    def average(self, rows: int) -> None:
        """Replace buffers that changed by their mean over the processes, weighted by their data, and take the weights.

        Whole numbers are those of the first process with the most data. Weights are the same up to rounding, which may
        differ between machines; those of the first process are kept.
        """
        if self.processes.group is None:
            return
        now = list(self.model.buffers())
        changed = [float(not torch.equal(a, b)) for a, b in zip(self.before, now, strict=True)]
        (flags,) = self.processes.sum([torch.tensor(changed)])
        counts = self.processes.each(rows)
        chosen = counts.index(max(counts)) == self.processes.rank
        share = rows / max(1, sum(counts))
        moved = [buffer for buffer, flag in zip(now, flags.tolist(), strict=True) if flag]
        weights = [share if buffer.is_floating_point() else int(chosen) for buffer in moved]
        own = [
            buffer * weight if weight else torch.zeros_like(buffer)
            for buffer, weight in zip(moved, weights, strict=True)
        ]
        for buffer, total in zip(moved, self.processes.sum(own), strict=True):
            buffer.copy_(total)
        parameters = list(self.model.parameters())
        for parameter, first in zip(parameters, self.processes.same(parameters), strict=True):
            parameter.copy_(first)
