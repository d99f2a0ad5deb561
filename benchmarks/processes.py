"""What several processes gain: a Kron fit of a LeNet by two processes on two cores against one process on one core.

    python -m benchmarks.processes [--rows 20000] [--times 5] [--size 2]

The processes are started once and meet by gloo, one thread and one core each. In turn, the first one fits all images
alone while the others wait, and all fit together, each its part; then the eigendecompositions are done in both cases.
On a machine with other work the clock says little, so the processor's time is shown too: the longest of the processes
against the one alone, which is the gain on cores of their own. Messages are counted by their bytes, and timed alone.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pickle
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist

import lapwing as lw
from benchmarks.clock import machine
from benchmarks.models import lenet

BATCH = 256
WAIT = datetime.timedelta(minutes=10)


def images(rows: int) -> tuple[Tensor, Tensor]:
    """Return generated images and classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, 28, 28, generator=generator)
    return x, torch.randint(10, (rows,), generator=generator)


def batches(x: Tensor, y: Tensor, part: int, parts: int) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of one of several parts."""
    rows = slice(len(x) * part // parts, len(x) * (part + 1) // parts)
    return list(zip(x[rows].split(BATCH), y[rows].split(BATCH), strict=True))


def fitted(data: list[tuple[Tensor, Tensor]], group: Any) -> tuple[lw.Fitted, dict[str, float]]:
    """Return a fitted posterior, ready to predict, and the seconds by the clock and of the processor."""
    torch.manual_seed(0)
    model = lenet().eval()
    clock, cpu = time.perf_counter(), time.process_time()
    posterior = lw.fit(model, data, "classification", prior=1.0, progress=False, process_group=group)
    fit, cpu_fit = time.perf_counter() - clock, time.process_time() - cpu
    posterior.predict(data[0][0][:1])  # with the eigendecompositions, which one process alone does when it needs them
    seconds = {"fit": fit, "cpu": cpu_fit, "ready": time.perf_counter() - clock}
    return posterior, seconds | {"cpu ready": time.process_time() - cpu}


def messages(posterior: lw.Fitted) -> dict[str, int]:
    """Return the bytes of the sums that are reduced, and of the eigendecompositions that are sent."""
    core: Any = posterior.posterior
    factors = [factor for block in core.curvature.blocks for factor in (block.inp, block.out)]
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)
    return {
        "sums": sum(size(factor.tensors().values()) for factor in factors),
        "eigenvectors": sum(size((factor.spectrum.values, factor.spectrum.basis.vectors)) for factor in factors),
    }


def exchanged(count: int) -> float:
    """Return the seconds of the shortest of ten sums of so many bytes over all processes."""
    tensor, seconds = torch.zeros(max(1, count // 8), dtype=torch.float64), []
    for _ in range(10):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def work(rank: int, size: int, port: int, rows: int, times: int, folder: str) -> None:
    """Fit alone and together in turn, as one of the processes; write what was measured."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout=WAIT, rank=rank, world_size=size)
    x, y = images(rows)
    fitted(batches(x[:BATCH], y[:BATCH], 0, 1), None)  # once before anything is timed
    alone, together = [], []
    for _ in range(times):
        dist.barrier()
        if rank == 0:
            alone.append(fitted(batches(x, y, 0, 1), None)[1])
        dist.barrier()
        posterior, seconds = fitted(batches(x, y, rank, size), dist.group.WORLD)
        together.append(seconds)
    sent = messages(posterior)
    result = {"alone": alone, "together": together, "sent": sent, "sum s": exchanged(sent["sums"])}
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def measured(size: int, rows: int, times: int) -> list[dict[str, Any]]:
    """Return what each process measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (size, port, rows, times, folder), size)  # type: ignore[attr-defined]
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]


def main() -> None:
    """Print the gains and the sizes of messages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--size", type=int, default=2)
    settings = parser.parse_args()
    print(machine(1))
    found = measured(settings.size, settings.rows, settings.times)
    alone = {name: [one[name] for one in found[0]["alone"]] for name in found[0]["alone"][0]}
    rounds = list(zip(*(each["together"] for each in found), strict=True))
    together = {name: [max(one[name] for one in each) for each in rounds] for name in alone}
    print(f"LeNet, Kron, {settings.rows:,} images, {settings.size} processes; the slowest process counts")
    words = {"fit": "fit, clock", "ready": "with eigendecompositions, clock", "cpu": "fit, processor",
             "cpu ready": "with eigendecompositions, processor"}  # fmt: skip
    for name, text in words.items():
        one, all_, median = min(alone[name]), min(together[name]), statistics.median(together[name])
        gain, middle = one / all_, statistics.median(alone[name]) / median
        print(
            f"{text:36s} alone {one:6.2f} s, together {all_:6.2f} s (best of {settings.times}): {gain:.2f} times as "
            f"fast, efficiency {gain / settings.size:.2f}; medians {middle:.2f}"
        )
    sent = found[0]["sent"]
    print(
        f"sums {sent['sums'] / 2**20:.2f} MB, reduced in {1e3 * found[0]['sum s']:.1f} ms; eigendecompositions "
        f"{sent['eigenvectors'] / 2**20:.2f} MB"
    )


if __name__ == "__main__":
    main()
