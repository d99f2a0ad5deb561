"""The time of one prediction: p50 and p99 of calls with 1 and 32 rows, from one thread and from eight.

    python -m benchmarks.serving [--peer PYTHON] [--only WORD ...] [--calls 400] [--rounds 3] [--threads 1 8]

Each case is one process, PyTorch with one thread; ``--peer`` names a python that has laplace-torch 0.3, which runs the
same networks in processes of its own, in turn with ours. Calls of a process alternate in blocks of twenty, so that a
busy moment of the machine falls on all of them. Printed are medians over the rounds of processes, in milliseconds.
A prediction is read: ``.probs``, or ``.mean`` and ``.std``. From eight threads, each thread calls one posterior in a
loop; a time is that of one call, in which the others run too. "ONNX" is the exported module in ONNX Runtime. Calls end
after ``SECONDS`` of each, so that slow ones have fewer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))  # another library's environment runs this file by its path
from benchmarks import models

BATCHES, BLOCK, SECONDS = (1, 32), 20, 2.0
Call = Callable[[], object]
Data = list[tuple[Tensor, Tensor]]
NETWORKS: dict[str, tuple[int, tuple[int, ...], int, Callable[[], nn.Module]]] = {
    # rows, shape of a row, outputs, and the network; the tiny one has 99 weights
    "tiny": (50, (8,), 3, lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))),
    "MLP": (1000, (784,), 10, models.mlp),
    "LeNet": (500, (1, 28, 28), 10, models.lenet),
}
# The network, the weights, and what the fit is: "default", "validation" (a mixture), or "given" (a prior, no mixture).
CASES = [
    *((name, task, "last layer", "default") for name in NETWORKS for task in ("classes", "numbers")),
    ("MLP", "classes", "last layer", "given"), ("MLP", "classes", "last layer", "validation"),
    ("MLP", "classes", "Kron", "given"), ("MLP", "classes", "Kron", "validation"), ("MLP", "numbers", "Kron", "given"),
    ("LeNet", "classes", "Kron", "given"), ("LeNet", "classes", "Kron", "default"),
]  # fmt: skip
COLUMNS = ("forward", "predict", "module", "ONNX", "peer")
LINE = "{:40s} {:>4s} {:>7s}" + " {:>15s}" * len(COLUMNS)


def problem(case: tuple[str, ...]) -> tuple[nn.Module, Data, Data]:
    """Return a briefly trained network, its data, and as many others like them."""
    rows, shape, outputs, build = NETWORKS[case[0]]
    torch.manual_seed(0)
    model, (data, other) = build(), (models.images(rows, shape, 128, outputs, seed) for seed in (0, 1))
    if case[1] == "numbers":
        numbers = lambda x, y: F.one_hot(y, outputs).float() + 0.1 * x.flatten(1)[:, :1]
        data, other = ([(x, numbers(x, y)) for x, y in each] for each in (data, other))
        return trained_on_numbers(model, data), data, other
    return models.briefly_trained(model, data, 20), data, other


def trained_on_numbers(model: nn.Module, data: Data) -> nn.Module:
    """Train by a few steps of Adam on the squared error."""
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for x, y in (data * 20)[:20]:
        optimiser.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimiser.step()
    return model.eval()


def lapwing_calls(case: tuple[str, ...]) -> dict[str, Call]:
    """Return the calls of this library by name and number of rows."""
    import lapwing as lw

    model, data, other = problem(case)
    _, task, weights, fit = case
    posterior = lw.fit(
        model, data, "classification" if task == "classes" else "regression",
        weights=lw.last_layer if weights == "last layer" else None, prior=1.0 if fit == "given" else None,
        validation=other if fit == "validation" else None, progress=False,
    )  # fmt: skip
    module = posterior.as_module("probs" if task == "classes" else "moments")
    calls: dict[str, Call] = {}
    for n in BATCHES:
        x = data[0][0][:n].clone()
        calls[f"forward {n}"] = partial(plain, model, x)
        calls[f"predict {n}"] = partial(lambda x: read(posterior.predict(x)), x)
        calls[f"module {n}"] = partial(module, x)
        if weights == "last layer" and (run := onnx_call(module, x)):
            calls[f"ONNX {n}"] = run
    return calls


def read(predictive: Any) -> object:
    """Return the numbers that a user reads."""
    return predictive.probs if hasattr(predictive, "probs") else (predictive.mean, predictive.std)


def plain(model: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of the network, without a graph."""
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


