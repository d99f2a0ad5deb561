"""The number of samples that are handled at once: enough to be fast, few enough to fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Bytes that each may take:
JOINED = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}  # the gradients of joined batches
CACHED = 32 * 2**20  # gradients of a chunk on a CPU: near its caches a chunk is a third faster
BYTES = {"cpu": 512 * 2**20, "cuda": 3072 * 2**20}  # the gradients of one chunk
TEMPORARY = {"cpu": 256 * 2**20, "cuda": 2048 * 2**20}  # one intermediate result
MOST = 1024  # joining more samples than this gains nothing


def temporary(device: torch.device) -> int:
    """Return the bytes that one intermediate result may take: large pieces suit a GPU, small ones a CPU's caches."""
    return TEMPORARY.get(device.type, TEMPORARY["cuda"])


def near(device: torch.device) -> int:
    """Return the bytes that many small results may take together: enough to keep a GPU busy, near a CPU's caches."""
    return JOINED.get(device.type, JOINED["cuda"])


def _gradients(device: torch.device) -> int:
    """Return the bytes that the gradients of one chunk may take."""
    budget = BYTES.get(device.type, BYTES["cuda"])
    if device.type == "cuda":  # few large chunks keep a GPU busy; a tenth of its memory is usually free
        budget = max(budget, torch.cuda.get_device_properties(device).total_memory // 10)
    return budget


@dataclass(frozen=True)
class Footprint:
    """The memory that one sample takes, in numbers."""

    width: int  # gradients, for each seed
    patches: int  # the largest unfolded input
    whole: int = 0  # Jacobians that are kept whole, for each seed

    def joined(self, seeds: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many samples are worth joining into one pass: their gradients should stay small."""
        return min(MOST, near(device) // self._bytes(seeds, dtype, 1))

    def chunks(
        self, batch: int, seeds: int, dtype: torch.dtype, device: torch.device, most: int | None = None
    ) -> Iterator[slice]:
        """Yield runs of at most ``most`` samples whose gradients for this many seeds fit the byte budget."""
        each = self._bytes(seeds, dtype, 2)  # a backward pass needs about the same memory again
        step = max(1, _gradients(device) // each)
        if device.type == "cpu":
            step = min(step, max(16, CACHED // each))
        step = step if most is None else min(step, most)
        step = -(-batch // -(-batch // step))  # as many chunks, but of even size
        for start in range(0, batch, step):
            yield slice(start, min(batch, start + step))

    def at_once(self, samples: int, dtype: torch.dtype, device: torch.device, width: int = 0) -> int:
        """Return how many seeds fit the byte budget together for this many samples; at least one.

        ``width`` counts further numbers for each sample and seed.
        """
        fixed = self._bytes(0, dtype, 0)
        each = self._bytes(1, dtype, 2) - fixed + torch.finfo(dtype).bits // 8 * width
        return max(1, (_gradients(device) - samples * fixed) // (samples * each))

    def _bytes(self, seeds: int, dtype: torch.dtype, copies: int) -> int:
        return torch.finfo(dtype).bits // 8 * (copies * max(1, seeds) * (self.width + self.whole) + self.patches)
