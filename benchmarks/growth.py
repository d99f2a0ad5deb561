"""Seconds and memory of fits and variances against rows, weights, classes and batch size, with their slopes.

    python -m benchmarks.growth [--axes rows weights classes batch] [--seconds 20] [--out FILE] [--picture FILE]

One number grows at a time; the others stay at 1,000 rows, 3,000 weights, 3 classes and batches of 256. The network is
an MLP with two hidden layers of one width and 32 inputs, with random weights: costs do not depend on them. With more
classes its width stays, so that the last layer grows; batch sizes are tried with 10,000 rows. Fits have a
given prior; a variance is that of all outputs at 64 inputs, timed at the second call. Each figure comes from a process
of its own with one thread; memory is its resident peak above what it held before. The same batch is read again and
again, so that data take neither time nor memory. A method stops where a fit takes longer than ``--seconds``, or where
it refuses, with the error that it raises.

A slope is that of the logarithms, between the last two sizes: 1 is proportional. "plain" is a forward and a backward
pass over the same batches, and a forward pass of the 64 inputs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.clock import Peak, best_of, epoch, forward, machine
from benchmarks.spine import cpu_name

INPUTS, TESTED = 32, 64
USUAL = {"rows": 1_000, "weights": 3_000, "classes": 3, "batch": 256}
SIZES = {
    "rows": [10**k for k in range(3, 8)],
    "weights": [10**k for k in range(3, 9)],
    "classes": [2, 10, 100, 1_000, 10_000],
    "batch": [1, 10, 100, 1_000, 10_000],
}
METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "Diagonal": lambda: {"method": lw.Diagonal()},
    "Kron": lambda: {"method": lw.Kron()},
    "last layer": lambda: {"method": lw.Kron(), "weights": lw.last_layer},
    "Full": lambda: {"method": lw.Full()},
    "KernelSpace": lambda: {"method": lw.KernelSpace()},
    "Sampled": lambda: {"method": lw.Sampled()},
    "VaLLA": lambda: {"method": lw.VaLLA(num_inducing=20)},
}
FIGURES = {"fit s": "seconds of a fit", "fit MB": "memory of a fit", "variance s": "seconds of 64 variances",
           "variance MB": "memory of 64 variances"}  # fmt: skip


class Repeated:
    """A loader that gives one batch again and again, and the last one in part."""

    def __init__(self, x: Tensor, y: Tensor, rows: int) -> None:
        self.x, self.y, self.rows = x, y, rows

    def __len__(self) -> int:
        return -(-self.rows // len(self.x))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.rows, len(self.x)):
            size = min(len(self.x), self.rows - start)
            yield self.x[:size], self.y[:size]


def network(weights: int, classes: int) -> nn.Module:
    """Return the MLP that has at most this number of weights with the usual number of classes."""
    count = lambda width: (INPUTS + 1) * width + (width + 1) * (width + USUAL["classes"])
    width = 1
    while count(2 * width) <= weights:
        width *= 2
    while count(width + 1) <= weights:
        width += 1
    torch.manual_seed(0)
    layers = (nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes))
    return nn.Sequential(*layers).eval()


def measure(method: str, sizes: dict[str, int]) -> dict[str, float]:
    """Return the figures of one method in this process."""
    machine(1)
    generator = torch.Generator().manual_seed(0)
    shape = min(sizes["batch"], sizes["rows"])
    x = torch.randn(shape, INPUTS, generator=generator)
    y = torch.randint(0, sizes["classes"], (shape,), generator=generator)
    tested = torch.randn(TESTED, INPUTS, generator=generator)
    model, data = network(sizes["weights"], sizes["classes"]), Repeated(x, y, sizes["rows"])
    if method == "plain":
        with Peak() as fit_peak:
            fit_seconds = epoch(model, data)  # type: ignore[arg-type]
        with Peak() as peak:
            seconds = forward(model, [(tested, y)])
        return {"fit s": fit_seconds, "fit MB": fit_peak.mb, "variance s": seconds, "variance MB": peak.mb}
    arguments = {"prior": 1.0, "progress": False, **METHODS[method]()}
    warm = Repeated(x[:10], y[:10], 10)  # the first fit of a process loads parts of PyTorch
    lw.fit(network(1_000, sizes["classes"]), warm, "classification", prior=1.0, method=lw.Diagonal(), progress=False)
    fitted: list[lw.Fitted] = []
    with Peak() as fit_peak:
        fit_seconds = best_of(1, lambda: fitted.append(lw.fit(model, data, "classification", **arguments)))
    with Peak() as peak:
        _ = fitted[0].functions(tested).variance
    seconds = best_of(2, lambda: fitted[0].functions(tested).variance)
    return {"fit s": fit_seconds, "fit MB": fit_peak.mb, "variance s": seconds, "variance MB": peak.mb}


def climb(method: str, axis: str, limit: float) -> list[dict[str, float] | str]:
    """Return the figures of one method at growing sizes, each from a process of its own, and why it ended."""
    found: list[dict[str, float] | str] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for size in SIZES[axis]:
        sizes = {**USUAL, axis: size}
        if axis == "batch":
            sizes["rows"] = SIZES["batch"][-1]
        call = [sys.executable, "-m", "benchmarks.growth", "--cell", method, json.dumps(sizes)]
        try:
            done = subprocess.run(call, capture_output=True, text=True, env=environment, timeout=4 * limit, check=False)
        except subprocess.TimeoutExpired:
            return [*found, f"more than {4 * limit:.0f} s"]
        if done.returncode:
            reasons = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit {done.returncode}"]
            return [*found, reasons[-1]]
        found.append(json.loads(done.stdout.splitlines()[-1]))
        last = found[-1]
        assert isinstance(last, dict)
        if last["fit s"] + last["variance s"] > limit:
            break
    return found


def slope(sizes: list[int], values: list[float]) -> float:
    """Return the slope of the logarithms between the last two."""
    if len(values) < 2 or min(values[-2:]) <= 0:
        return math.nan
    return math.log(values[-1] / values[-2]) / math.log(sizes[len(values) - 1] / sizes[len(values) - 2])


def table(axis: str, columns: dict[str, list[dict[str, float] | str]]) -> Iterator[str]:
    """Yield the lines of one axis."""
    for figure, title in FIGURES.items():
        yield f"{title}, against {axis}"
        yield f"{'':12s}" + "".join(f"{size:>12,d}" for size in SIZES[axis]) + "   slope"
        for method, found in columns.items():
            values = [each[figure] for each in found if isinstance(each, dict)]
            cells = "".join(f"{value:12.3g}" for value in values) + " " * 12 * (len(SIZES[axis]) - len(values))
            yield f"{method:12s}{cells}{slope(SIZES[axis], values):8.2f}".rstrip().replace("     nan", "       -")
        yield ""
    for method, found in columns.items():
        if found and isinstance(found[-1], str):
            yield f"{method} ends at {SIZES[axis][len(found) - 1]:,d} {axis}: {found[-1]}"
    yield ""


def draw(found: dict[str, dict[str, list[dict[str, float] | str]]], path: Path) -> None:
    """Draw seconds and memory of fits against every axis, with logarithmic scales."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(found), 5.6), layout="constrained")
    axes = figure.subplots(2, len(found), squeeze=False, sharey="row")
    for column, (axis, methods) in enumerate(found.items()):
        for row, name in enumerate(("fit s", "fit MB")):
            ax = axes[row, column]
            for number, (method, cells) in enumerate(methods.items()):
                values = [each[name] for each in cells if isinstance(each, dict)]
                style = {"color": "0.6", "linestyle": "--"} if method == "plain" else {"color": f"C{number - 1}"}
                ax.plot(SIZES[axis][: len(values)], values, marker="o", markersize=3, label=method, **style)
            ax.set(xscale="log", yscale="log", xlabel=axis if row else "")
            if not column:
                ax.set_ylabel(FIGURES[name])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--axes", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seconds", type=float, default=20.0, help="the longest fit that is followed by a larger one")
    parser.add_argument("--out", type=Path, help="file to write the tables to as well")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--cell", nargs=2, metavar=("METHOD", "SIZES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measure(options.cell[0], json.loads(options.cell[1]))))
        return 0
    versions = f"{cpu_name()}, one thread, torch {torch.__version__}, Lapwing {lw.__version__}"
    lines, found = ["$ python -m benchmarks.growth", versions, ""], {}
    print("\n".join(lines))
    for axis in options.axes:
        found[axis] = {method: climb(method, axis, options.seconds) for method in options.methods}
        lines += table(axis, found[axis])
        print("\n".join(table(axis, found[axis])), flush=True)
    if options.out:
        options.out.write_text("\n".join(lines).rstrip() + "\n")
    if options.picture:
        draw(found, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
