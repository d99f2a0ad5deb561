"""Function samples, predictions and tuners of networks with many outputs, as ratios to plain forward passes.

    python -m benchmarks.scale_outputs [--parts samples predictions fits accuracy] [--full] [--out FILE]

One thread on a CPU, in seconds of the processor; on a GPU if there is one. Costs do not depend on the numbers, so the
networks have random weights, except in the last two parts.

- samples: 16 function samples by layer-wise Jacobians, a backward pass for each output, and by forward mode; what an
  output and a direction cost, and how many directions for each output would cost the same. A ResNet-50 of 1,000 classes
  on a GPU, or with ``--full``.
- predictions: ``predict`` by variances (``samples=0``) and from 32 functions, the draws of the weights made before.
- fits: ``fit`` with its guard and with validation data, cells scored by functions; with ``--full`` by variances too.
- accuracy: for a trained network of 300 classes at several precisions of its prior, how far predictions are from the
  average softmax of 4,000 draws (Kullback-Leibler divergence in nats): the pairwise link, the plain average of 32
  functions, and what ``predict`` returns. The last column compares its error with the standard error that it states.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from benchmarks.clock import Peak, machine
from benchmarks.large_models import ResNet50
from lapwing.networks.network import Network
from lapwing.networks.passes import _by_jacobians, forward_products
from lapwing.posteriors import base as posteriors

DRAWS, ROWS = 16, 16
CLASSES = (32, 100, 256, 1000)
PRECISIONS = (0.3, 3.0, 30.0, 300.0)


class Sequences(nn.Module):
    """A transformer of two layers, or a GRU, that classifies sequences."""

    def __init__(self, outputs: int, recurrent: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.embed = nn.Linear(16, 64)
        self.body = nn.GRU(64, 64, batch_first=True) if recurrent else nn.TransformerEncoder(layer, 2)
        self.recurrent, self.head = recurrent, nn.Linear(64, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states = self.body(self.embed(x))
        logits: Tensor = self.head(states[0][:, -1] if self.recurrent else states.mean(1))
        return logits


def mlp(outputs: int, inputs: int = 784, width: int = 256) -> nn.Module:
    """Return an MLP with two hidden layers."""
    hidden = (nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def convolutions(outputs: int) -> nn.Module:
    """Return two convolutions with norms, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(512, outputs),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (784,)),
    "convolutions": (convolutions, (3, 32, 32)),
    "transformer": (partial(Sequences, recurrent=False), (16, 16)),
    "GRU": (partial(Sequences, recurrent=True), (12, 16)),
}
SIZES = {"MLP": 2000, "convolutions": 2000, "transformer": 500, "GRU": 500}


@dataclass(frozen=True)
class Clock:
    """Seconds of calls: of the processor on a CPU, of the clock on a GPU."""

    device: torch.device

    def best(self, times: int, call: Callable[[], Any]) -> float:
        """Return the seconds of the shortest of several calls."""
        return min(self._one(call) for _ in range(times))

    def _one(self, call: Callable[[], Any]) -> float:
        if self.device.type == "cpu":
            start = time.process_time()
            call()
            return time.process_time() - start
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def forward(self, model: nn.Module, x: Tensor) -> float:
        """Return the seconds of a plain forward pass."""
        with torch.no_grad():
            model(x)
            return self.best(20, lambda: model(x))


