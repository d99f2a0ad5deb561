"""What launches cost on a GPU: a prediction as it is, and replayed as a CUDA graph: python -m benchmarks.graphs

A prediction of a small network is hundreds of small operations, and the processor takes longer to launch them than the
GPU takes to compute them. A CUDA graph records the operations once and launches them together. For each network the
table has the time of a plain forward pass, of the variances as ``posterior.functions`` computes them, the number of
kernels and the time that the GPU is busy with them, which is the least that saving launches can reach, and the time of
the same operations replayed; or why they cannot be recorded: an operation that waits for the GPU ends the recording.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks import large_models, models

REPEATS = 20


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


def main() -> None:
    torch.manual_seed(0)
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
