"""The number of samples that are handled at once: enough to be fast, few enough to fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from lapwing.core.memory import PIECE, evenly, runs, working

GRADIENTS = 0.5  # share of the memory for intermediate results that the gradients of one chunk may take
USUAL = 1.25  # copies of its gradients that a backward pass has in memory, as measured; at most two
# For speed, in bytes:
JOINED = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}  # the gradients of joined batches
CACHED = 32 * 2**20  # gradients of a chunk on a CPU: near its caches a chunk is a third faster
AT_ONCE = 3  # results of operations that a forward pass without gradients has in memory: input, output, a branch
MOST = 1024  # joining more samples than this gains nothing


def temporary(device: torch.device) -> int:
    """Return the bytes that one intermediate result may take."""
    return int(PIECE * working(device))


def near(device: torch.device) -> int:
    """Return the bytes that many small results may take together: enough to keep a GPU busy, near a CPU's caches."""
    return min(JOINED.get(device.type, JOINED["cuda"]), temporary(device))


@dataclass(frozen=True)
class Footprint:
    """The memory that one sample takes, in numbers, measured at the first batch."""

    width: int  # gradients, for each seed
    patches: int  # the largest unfolded input
    whole: int = 0  # Jacobians that are kept whole, for each seed
    graph: int = 0  # outputs of all operations, which a forward pass that records gradients may keep
    live: int = 0  # gradients that a pass holds at once for each seed if each is dropped after its use; 0: unknown
    widest: int = 0  # the largest result of an operation, of all layers; 0: unknown
    streams: bool = False  # whether each is dropped after its use; not saved

    @property
    def held(self) -> int:
        """The gradients that are in memory at once, for each seed."""
        return self.live if self.streams and self.live else self.width

    @property
    def passing(self) -> int:
        """The numbers that a forward pass keeps for gradients, or those of a few layers where it keeps fewer."""
        return max(self.graph, AT_ONCE * self.widest)

    @property
    def numbers(self) -> dict[str, int]:
        """What a file keeps of it."""
        return {name: value for name, value in asdict(self).items() if name != "streams"}

    def scaled(self, positions: int, measured: int) -> Footprint:
        """Return the footprint of samples with this many tokens or pixels, from that of samples with ``measured``.

        Results of all layers grow with their number; Jacobians that are kept whole do not.
        """
        grows, more, fewer = ("width", "patches", "graph", "live", "widest"), max(1, positions), max(1, measured)
        return replace(self, **{name: -(-getattr(self, name) * more // fewer) for name in grows})

    def joined(self, seeds: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many samples are worth joining into one pass: their gradients should stay small."""
        forward = _itemsize(dtype) * AT_ONCE * self.widest
        most = min(MOST, temporary(device) // max(1, forward))
        return max(1, min(most, near(device) // self._bytes(seeds, dtype, 1)))

    def chunks(
        self, batch: int, seeds: int, dtype: torch.dtype, device: torch.device, most: int | None = None
    ) -> Iterator[slice]:
        """Yield runs of at most ``most`` samples whose gradients for this many seeds fit the byte budget."""
        if device.type == "cpu":
            fast = max(16, CACHED // self._bytes(seeds, dtype, 2))
            most = fast if most is None else min(most, fast)
        return self.largest(batch, seeds, dtype, device, most)

    def largest(
        self, batch: int, seeds: int, dtype: torch.dtype, device: torch.device, most: int | None = None
    ) -> Iterator[slice]:
        """Yield runs of samples that fit the byte budget, as many samples as fit, where fewer would not be faster."""
        each = self._bytes(seeds, dtype, 2)  # a backward pass needs about the same memory again
        return runs(batch, each + _itemsize(dtype) * self.passing, device, GRADIENTS, most)

    def seed_runs(
        self, seeds: int, batch: int, dtype: torch.dtype, device: torch.device, unit: int = 1
    ) -> Iterator[slice]:
        """Yield runs of seeds whose gradients fit the byte budget, for a chunk of ``batch`` samples.

        Each has a multiple of ``unit`` seeds, as their number has.
        """
        most = self.at_once(batch, dtype, device)
        for run in evenly(seeds // unit, most // unit):
            yield slice(unit * run.start, unit * run.stop)

    def forward_runs(self, batch: int, dtype: torch.dtype, device: torch.device) -> Iterator[slice]:
        """Yield runs of samples whose activations fit the byte budget, for passes that record no gradients."""
        return runs(batch, _itemsize(dtype) * (self.passing + self.patches), device, GRADIENTS)

    def chunk_bytes(self, batch: int, seeds: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return the bytes that the largest chunk of a batch usually takes: less than chunks are made for."""
        first = next(iter(self.chunks(batch, seeds, dtype, device)))
        samples = first.stop - first.start
        run = min(seeds, self.at_once(samples, dtype, device))
        return int(samples * (USUAL * self._bytes(run, dtype, 1) + _itemsize(dtype) * self.passing))

    def at_once(self, samples: int, dtype: torch.dtype, device: torch.device, width: int = 0) -> int:
        """Return how many seeds fit the byte budget together for this many samples; at least one.

        ``width`` counts further numbers for each sample and seed.
        """
        fixed = _itemsize(dtype) * (self.patches + self.passing)
        each = _itemsize(dtype) * (2 * (self.held + self.whole) + width)
        return max(1, (int(GRADIENTS * working(device)) - samples * fixed) // (samples * each))

    def _bytes(self, seeds: int, dtype: torch.dtype, copies: int) -> int:
        return _itemsize(dtype) * (copies * max(1, seeds) * (self.held + self.whole) + self.patches)


def _itemsize(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits // 8