def memory(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the peak of a call above what was held before, in GB."""
    if device.type == "cpu":
        with Peak() as peak:
            call()
        return peak.mb / 1024
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def samples(device: torch.device, full: bool) -> Iterator[str]:
    """Yield a row for each network: function samples by both ways."""
    clock = Clock(device)
    yield (
        f"{'network':14s} {'outputs':>7s} {'weights':>9s} {'forward':>9s} | {'Jacobians':>20s} {'each output':>11s} | "
        f"{'forward mode':>19s} {'each draw':>9s} | {'faster':>6s} {'even at':>14s}"
    )
    cases = {name: (build, shape, SIZES[name]) for name, (build, shape) in NETWORKS.items()}
    if full or device.type == "cuda":
        cases["ResNet-50"] = (ResNet50, (3, 224, 224), 1000)
    for name, (build, shape, outputs) in cases.items():
        torch.manual_seed(0)
        model = build(outputs).to(device).eval()
        x = torch.randn(ROWS, *shape, device=device)
        network = Network.build(model, x)
        v = 0.01 * torch.randn(DRAWS, network.selection.size, device=device)
        plain = clock.forward(model, x)
        new = clock.best(5, lambda n=network, x=x, v=v: forward_products(n, x, v))  # type: ignore[misc]
        old = clock.best(1, lambda n=network, x=x, v=v: _by_jacobians(n, x, v, None))  # type: ignore[misc]
        each_output, each_draw = old / plain / outputs, new / plain / DRAWS
        yield (
            f"{name:14s} {outputs:7d} {network.selection.size:9,d} {1e3 * plain:6.2f} ms | "
            f"{old:7.2f} s {old / plain:6.0f} fwd {each_output:11.2f} | {new:6.3f} s {new / plain:6.1f} fwd "
            f"{each_draw:9.2f} | {old / new:5.0f}x {each_output / each_draw:5.2f} of them"
        )


def predictions(device: torch.device, full: bool) -> Iterator[str]:
    """Yield a row for each number of classes: predictions by variances and from functions."""
    clock = Clock(device)
    yield f"{'network':14s} {'classes':>7s} | {'variances':>18s} | {'32 functions':>18s} {'first':>8s} {'peak':>8s}"
    for name in ("MLP", "convolutions"):
        for classes in CLASSES:
            yield _predicted(clock, name, *NETWORKS[name], classes)
    if full or device.type == "cuda":
        yield _predicted(clock, "ResNet-50", ResNet50, (3, 224, 224), 1000)


def _predicted(clock: Clock, name: str, build: Callable[[int], nn.Module], shape: tuple[int, ...], classes: int) -> str:
    """Return the row of one network."""
    torch.manual_seed(0)
    model = build(classes).to(clock.device).eval()
    x = torch.randn(64, *shape, device=clock.device)
    y = torch.randint(0, classes, (64,), device=clock.device)
    method = lw.Kron(curvature="fisher_mc")
    posterior = lw.fit(model, (x, y), "classification", method=method, prior=100.0, progress=False)
    x = x[:ROWS]
    plain = clock.forward(model, x)
    first = clock.best(1, lambda: posterior.predict(x, samples=32).probs)
    drawn = clock.best(5, lambda: posterior.predict(x, samples=32).probs)
    peak = memory(clock.device, lambda: posterior.predict(x, samples=32).probs)
    exact = clock.best(1, lambda: posterior.predict(x, samples=0).probs)
    return (
        f"{name:14s} {classes:7d} | {exact:6.2f} s {exact / plain:5.0f} fwd | {drawn:6.3f} s {drawn / plain:5.0f} fwd "
        f"{first:6.2f} s {peak:5.2f} GB"
    )


def trained(classes: int, rows: int, width: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return an MLP trained on noisy clusters, and data of as many rows again, of which the first half trained it."""
    torch.manual_seed(0)
    centres = torch.randn(classes, 24)
    y = torch.randint(0, classes, (2 * rows,))
    x = centres[y] + 0.6 * torch.randn(2 * rows, 24)
    model = mlp(classes, 24, width)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        optimiser.zero_grad()
        F.cross_entropy(model(x[:rows]), y[:rows]).backward()
        optimiser.step()
    return model.eval(), (x, y)


def fits(device: torch.device, full: bool) -> Iterator[str]:
    """Yield what a fit of an MLP with 1,000 classes to 512 rows takes: curvature alone, guarded, and validated."""
    model, (x, y) = trained(1000, 512, 256)
    model = model.to(device)
    train, held_out = ((x[part].to(device), y[part].to(device)) for part in (slice(0, 512), slice(512, 1024)))
    method = lw.Kron(curvature="fisher_mc")
    fit = partial(lw.fit, model, train, "classification", method=method, progress=False)
    clock = Clock(device)
    fit(prior=1.0)
    rows: dict[str, dict[str, Any]] = {
        "given prior": {"prior": 1.0},
        "guarded (default)": {},
        "512 validation data": {"validation": held_out},
    }
    for name, settings in rows.items():
        seconds = clock.best(1, partial(fit, **settings))
        yield f"fit, {name:20s} {seconds:7.2f} s"
    if full:
        with patch.object(posteriors, "MANY_OUTPUTS", 10**9):
            yield f"fit, {'guarded by variances':20s} {clock.best(1, fit):7.2f} s"


def accuracy(device: torch.device, full: bool) -> Iterator[str]:
    """Yield a row for each precision: the distance of predictions from the average over many functions."""
    model, (x, y) = trained(300, 600, 64)
    posterior = lw.fit(model, (x[:600], y[:600]), "classification", prior=1.0, progress=False)
    x = x[600:660]
    yield (
        f"{'precision':>9s} {'logit std':>9s} | {'network':>8s} {'pairwise':>8s} {'average':>8s} {'predict':>8s} | "
        "error / standard error"
    )
    for precision in PRECISIONS:
        each = posterior.with_prior(precision)
        belief = each.functions(x)
        many = belief.sample(4000 if not full else 20_000, torch.Generator().manual_seed(1))
        truth = torch.stack([part.softmax(-1).mean(0) for part in many.split(500)]).mean(0)
        steps = each.posterior.numbered_steps(range(DRAWS))
        functions = forward_products(each.network, x, steps)[1]
        plain = torch.cat([belief.mean + functions, belief.mean - functions]).softmax(-1).mean(0)
        predicted = each.predict(x)
        columns = (belief.mean.softmax(-1), each.predict(x, samples=0).probs, plain, predicted.probs)
        gap = lambda p, truth=truth: (truth * (truth.clamp_min(1e-30) / p.clamp_min(1e-30)).log()).sum(-1).mean()
        distances = " ".join(f"{float(gap(p)):8.4f}" for p in columns)
        ratio = (predicted.probs - truth).square().mean().sqrt() / predicted.standard_error.square().mean().sqrt()
        yield f"{precision:9g} {float(belief.std.mean()):9.2f} | {distances} | {float(ratio):.2f}"


PARTS = {"samples": samples, "predictions": predictions, "fits": fits, "accuracy": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--full", action="store_true", help="a ResNet-50 on a CPU too, and the slow way of fits")
    parser.add_argument("--out", type=Path, help="a file for the table")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [str(machine(1) | {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"})]
    print(lines[0])
    for part in arguments.parts:
        lines.append(f"\n{part}")
        print(lines[-1])
        for line in PARTS[part](device, arguments.full):
            print(line, flush=True)
            lines.append(line)
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
