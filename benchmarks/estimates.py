"""What ``lw.check`` estimates against what is then measured: python -m benchmarks.estimates [--networks NAME ...]

For every network and method: epochs and seconds of the fit with a given prior, forward passes of a prediction, the
peak of memory, and the bytes that the posterior stores. "counted" is ``check`` as it is, "timed" is ``check(...,
timed=True)``. The fit includes what the first prediction computes once, such as eigendecompositions. Constants were
chosen on the networks marked *, the others are judged.

Uses the GPU if there is one. On a CPU seconds are those of one thread's processor time, so that other processes do not
matter, and memory is that of PyTorch's allocator. A method that should take longer than ``--seconds`` is not measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lapwing as lw
import lapwing.trials
from benchmarks import large_models, models
from benchmarks.peak import peak
from benchmarks.spine import cpu_name
from lapwing.check import CheckReport
from lapwing.data.batches import Data
from lapwing.errors import LapwingError
from lapwing.methods.base import Method, OverNetworks, Workload
from lapwing.registry import METHODS
from lapwing.runtime.states import State

FIGURES = ("fit epochs", "fit seconds", "passes", "peak MB", "stored MB")


def deep_mlp() -> nn.Module:
    """Return an MLP of six layers of 128 units on 64 features."""
    hidden = [m for k in range(5) for m in (nn.Linear(64 if k == 0 else 128, 128), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(128, 10))


@dataclass(frozen=True)
class Case:
    """A network with random data, for a CPU and, larger, for a GPU."""

    model: Callable[[bool], nn.Module]
    shape: tuple[int, ...]
    data: tuple[int, int]  # on a CPU, on a GPU
    batch: tuple[int, int]
    classes: int = 10
    calibrated: bool = False


CASES = {
    "MLP": Case(lambda gpu: models.mlp(), (784,), (2048, 20_000), (128, 128), calibrated=True),
    "ResNet-20": Case(lambda gpu: models.resnet20(), (3, 32, 32), (64, 2048), (16, 128), calibrated=True),
    "small MLP": Case(lambda gpu: nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3)), (8,), (512, 4096),
                      (64, 128), classes=3),
    "deep MLP": Case(lambda gpu: deep_mlp(), (64,), (2048, 20_000), (128, 128)),
    "LeNet": Case(lambda gpu: models.lenet(), (1, 28, 28), (1024, 10_000), (128, 128)),
    "ResNet-18": Case(lambda gpu: models.resnet18(), (3, 32, 32), (8, 1024), (2, 128)),
    "transformer": Case(lambda gpu: large_models.ViT(10, 224) if gpu else large_models.ViT(10, 64, 96, 4, 4),
                        (3, 64, 64), (64, 512), (16, 32)),
    "1,000 classes": Case(lambda gpu: models.wide_head(), (64,), (64, 2048), (16, 128), classes=1000),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Bench:
    """A network with data, and the clock for it."""

    model: nn.Module
    batches: list[Any]
    x: torch.Tensor
    device: torch.device

    @classmethod
    def of(cls, case: Case) -> Bench:
        gpu = torch.cuda.is_available()
        device, torch_seed = torch.device("cuda" if gpu else "cpu"), 0
        torch.manual_seed(torch_seed)
        shape = (3, 224, 224) if gpu and case.shape == (3, 64, 64) else case.shape
        data = models.images(case.data[gpu], shape, case.batch[gpu], case.classes)
        model = models.briefly_trained(case.model(gpu), data, 4).to(device)
        batches = [(x.to(device), y.to(device)) for x, y in data]
        return cls(model, batches, batches[0][0], device)

    @property
    def count(self) -> int:
        return sum(len(y) for _, y in self.batches)

    def seconds(self, call: Callable[[], Any], once: bool = False) -> float:
        """Return the seconds of the shortest call; long calls are not repeated."""
        return lapwing.trials.shortest_time(call, self.device, once)

    def checked(self, timed: bool | list[str]) -> CheckReport:
        return lw.check(self.model, self.batches[0], data=self.count, timed=timed)

    def plain(self) -> tuple[float, float]:
        """Return the seconds of a plain epoch, and of a forward pass of the inputs that are predicted."""
        parameters = list(self.model.parameters())

        def epoch() -> None:
            for x, _ in self.batches:
                torch.autograd.grad(self.model(x).sum(), parameters)

        def forward() -> None:
            with torch.no_grad():
                self.model(self.x)

        return self.seconds(epoch), self.seconds(forward)

    def measured(self, method: Method, workload: Workload, plain: tuple[float, float]) -> dict[str, float]:
        """Return the figures of a fit and a prediction."""
        problem = lw.fit(self.model, self.batches[:1], "classification", method="map_only", prior=1.0).posterior.problem
        data, found = Data(self.batches, self.device), []
        fit = self.seconds(lambda: found.append(method.fit(problem, data, None)))
        predict = lambda: lapwing.trials.evaluate(found[-1].predict(self.x))
        first, later = self.seconds(predict, once=True), self.seconds(predict)
        fit += max(0.0, first - later)
        figures = {"fit epochs": fit / plain[0], "fit seconds": fit, "passes": later / plain[1]}
        with suppress(LapwingError):  # of a method without a file form
            figures["stored MB"] = sum(t.nbytes for t in _tensors(found[-1].state())) / 2**20
        found.clear()
        # The peak does not depend on the number of steps.
        quick = method.trial(workload) or method
        most = peak(lambda: lapwing.trials.evaluate(quick.fit(problem, data, None).predict(self.x)), self.device)
        return {**figures, "peak MB": most / 2**20}


def _tensors(state: State) -> Iterator[torch.Tensor]:
    yield from state.tensors.values()
    for part in state.parts.values():
        yield from _tensors(part)


def estimated(report: CheckReport, name: str) -> dict[str, float]:
    """Return the figures of one method in a report."""
    cost = report.costs[name]
    figures = {"fit epochs": cost.fit_epochs, "passes": cost.predict_passes}
    figures |= {"peak MB": cost.peak / 2**20, "stored MB": cost.stored / 2**20}
    return figures if cost.fit_seconds is None else {**figures, "fit seconds": cost.fit_seconds}


def run_case(name: str, longest: float, methods: list[str]) -> None:
    """Print what was estimated and measured for one network, a line of JSON for each method."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        lapwing.trials.CLOCK = time.process_time
    bench = Bench.of(CASES[name])
    counted, timed = bench.checked(False), bench.checked(methods)
    plain = bench.plain()
    for key in methods:
        method: Method = METHODS[key]()
        kind = type(method).__name__
        cost = timed.costs[kind]
        row: dict[str, Any] = {"method": kind, "note": cost.note}
        if cost.supported and not isinstance(method, OverNetworks):
            row |= {"counted": estimated(counted, kind), "timed": estimated(timed, kind)}
            expected = (cost.fit_seconds or 0.0) + 4 * (cost.predict_seconds or 0.0)
            try:
                if expected <= longest:
                    row["measured"] = bench.measured(method, timed.workload, plain)
                else:
                    row["note"] = f"it should take {expected:.0f} s"
            except LapwingError as error:
                row["note"] = f"{error!s:.100}"
        print(json.dumps(row), flush=True)


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    if not row.get("measured"):
        return (
            f"  {row['method']:12s} {'not measured: ' + row['note'] if row.get('note') else 'not measured: too long'}"
        )
    cells = []
    for figure in FIGURES:
        got = row["measured"].get(figure)
        values = [row[kind].get(figure) for kind in ("counted", "timed")]
        values = values if figure in ("fit epochs", "passes") else values[1:]
        cells.append(" ".join(f"{_short(v):>7s}" for v in (*values, got)) + f" {_ratio(values[-1], got):>5s}")
    return f"  {row['method']:12s} " + " |".join(cells)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1e5 else f"{value:.0e}"


