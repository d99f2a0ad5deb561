"""The cost of the variances of five chosen outputs of a thousand, as ratios to a plain forward pass in one process.

    python -m benchmarks.chosen [--device cuda]

One thread. A ResNet-20 and a small convolutional network with 1,000 classes, images of 32 × 32, 16 inputs, the sampled
Fisher of 32 images. Beside the five top classes of each input: five plain forward and backward passes by autograd, one
for each of five outputs. Times are the best of five, in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.clock import best_of, machine
from benchmarks.models import ResNet, images

CLASSES, INPUTS, CHOSEN = 1000, 16, 5


def small() -> nn.Module:
    """Return two convolutions with pooling and two linear layers; 1.3 M weights."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, CLASSES),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], nn.Module]] = {"resnet20": lambda: ResNet((16, 32, 64), 3, CLASSES), "small": small}
METHODS: dict[str, Callable[[], Any]] = {
    "kron": lambda: lw.Kron(curvature="fisher_mc"), "diagonal": lambda: lw.Diagonal(curvature="fisher_mc"),
}  # fmt: skip


def waited(call: Callable[[], Any]) -> Callable[[], None]:
    """Return the call with a wait for the device at its end."""

    def run() -> None:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def measure(name: str, method: str, device: str) -> None:
    """Print the ratios of one case."""
    torch.manual_seed(0)
    model = NETWORKS[name]().to(device).eval()
    data = [(x.to(device), y.to(device)) for x, y in images(2 * INPUTS, (3, 32, 32), INPUTS, CLASSES)]
    posterior = lw.fit(model, data, "classification", method=METHODS[method](), prior=1.0, progress=False)
    x, weights = data[0][0], list(model.parameters())
    with torch.no_grad():
        top = model(x).topk(CHOSEN).indices

    def plain() -> Tensor:
        with torch.no_grad():
            return model(x)

    calls = {
        "forward": plain,
        "chosen": lambda: posterior.functions(x, outputs=top).variance,
        "passes": lambda: [torch.autograd.grad(model(x)[:, c].sum(), weights) for c in range(CHOSEN)],
    }
    rounds = [{key: best_of(1, waited(call)) for key, call in calls.items()} for _ in range(6)]
    best = {key: min(each[key] for each in rounds[1:]) for key in calls}
    ratio = lambda key: best[key] / best["forward"]
    line = f"{name:9s} {method:9s} five of 1,000: {ratio('chosen'):5.1f} forward passes"
    line += f"; five forward and backward passes: {ratio('passes'):5.1f}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    print(machine(1), device)
    for name in NETWORKS:
        for method in METHODS:
            measure(name, method, device)


if __name__ == "__main__":
    main()
