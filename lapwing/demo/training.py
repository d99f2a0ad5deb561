"""Small networks trained by Adam, the time that training takes, and the ways to predict that the demo compares."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}
Batches = list[tuple[Tensor, Tensor]]
T = TypeVar("T")


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a network and its training: Adam with L2 decay, and a learning rate that falls to zero by a cosine.

    Training ends after ``epochs`` or ``max_steps``, whichever comes first, and the learning rate reaches zero there.
    ``falling=False`` keeps it constant. The default learning rate and epochs were chosen from ten pairs: those with the
    lowest mean validation error of the plain network over the UCI tables, on a tenth of the training rows of the first
    split.
    """

    hidden: tuple[int, ...] = (50, 50)
    activation: str = "tanh"
    epochs: int = 100
    max_steps: int = 10_000
    batch_size: int = 128
    learning_rate: float = 1e-2
    weight_decay: float = 1e-5
    falling: bool = True
    dropout: float = 0.0  # after every activation
    batch_norm: bool = False  # before every activation


def mlp(inputs: int, outputs: int, recipe: TrainingSettings, seed: int) -> nn.Sequential:
    """Return an untrained network. The global random state does not change."""
    sizes = (inputs, *recipe.hidden, outputs)
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for d_in, d_out in pairwise(sizes):
            layers += [nn.Linear(d_in, d_out)]
            layers += [nn.BatchNorm1d(d_out)] if recipe.batch_norm else []
            layers += [ACTIVATIONS[recipe.activation]()]
            layers += [nn.Dropout(recipe.dropout)] if recipe.dropout else []
    return nn.Sequential(*layers[: -1 - recipe.batch_norm - (recipe.dropout > 0)])


def batches(x: Tensor, y: Tensor, size: int) -> Batches:
    """Return the rows as batches, in order; the last one may be smaller."""
    return list(zip(x.split(size), y.split(size), strict=True))


def loss_of(y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss, a mean over data: cross-entropy for class numbers, half the squared error for real targets."""
    if not y.is_floating_point():
        return F.cross_entropy
    return lambda f, y: 0.5 * (f - y).square().sum(-1).mean()


def trained(x: Tensor, y: Tensor, outputs: int, recipe: TrainingSettings, seed: int) -> nn.Sequential:
    """Return a network trained on the rows of x and y, in evaluation mode."""
    model = mlp(x.shape[1], outputs, recipe, seed).to(x)
    optimise(model, x, y, recipe, seed)
    return model


def optimise(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    recipe: TrainingSettings,
    seed: int,
    after: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Train the model in place and leave it in evaluation mode.

    ``after`` is called after every epoch with its number, from 1, while the model is in evaluation mode. Dropout draws
    from the global random state, so that state is seeded as well, and restored at the end.
    """
    loss, generator = loss_of(y), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
    )
    epoch = math.ceil(len(x) / recipe.batch_size)
    steps = min(recipe.max_steps, recipe.epochs * epoch)
    model.train()
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        for step in range(steps):
            if step % epoch == 0:
                order = torch.randperm(len(x), generator=generator).to(x.device).split(recipe.batch_size)
            rows = order[step % epoch]
            for group in optimiser.param_groups if recipe.falling else ():
                group["lr"] = recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimiser.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimiser.step()
            if (step + 1) % epoch == 0:
                optimiser.zero_grad()
                model.eval()
                after((step + 1) // epoch)
                model.train()
    optimiser.zero_grad()
    model.eval()


def epoch_seconds(model: nn.Module, data: Batches) -> float:
    """Return the seconds of one epoch without the optimiser: forward and backward passes over the batches."""
    loss, parameters = loss_of(data[0][1]), list(model.parameters())

    def epoch() -> None:
        for x, y in data:
            torch.autograd.grad(loss(model(x), y), parameters)

    return best_seconds(epoch)[0]


def best_seconds(work: Callable[[], T], repeats: int = 3) -> tuple[float, T]:
    """Return the time of the shortest of some runs, and the result of the first one."""
    results, seconds = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        results.append(work())
        seconds.append(time.perf_counter() - start)
    return min(seconds), results[0]


PLAIN, DEFAULT, VALIDATED, NAIVE = "plain network", "Lapwing", "Lapwing with validation", "naive evidence"


def fits(model: nn.Module, data: Batches, held_out: tuple[Tensor, Tensor]) -> dict[str, lw.Fitted]:
    """Return the fitted posteriors by name: the network alone, rescaled, and with error bars.

    The second and the fourth use the held-out data. The last one shows why the evidence alone is not the default.
    """
    real = held_out[1].is_floating_point()
    fit = partial(lw.fit, model, data, "regression" if real else "classification", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lw.errors.CalibrationWarning)  # the table shows what it says
        naive = fit(tuner=lw.tuners.MaximiseEvidence())
    return {
        PLAIN: fit(method=lw.baselines.MapOnly()),
        "refitted noise" if real else "temperature scaling": fit(method=lw.baselines.MapOnly(), validation=held_out),
        DEFAULT: fit(),
        VALIDATED: fit(validation=held_out),
        NAIVE: naive,
    }