def onnx_call(module: nn.Module, x: Tensor) -> Call | None:
    """Return the call of the exported module in ONNX Runtime; None if it is not installed."""
    if not all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        return None
    onnxruntime = import_module("onnxruntime")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(module, (x,), f"{folder}/net.onnx", dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(f"{folder}/net.onnx", options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def laplace_calls(case: tuple[str, ...]) -> dict[str, Call]:
    """Return the calls of laplace-torch by number of rows; it has no mixtures, so that these cases are its default."""
    from laplace import Laplace

    model, data, _ = problem(case)
    _, task, weights, fit = case
    posterior: Any = Laplace(
        model, "classification" if task == "classes" else "regression", hessian_structure="kron",
        subset_of_weights="last_layer" if weights == "last layer" else "all", prior_precision=1.0,
    )  # fmt: skip
    posterior.fit(torch.utils.data.DataLoader(torch.utils.data.ConcatDataset(
        [torch.utils.data.TensorDataset(x, y) for x, y in data]), batch_size=128
    ))  # fmt: skip
    if fit != "given":
        posterior.optimize_prior_precision()
    return {f"peer {n}": partial(posterior, data[0][0][:n].clone()) for n in BATCHES}


def latencies(calls: dict[str, Call], times: int, threads: int) -> dict[str, tuple[float, float]]:
    """Return p50 and p99 of every call in milliseconds, from so many threads at once."""
    taken: dict[str, list[float]] = {name: [] for name in calls}

    def block(call: Call, seconds: list[float]) -> None:
        until = time.perf_counter() + SECONDS
        for _ in range(BLOCK):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
            if time.perf_counter() > until:
                return

    for call in calls.values():
        block(call, [])
    for _ in range(max(1, times // (BLOCK * threads))):
        for name, call in calls.items():
            if sum(taken[name]) > SECONDS * threads:
                continue
            if threads == 1:
                block(call, taken[name])
                continue
            each = [threading.Thread(target=block, args=(call, taken[name])) for _ in range(threads)]
            for thread in each:
                thread.start()
            for thread in each:
                thread.join()
    return {name: (1e3 * quantile(s, 0.5), 1e3 * quantile(s, 0.99)) for name, s in taken.items()}


def quantile(seconds: list[float], level: float) -> float:
    """Return a quantile of the times."""
    return sorted(seconds)[min(len(seconds) - 1, int(level * len(seconds)))]


def child(number: int, library: str, times: int, threads: list[int]) -> None:
    """Measure one case with one library and print the result as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    calls = (lapwing_calls if library == "lapwing" else laplace_calls)(CASES[number])
    print(json.dumps({str(n): latencies(calls, times, n) for n in threads}))


def run_child(python: str, number: int, library: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a process of its own measured; nothing if it failed."""
    command = [python, str(Path(__file__)), "--child", str(number), library, "--calls", str(options.calls)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--threads", *map(str, options.threads)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
        return {}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def lines(case: tuple[str, ...], rounds: list[dict[str, Any]], threads: list[int]) -> Iterator[str]:
    """Yield the lines of the table for one case."""
    title = ", ".join(case)
    for count in map(str, threads):
        for n in map(str, BATCHES):
            cells = []
            for column in COLUMNS:
                pairs = [each[count][f"{column} {n}"] for each in rounds if f"{column} {n}" in each.get(count, {})]
                p50, p99 = (statistics.median(values) for values in zip(*pairs)) if pairs else (0.0, 0.0)
                cells.append(f"{p50:.3f} / {p99:.2f}" if pairs else "-")
            yield LINE.format(title, n, count, *cells)
            title = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", help="a python with laplace-torch 0.3")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names hold all of these words")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(int(options.child[0]), options.child[1], options.calls, options.threads)
        return 0
    from benchmarks.spine import cpu_name

    pythons = {"lapwing": sys.executable, **({"laplace-torch": options.peer} if options.peer else {})}
    only = f" --only {' '.join(options.only)}" if options.only else ""
    print(f"$ python -m benchmarks.serving{' --peer PYTHON' if options.peer else ''}{only}\n")
    print("p50 / p99 in ms of one call; peer: laplace-torch 0.3" if options.peer else "p50 / p99 in ms of one call")
    print(LINE.format("", "rows", "threads", *COLUMNS))
    for number, case in enumerate(CASES):
        if all(word in ", ".join(case) for word in options.only):
            rounds = [
                run_child(python, number, library, options)
                for _ in range(options.rounds)
                for library, python in pythons.items()
            ]
            print(*lines(case, rounds, options.threads), sep="\n", flush=True)
    print(f"\n{cpu_name()}, python {sys.version.split()[0]}, torch {torch.__version__}, one thread of PyTorch a call")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
