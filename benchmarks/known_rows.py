"""The cost of the sketch of rows that a fit keeps, as a share of the fit: ``python -m benchmarks.known_rows``."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import lapwing as lw
from lapwing.data.known_rows import Sketching

REPEATS = 5


def seconds(run: Callable[[], Any]) -> float:
    """Return the shortest of several times."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def sketch(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Hash all rows."""
    sketching = Sketching()
    for x, y in batches:
        sketching.add(x, y, len(x))
    sketching.value()


def main() -> int:
    """Time the default fit and the sketch of the same rows."""
    torch.set_num_threads(1)
    for name, rows, width, hidden in (("table", 10_000, 10, 50), ("digits", 5_000, 784, 100)):
        torch.manual_seed(0)
        x, y = torch.randn(rows, width), torch.randint(0, 10, (rows,))
        batches = list(zip(x.split(256), y.split(256), strict=True))
        model = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        fit = seconds(partial(lw.fit, model, batches, "classification", prior=1.0, progress=False))
        own = seconds(partial(sketch, batches))
        print(f"{name}: {rows:,} rows of {width} numbers: fit {fit:.3f} s, sketch {own:.4f} s, {own / fit:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
