"""The cost of a full posterior over single weights: selection, fit, factorisation, prediction and peak memory.

    PYTHONPATH=. python -m benchmarks.subnetworks [--device cuda]

On a CPU with one thread 2,000 weights of a LeNet and of a ResNet-20 (0.27 M), on a GPU 42,000 weights of a ResNet-18
(11.2 M), all with ten classes. The prior is given. Epochs are plain forward and backward passes over the same data, and
passes are plain forward passes over the same inputs, in the same process; on a CPU the time of the process is counted,
which other programs do not change. The memory of the columns is what is held at most while they are formed from the
gradients at the layers; beside it, what the columns of all weights of these layers would take.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from benchmarks import clock
from benchmarks.models import briefly_trained, images, lenet, resnet18, resnet20
from benchmarks.peak import held
from lapwing import subnetworks

Batches = list[tuple[Tensor, Tensor]]
CLASSES, INPUTS = 10, 64  # of a prediction
TOGETHER = 8  # images whose columns are measured


@dataclass(frozen=True)
class Setting:
    """A network, the shape of its images and their number, and the weights that are chosen."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    data: int
    batch: int
    chosen: int
    rules: tuple[str, ...]


CPU = {
    "lenet": Setting(lenet, (1, 28, 28), 512, 128, 2_000, ("variance", "gradient", "greedy", "random")),
    "resnet20": Setting(resnet20, (3, 32, 32), 64, 32, 2_000, ("variance", "gradient", "random")),
}
GPU = {"resnet18": Setting(resnet18, (3, 32, 32), 2_048, 256, 42_000, ("variance", "gradient", "random"))}


def selected(rule: str, model: nn.Module, data: Batches, n: int) -> Any:
    """Return the weights that a rule chooses."""
    if rule == "random":
        return subnetworks.random(model, n)
    if rule == "greedy":
        return subnetworks.greedy(model, data, "classification", n, prior=1.0, progress=False)
    choose = {"variance": subnetworks.by_variance, "gradient": subnetworks.by_gradient}[rule]
    return choose(model, data, "classification", n, progress=False)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the seconds of a call and its result; on a CPU the time of the process, on a GPU until it is ready."""
    clock_of = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock_of()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock_of() - start, result


def plain(model: nn.Module, data: Batches, device: torch.device) -> tuple[float, float]:
    """Return the seconds of an epoch over the data, and of a forward pass over the first inputs: the best of three."""
    weights, x = list(model.parameters()), first(data)

    def epoch() -> None:
        for inputs, targets in data:
            torch.autograd.grad(F.cross_entropy(model(inputs), targets), weights)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    epochs, passes = ([timed(call, device)[0] for _ in range(4)] for call in (epoch, forward))
    return min(epochs[1:]), min(passes[1:])


def first(data: Batches) -> Tensor:
    """Return the inputs of the predictions."""
    return data[0][0][:INPUTS]


def measure(name: str, setting: Setting, device: torch.device) -> None:
    """Print the lines of one network."""
    torch.manual_seed(0)
    data = [(x.to(device), y.to(device)) for x, y in images(setting.data, setting.shape, setting.batch)]
    model = briefly_trained(setting.build().to(device), data, 20)
    total, passes = sum(p.numel() for p in model.parameters()), plain(model, data, device)
    print(f"\n{name}: {setting.chosen:,} of {total:,} weights, {setting.data:,} images; an epoch {passes[0]:.3g} s")
    for rule in setting.rules:
        print(f"  {rule:9s}{line(model, data, rule, setting.chosen, passes, device)}", flush=True)


def line(model: nn.Module, data: Batches, rule: str, n: int, passes: tuple[float, float], device: torch.device) -> str:
    """Return the figures of one rule."""
    x, (epoch, forward) = first(data), passes
    choice, weights = timed(lambda: selected(rule, model, data, n), device)

    def fit() -> lw.Fitted:
        return lw.fit(model, data, "classification", method=lw.Full(), weights=weights, prior=1.0, progress=False)

    fitting, posterior = timed(fit, device)
    factorising, predicting, touched, formed = used(posterior, x, device)
    del posterior  # its matrices are no part of the peak
    peak = held(lambda: fit().functions(x).cov, device).most
    columns = 4 * TOGETHER * CLASSES
    mb = lambda number: f"{number / 1e6:,.1f} MB"
    return (
        f"choice {choice / epoch:6.1f} epochs, fit {fitting / epoch:6.1f} epochs, factorisation {factorising:6.2f} s, "
        f"prediction {predicting / forward:7.1f} passes\n{'':11s}columns of {TOGETHER} images: {mb(columns * n)}, with "
        f"what forming them takes {mb(formed)}; all of the layers, {touched:,} weights: {mb(columns * touched)}\n"
        f"{'':11s}fit and prediction of {len(x)} images: peak {mb(peak)}, of which each matrix takes {mb(8 * n**2)}"
    )


def used(posterior: lw.Fitted, x: Tensor, device: torch.device) -> tuple[float, float, int, int]:
    """Return the seconds of factorisation and prediction, the weights of all layers with a chosen one, and the bytes
    that the columns of a few images take while they are formed.
    """
    core: Any = posterior.posterior
    factorising = timed(lambda: core.precision, device)[0]
    predicting = min(timed(lambda: posterior.functions(x).cov, device)[0] for _ in range(2))
    formed = held(posterior.network.linearise(x[:TOGETHER]).jacobians().whole, device).most
    return factorising, predicting, posterior.network.selection.total, formed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(clock.machine(1 if device.type == "cpu" else torch.get_num_threads()), where)
    for name, setting in (CPU if device.type == "cpu" else GPU).items():
        measure(name, setting, device)


if __name__ == "__main__":
    main()
