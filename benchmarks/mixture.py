"""The cost of a mixture over hyperparameters, as ratios in one process: predictions and fits.

    python -m benchmarks.mixture [--rows 10000]

One thread, batches of 128 in memory. The networks are the MLP and the LeNet of ``make bench``, trained for two epochs
on random teachers' labels with noise, so that validation data have something to say. Prediction: a mixture by
``validation=`` against one posterior by the evidence, best of seven each, in turn. Fit: with 1,000 validation data
against without, best of two.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from benchmarks.clock import best_of, machine
from benchmarks.models import lenet, mlp

CASES = {"mlp_kron": (mlp, (784,)), "lenet_kron": (lenet, (1, 28, 28))}


def task(model: nn.Module, shape: tuple[int, ...], rows: int) -> tuple[list[tuple[Tensor, Tensor]], ...]:
    """Return training and validation batches, and train the model for two epochs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows + 1000, *shape, generator=generator)
    teacher = torch.randn(x[0].numel(), 10, generator=generator)
    y = (x.flatten(1) @ teacher + 20 * torch.randn(len(x), 10, generator=generator)).argmax(1)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(2):
        for part in torch.arange(rows).split(128):
            optimiser.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
    model.eval().requires_grad_(True)
    cut = lambda a, b: list(zip(x[a:b].split(128), y[a:b].split(128), strict=True))
    return cut(0, rows), cut(rows, rows + 1000)


def measure(name: str, rows: int) -> None:
    """Print the ratios of one case."""
    build, shape = CASES[name]
    torch.manual_seed(0)
    model = build()
    data, validation = task(model, shape, rows)
    one = lw.fit(model, data, "classification", tuner=lw.tuners.MaximiseEvidence(), progress=False)
    mixture = one.tuned(lw.tuners.Integrate(validation))
    x = data[0][0]
    pairs = [(best_of(1, lambda: one.predict(x).probs), best_of(1, lambda: mixture.predict(x).probs)) for _ in range(7)]
    single, mixed = (min(seconds) for seconds in zip(*pairs, strict=True))
    fit = partial(lw.fit, model, data, "classification", progress=False)
    without, with_data = best_of(2, fit), best_of(2, lambda: fit(validation=validation))
    core: Any = mixture.posterior
    cells = f"{len(core.cells)} cells of {len(core.beliefs)} precisions"
    print(f"{name:12s} prediction of 128: mixture / one {mixed / single:.2f} (reach 1.5), {cells}")
    print(f"{name:12s} fit to {rows}: with / without validation {with_data / without:.2f} (reach 1.5)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=10_000)
    rows = parser.parse_args().rows
    print(machine(1))
    for name in CASES:
        measure(name, rows)


if __name__ == "__main__":
    main()
