"""What launches cost on a GPU: a prediction as it is, and replayed as a CUDA graph: python -m benchmarks.graphs

With ``--compared``, on a processor: what it costs to compare the Jacobian of the first batch of every graph with
autograd's, and to take back what runs write into their copies. The table has processor time of a fit, of the first
prediction of one row and of later ones, with and without both, in alternating runs, and the median ratio of neighbours.

A prediction of a small network is hundreds of small operations, and the processor takes longer to launch them than the
GPU takes to compute them. A CUDA graph records the operations once and launches them together. For each network the
table has the time of a plain forward pass, of the variances as ``posterior.functions`` computes them, the number of
kernels and the time that the GPU is busy with them, which is the least that saving launches can reach, and the time of
the same operations replayed; or why they cannot be recorded: an operation that waits for the GPU ends the recording.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks import large_models, models
from benchmarks.clock import machine
from lapwing.networks import forward as replica
from lapwing.networks.network import Network

REPEATS = 20
PAIRS = 15  # of alternating runs
LATER = 200  # predictions of one row


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of one call, as the mean over several after two to warm up."""
    for _ in range(2):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / REPEATS / 1e3


def busy(call: Callable[[], Any]) -> tuple[float, int]:
    """Return the seconds that the GPU works for one call, and the number of its kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if str(event.device_type).endswith("CUDA")]
    return sum(event.time_range.elapsed_us() for event in kernels) / 1e6, len(kernels)


def replayed(call: Callable[[], Tensor]) -> float | str:
    """Return the seconds of a replay of the operations of ``call``, or the reason why they cannot be recorded."""
    graph, expected = torch.cuda.CUDAGraph(), call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    try:
        with torch.cuda.graph(graph):
            result = call()
    except RuntimeError as error:
        return str(error).split("\n")[0][:90]
    graph.replay()
    torch.cuda.synchronize()
    if not torch.allclose(result, expected, rtol=1e-3, atol=1e-6 * float(expected.abs().max())):
        return "the replay gives other numbers"
    return seconds(graph.replay)


def row(name: str, model: nn.Module, x: Tensor, classes: int, outputs: int | None = None) -> str:
    """Return the line of one network; ``outputs`` asks for the variances of so many outputs alone."""
    model, x = model.cuda().eval(), x.cuda()
    y = torch.arange(len(x), device=x.device) % classes
    posterior = lw.fit(model, [(x, y)], "classification", method=lw.Kron(curvature="fisher_mc"), prior=1.0)
    chosen = None if outputs is None else torch.arange(outputs, device=x.device)
    call = lambda: posterior.functions(x, outputs=chosen).variance
    with torch.no_grad():
        plain = seconds(lambda: model(x))
    eager, (work, kernels), replay = seconds(call), busy(call), replayed(call)
    text = replay if isinstance(replay, str) else f"{replay * 1e3:8.2f} ms {replay / plain:6.1f}"
    figures = f"{eager * 1e3:8.2f} ms {eager / plain:6.1f}   {kernels:6d} {work * 1e3:8.2f} ms {work / plain:6.1f}"
    return f"{name:44s} {plain * 1e3:8.2f} ms {figures}   {text}"


@contextmanager
def nothing_compared() -> Iterator[None]:
    """Skip the comparison with autograd, and leave in a copy what a run wrote."""
    skip = lambda *_: None
    with patch.object(Network, "refuse_wrong", skip), patch.object(replica, "undo_writes", skip):
        yield


def passed(model: nn.Module, x: Tensor, classes: int) -> tuple[float, float, float]:
    """Return the processor seconds of a fit, of the first prediction of one row, and of a later one."""
    y = torch.arange(len(x)) % classes
    data = list(zip(x.split(128), y.split(128), strict=True))
    marks = [time.process_time()]
    posterior = lw.fit(model, data, "classification", method=lw.Kron(), prior=1.0)
    marks.append(time.process_time())
    posterior.predict(x[:1])
    marks.append(time.process_time())
    for _ in range(LATER):
        posterior.predict(x[:1])
    marks.append(time.process_time())
    return marks[1] - marks[0], marks[2] - marks[1], (marks[3] - marks[2]) / LATER


def compared() -> None:
    """Print the seconds with and without the comparison, and their ratios."""
    print(machine(1))
    print(f"{'':68s}{'with, ms':>10s}{'without, ms':>13s}{'ratio':>8s}")
    cases = {
        "MLP 784-256-256-10, 1,024 rows": (models.mlp(), torch.randn(1024, 784)),
        "LeNet, 1,024 rows": (models.lenet(), torch.randn(1024, 1, 28, 28)),
        "MLP 10-50-1, 1,024 rows, two classes": (
            nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 2)), torch.randn(1024, 10),
        ),
    }  # fmt: skip
    for name, (model, x) in cases.items():
        classes = model(x[:1]).shape[1]
        passed(model.eval(), x, classes)  # what a process loads once
        runs = []
        for _ in range(PAIRS):
            ours = passed(model, x, classes)
            with nothing_compared():
                runs.append((ours, passed(model, x, classes)))
        for number, what in enumerate(("fit", "first prediction of one row", "later ones")):
            both = [(1e3 * ours[number], 1e3 * plain[number]) for ours, plain in runs]
            middle = [statistics.median(column) for column in zip(*both, strict=True)]
            ratio = statistics.median(ours / plain for ours, plain in both)
            label = f"{name}: {what}"
            print(f"{label:68s}{middle[0]:10.2f}{middle[1]:13.2f}{ratio:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--compared", action="store_true", help="the cost of comparing Jacobians with autograd")
    torch.manual_seed(0)
    if parser.parse_args().compared:
        compared()
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}, float32")
    columns = f"{'forward':>11s} {'prediction, passes':>18s}   {'kernels':>6s} {'busy, passes':>17s}   replayed, passes"
    print(f"{'network':44s} {columns}")
    image = torch.randn(16, 3, 224, 224)
    print(row("MLP 784-256-256-10, 128 inputs", models.mlp(), torch.randn(128, 784), 10), flush=True)
    print(row("LeNet, 128 inputs", models.lenet(), torch.randn(128, 1, 28, 28), 10), flush=True)
    print(row("ResNet-50, 10 classes, 4 inputs", large_models.ResNet50(10), image[:4], 10), flush=True)
    name = "ResNet-50, 1,000 classes, five of 16 inputs"
    print(row(name, large_models.ResNet50(1000), image, 1000, 5), flush=True)
    print(row("ViT-B/16, 10 classes, 8 inputs", large_models.ViT(10), image[:8], 10), flush=True)


if __name__ == "__main__":
    main()