def _ratio(estimate: float | None, got: float | None) -> str:
    return "-" if not estimate or not got else f"{estimate / got:.2f}"


def shares(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield, for each figure, the share of estimates within a factor of two."""
    for figure in FIGURES:
        for kind in ("counted", "timed"):
            pairs = [(r[kind].get(figure), r["measured"].get(figure)) for r in rows if r.get("measured")]
            ratios = [estimate / got for estimate, got in pairs if estimate and got]
            if ratios and (kind == "counted" or figure in ("fit epochs", "fit seconds", "passes")):
                near = sum(0.5 <= ratio <= 2 for ratio in ratios)
                spread = f"from {min(ratios):.2f} to {max(ratios):.2f}"
                yield f"  {figure:12s} {kind:8s} {near:3d} of {len(ratios):3d}  {spread}"


def measure(name: str, methods: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of a network, measured in a process of its own."""
    arguments = ["--case", name, "--seconds", str(seconds), "--methods", *methods]
    command = [sys.executable, "-m", "benchmarks.estimates", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for text in child.stdout:
            if text.startswith("{"):
                yield {"network": name, **json.loads(text)}


def report(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table."""
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"{cpu_name()}, one thread"
    yield f"{device}, torch {torch.__version__}, python {platform.python_version()}"
    yield "columns: counted, timed, measured, timed / measured; seconds, memory: estimated, measured, ratio"
    for name, case in CASES.items():
        own = {row["method"]: row for row in rows if row["network"] == name}
        if own:
            yield ""
            mark = " *" if case.calibrated else ""
            yield f"{name}{mark}, {case.data[gpu]} data, predictions of {case.batch[gpu]}"
            widths = (31, 23, 31, 23, 23)
            yield f"  {'':12s} " + " |".join(f"{f:>{w}s}" for f, w in zip(FIGURES, widths, strict=True))
            order = [type(kind()).__name__ for kind in METHODS.values()]
            yield from (line(own[method]) for method in order if method in own)
    for calibrated in (True, False):
        some = [row for row in rows if CASES[row["network"]].calibrated is calibrated]
        yield ""
        yield f"within a factor of two, {'networks of the calibration' if calibrated else 'other networks'}:"
        yield from shares(some)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--networks", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seconds", type=float, default=20.0, help="the longest fit that is measured")
    parser.add_argument("--rows", type=Path, help="rows that were measured before; new ones are added to this file")
    parser.add_argument("--out", type=Path, help="where to write the table")
    parser.add_argument("--case", choices=CASES, help="print the rows of one network")
    options = parser.parse_args()
    if options.case:
        run_case(options.case, options.seconds, options.methods)
        return 0
    kept = options.rows.read_text().splitlines() if options.rows and options.rows.exists() else []
    rows = [json.loads(text) for text in kept]
    for name in options.networks:
        known = {row["method"] for row in rows if row["network"] == name}
        methods = [key for key in options.methods if type(METHODS[key]()).__name__ not in known]
        for row in measure(name, methods, options.seconds) if methods else ():
            rows.append(row)
            print(f"{name:14s}{line(row)}", flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    table = "\n".join(report(rows))
    print(f"\n{table}")
    if options.out:
        options.out.write_text(table + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
