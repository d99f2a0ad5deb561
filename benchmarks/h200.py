"""The spine on one GPU: PYTHONPATH=. python benchmarks/h200.py [--out FILE]

float32, all parameters included (norm scales too), random images, the sizes of the laplace-torch figures quoted beside
ours. A plain epoch (forward and backward) and a plain forward pass are timed in the same run. Peak memory is
``torch.cuda.max_memory_allocated`` above what was allocated before. It also checks that layer-wise Jacobians on the GPU
agree with plain backward passes there, recurrent and attention networks included.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lapwing as lw
from benchmarks import models
from lapwing.curvature.blocks import decompose
from lapwing.curvature.kronecker import KroneckerBlock

PEER = {  # laplace-torch 0.3 on the same kind of GPU; norm scales frozen there
    ("MLP", "Kron"): "2.29 s, 128 inputs 40.5 ms, 4.3 GB",
    ("LeNet", "Kron"): "3.34 s, 128 inputs 50.9 ms, 7.9 GB",
    ("ResNet-20", "Kron"): "12.4 s, 64 inputs 327 ms, 126 GB",
    ("ResNet-18", "Kron"): "2.99 s, 8 inputs 453 ms, 13.3 GB",
    ("ResNet-20", "Diagonal"): "out of memory on 140 GB",
    ("ResNet-18", "Diagonal"): "out of memory on 140 GB",
}


def timed(call: Callable[[], Any], repeats: int = 3) -> tuple[float, float, Any]:
    """Return the seconds of the shortest call, the peak memory in GB, and the result."""
    best, result = 1e9, None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        result = None
        start = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best, (torch.cuda.max_memory_allocated() - before) / 2**30, result


def measure(name: str, model: nn.Module, shape: tuple[int, ...], n: int, inputs: int, method: Any) -> dict[str, Any]:
    device = torch.device("cuda")
    data = [(x.to(device), y.to(device)) for x, y in models.images(n, shape, 128)]
    model = models.briefly_trained(model.to(device), data, 4)
    parameters = list(model.parameters())

    def epoch() -> None:
        for x, y in data:
            torch.autograd.grad(F.cross_entropy(model(x), y), parameters)

    epoch()
    plain, _, _ = timed(epoch)
    fit = lambda: lw.fit(model, data, lw.Categorical(), method=method, prior=1.0, progress=False)
    fit()
    seconds, fit_gb, posterior = timed(fit, 2)

    def settle() -> None:
        blocks = [b for b in getattr(posterior.posterior.curvature, "blocks", ()) if isinstance(b, KroneckerBlock)]
        factors = [factor for block in blocks for factor in (block.inp, block.out)]
        for factor in factors:
            factor.__dict__.pop("spectrum", None)
        decompose(factors)

    eigen, _, _ = timed(settle, 1)
    x = data[0][0][:inputs]
    assert posterior.functions(x).cov is not None  # warm up
    variance, variance_gb, _ = timed(lambda: posterior.functions(x).cov, 5)
    with torch.no_grad():
        forward, _, _ = timed(lambda: model(x), 10)
    row = {
        "network": name, "method": type(method).__name__, "n": n, "epoch s": plain, "fit s": seconds,
        "eigh s": eigen, "fit GB": fit_gb, "inputs": inputs, "variance ms": 1e3 * variance,
        "variance GB": variance_gb, "forward ms": 1e3 * forward, "peer": PEER.get((name, type(method).__name__), "-"),
    }  # fmt: skip
    print(
        f"{name:10s} {row['method']:9s} n={n:6d} epoch {plain:6.3f} s  fit {seconds:6.3f} s ({seconds / plain:5.1f}x) "
        f"{fit_gb:5.2f} GB  eigh {eigen:6.3f} s  variance of {inputs:4d}: {1e3 * variance:8.2f} ms "
        f"({variance / forward:6.1f}x forward) {variance_gb:5.2f} GB   peer: {row['peer']}",
        flush=True,
    )
    return row


def check_jacobians() -> None:
    """Compare layer-wise Jacobians with plain backward passes, on the GPU, in float64 and float32."""
    from lapwing.data.inputs import map_tensors
    from lapwing.networks.network import Network
    from tests.cases import CASES
    from tests.references import dense

    worst: dict[str, float] = {}
    for dtype in (torch.float64, torch.float32):
        torch.backends.cudnn.allow_tf32 = False
        for case in CASES:
            model = case.build(dtype).cuda()
            x = map_tensors(case.batch(5, dtype), lambda t: t.cuda())
            layered = Network.build(model, x).linearise(x).jacobians().whole()
            with torch.backends.cudnn.flags(enabled=False):
                plain = dense.jacobian(model, x, 5)
            gap = float((layered - plain).abs().max() / plain.abs().max())
            limit = 1e-10 if dtype == torch.float64 else 1e-4
            worst[str(dtype)] = max(worst.get(str(dtype), 0.0), gap)
            if not gap < limit:
                print(f"JACOBIAN OFF {case.name} {dtype}: {gap:.2e}")
    torch.backends.cudnn.allow_tf32 = True
    print(f"layer-wise Jacobians against plain backward passes, worst relative gap: {worst}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/h200.json"))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", nargs="*", default=["check", "MLP", "LeNet", "ResNet-20", "ResNet-18"])
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, python {platform.python_version()}", flush=True)
    if "check" in options.only:
        check_jacobians()
    networks: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
        "MLP": (models.mlp, (784,), 10_000, 128),
        "LeNet": (models.lenet, (1, 28, 28), 10_000, 128),
        "ResNet-20": (models.resnet20, (3, 32, 32), 10_000, 64),
        "ResNet-18": (models.resnet18, (3, 32, 32), 2_048, 8),
    }
    rows = [
        measure(name, build(), shape, n, inputs, method)
        for method in (lw.Kron(), lw.Diagonal())
        for name, (build, shape, n, inputs) in networks.items()
        if name in options.only
    ]
    if options.profile:
        profile()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


def profile() -> None:
    """Print the operations that take the time of a fit and of variances."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    device = torch.device("cuda")
    for name, model, n in (("ResNet-18", models.resnet18(), 512), ("ResNet-20", models.resnet20(), 1024)):
        data = [(x.to(device), y.to(device)) for x, y in models.images(n, (3, 32, 32), 128)]
        model = models.briefly_trained(model.to(device), data, 2)
        with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            posterior = lw.fit(model, data, lw.Categorical(), prior=1.0, progress=False)
            torch.cuda.synchronize()
        print(
            name, "fit\n", trace.key_averages().table(sort_by="cuda_time_total", row_limit=12, max_name_column_width=40)
        )
        assert posterior.functions(data[0][0][:8]).cov is not None
        with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            assert posterior.functions(data[0][0][:8]).cov is not None
            torch.cuda.synchronize()
        print(
            name,
            "variance\n",
            trace.key_averages().table(sort_by="cpu_time_total", row_limit=12, max_name_column_width=40),
        )


if __name__ == "__main__":
    main()
