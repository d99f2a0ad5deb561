"""Fits and predictions over data that are never in memory: seconds, microseconds per row and peak memory against n.

    python -m benchmarks.streams [--rows 10000000] [--methods kron diagonal last_layer valla predict] [--threads 2]
    python -m benchmarks.streams --points [10 50 0] [--least 1000] [--rows 1000000]

The data are generated batch by batch as they are read, by an ``IterableDataset`` that gives the same rows at every
pass: ten features, one target, y = g(x) + noise with a smooth g. The network is an MLP 10-50-1, trained on 100,000 of
the rows. Every fit is the default one with a given method: prior by the evidence, Student tails by the residuals;
"predict" is ``predict(loader)`` of a Kron posterior, with the mean and the standard deviation of all rows. n goes from
``--least``, 10,000, up to ``--rows`` in powers of ten. Each line comes from a process of its own, so that its peak
memory is its own; "reading" is a pass over the data alone, "loss" one with a forward pass of the network. A fit to 100
rows comes before the time is taken: the first fit of a process loads parts of PyTorch.

``--points`` is a study of ``VaLLA``: the held-out NLL and the mean standard deviation of f against the number M of
inducing points, for several n, with the exact posterior (``Full``) beside them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import lapwing as lw
from benchmarks.clock import Peak, machine

FEATURES, HIDDEN, BATCH, NOISE = 10, 50, 8192, 0.3
SEEN = 100_000  # rows that the network is trained on
HELD_OUT = 20_000
POINTS = (10, 25, 50, 100, 200, 400, 0)  # zero stands for the exact posterior


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of generated rows; batch k has the seed ``seed + k``, so that every pass is the same."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.rows, self.seed = rows, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.rows, BATCH):
            size = min(BATCH, self.rows - start)
            generator = torch.Generator().manual_seed(self.seed + start // BATCH)
            x = torch.randn(BATCH, FEATURES, generator=generator)[:size]
            noise = torch.randn(BATCH, 1, generator=generator)[:size]
            yield x, target(x) + NOISE * noise


def target(x: Tensor) -> Tensor:
    """Return the smooth function that the rows are generated with, (B, 1)."""
    pairs = x[:, 0::2] * x[:, 1::2]
    return (x[:, :3].sin().sum(1, keepdim=True) + 0.3 * pairs.tanh().sum(1, keepdim=True)) / 2


def network() -> nn.Module:
    """Return the network before training."""
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).eval()


def trained() -> nn.Module:
    """Return the network after two epochs over the first rows."""
    torch.manual_seed(0)
    model = network()
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(2):
        for x, y in Rows(SEEN):
            for part in torch.arange(len(x)).split(128):
                optimiser.zero_grad()
                (model(x[part]) - y[part]).square().mean().backward()
                optimiser.step()
    return model


METHODS: dict[str, dict[str, Any]] = {
    "kron": {"method": lw.Kron()},
    "diagonal": {"method": lw.Diagonal()},
    "last_layer": {"method": lw.Kron(), "weights": lw.last_layer},
    "valla": {"method": lw.VaLLA(optimiser="adam")},  # the default above 20,000 outputs
}


def reading(model: nn.Module, rows: int) -> None:
    """Read the data once."""
    for _ in Rows(rows):
        pass


def loss(model: nn.Module, rows: int) -> None:
    """Run the network once over the data."""
    with torch.no_grad():
        for x, y in Rows(rows):
            (model(x) - y).square().sum()


def predicted(model: nn.Module, rows: int) -> Callable[[], None]:
    """Return the prediction of all rows by a posterior that was fitted to some of them."""
    posterior = lw.fit(model, Rows(SEEN), "regression", method=lw.Kron(), progress=False)

    def run() -> None:
        predictive = posterior.predict(Rows(rows, seed=10**6), progress=False)
        assert len(predictive.mean) == len(predictive.std) == rows

    return run


def measured(name: str, rows: int, weights: str) -> dict[str, float]:
    """Return seconds and peak memory of one case, in this process, with the weights in this file."""
    model = network()
    model.load_state_dict(torch.load(weights))
    if name in ("reading", "loss"):
        call: Callable[[], Any] = lambda: {"reading": reading, "loss": loss}[name](model, rows)
    elif name == "predict":
        call = predicted(model, rows)
    else:
        fit = lambda n: lw.fit(model, Rows(n), "regression", progress=False, **METHODS[name])
        fit(100)  # what a process loads once
        call = lambda: fit(rows)
    start = time.perf_counter()
    with Peak() as peak:
        call()
    seconds = time.perf_counter() - start
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "more": peak.mb, "peak": highest}


def apart(name: str, rows: int, weights: str, threads: int) -> dict[str, float]:
    """Return the same from a process of its own."""
    case = ["--case", name, str(rows), weights, "--threads", str(threads)]
    command = [sys.executable, "-m", "benchmarks.streams", *case]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    numbers: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return numbers


def sizes(least: int, most: int) -> list[int]:
    """Return powers of ten times the least number of rows, up to the most."""
    return [least * 10**k for k in range(12) if least * 10**k <= most]


def table(names: list[str], rows: list[int], threads: int) -> None:
    """Print the table of all methods and numbers of rows."""
    with tempfile.TemporaryDirectory() as folder:
        weights = f"{folder}/weights.pt"
        torch.save(trained().state_dict(), weights)
        _table(names, rows, weights, threads)


def _table(names: list[str], rows: list[int], weights: str, threads: int) -> None:
    print(f"{'':11s}{'rows':>11s}{'seconds':>10s}{'us per row':>12s}{'peak MB':>9s}{'of it new':>11s}")
    for name in names:
        for n in rows:
            numbers = apart(name, n, weights, threads)
            each = 1e6 * numbers["seconds"] / n
            figures = f"{n:>11,d}{numbers['seconds']:>10.2f}{each:>12.3f}{numbers['peak']:>9.0f}"
            print(f"{name:11s}{figures}{numbers['more']:>11.0f}", flush=True)


def inducing(rows: list[int], points: list[int]) -> None:
    """Print the held-out NLL and the mean standard deviation of VaLLA against M, and of the exact posterior."""
    model = trained()
    warnings.simplefilter("ignore", lw.errors.CalibrationWarning)  # few points do harm, which is the question here
    x, y = (torch.cat(parts) for parts in zip(*Rows(HELD_OUT, seed=10**6), strict=True))
    print(f"{'rows':>11s}" + "".join(f"{'M = ' + str(m) if m else 'exact':>16s}" for m in points))
    for n in rows:
        print(f"{n:>11,d}", end="", flush=True)
        for m in points:
            method = lw.VaLLA(num_inducing=m, optimiser="adam") if m else lw.Full()
            tuner = lw.tuners.MaximiseEvidence()
            posterior = lw.fit(model, Rows(n), "regression", method=method, tuner=tuner, progress=False)
            predictive = posterior.predict(x)
            nll = -float(predictive.log_prob(y).mean())
            print(f"{nll:>8.4f}{float(predictive.epistemic_variance.sqrt().mean()):>8.4f}", end="", flush=True)
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--least", type=int, default=10_000)
    names = ["reading", "loss", *METHODS, "predict"]
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--points", type=int, nargs="*", help="numbers of inducing points; 0 is the exact posterior")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    description = machine(given.threads)
    if given.case:
        name, rows, weights = given.case
        print(json.dumps(measured(name, int(rows), weights)))
        return
    print(description)
    rows = sizes(given.least, given.rows)
    if given.points is not None:
        inducing(rows, given.points or [*POINTS])
    else:
        table(given.methods, rows, given.threads)


if __name__ == "__main__":
    main()
