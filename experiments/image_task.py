"""A trained network for images, the images that it is tested on, and its scores."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing.demo.training import batches
from lapwing.predictives.labels import SoftmaxPredictive

Pair = tuple[Tensor, Tensor]  # images and classes
Beliefs = Callable[[Tensor], lw.FunctionGaussian]  # images -> the distribution of their logits


@dataclass(frozen=True, eq=False)
class Task:
    """A trained network and the images that it is tested on."""

    model: nn.Module
    train: Pair
    held_out: Pair
    test: Pair
    strange: Tensor  # out-of-distribution images
    batch_size: int

    @property
    def data(self) -> list[Pair]:
        """Batches of training images."""
        return batches(*self.train, self.batch_size)

    @property
    def validation(self) -> list[Pair]:
        """Batches of held-out images."""
        return batches(*self.held_out, self.batch_size)


def scored(beliefs: Beliefs, task: Task, draws: int) -> dict[str, float]:
    """Return the scores with the probit link, and those with samples of the logits under names with "MC "."""
    x, y = task.test
    start = time.perf_counter()
    test = [beliefs(part) for part in x.split(task.batch_size)]
    taken = time.perf_counter() - start
    strange = [beliefs(part) for part in task.strange.split(task.batch_size)]
    scores = {}
    for link, prefix in (("probit", ""), ("mc", "MC ")):
        probs, strange_probs = (
            torch.cat([SoftmaxPredictive(part, link, draws).probs for part in parts]) for parts in (test, strange)
        )
        scores[prefix + "NLL"] = metrics.categorical_nll(probs, y)
        scores[prefix + "ECE"] = metrics.ece(probs, y)
        scores[prefix + "Brier"] = metrics.brier(probs, y)
        scores[prefix + "OOD AUROC"] = metrics.auroc(_entropy(probs), _entropy(strange_probs))
        if not prefix:
            scores["accuracy"] = metrics.accuracy(probs, y)
    return {**scores, "test s": taken}


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


def scaled(model: nn.Module, temperature: float) -> Beliefs:
    """Return the network's logits over the temperature, without variance."""

    def beliefs(x: Tensor) -> lw.FunctionGaussian:
        with torch.no_grad():
            f = model(x) / temperature
        return lw.FunctionGaussian(f, f.new_zeros(*f.shape, f.shape[-1]))

    return beliefs


def best_temperature(task: Task) -> float:
    """Return the temperature of the logits with the highest likelihood of the held-out images."""
    with torch.no_grad():
        f = torch.cat([task.model(x) for x, _ in task.validation])
    y = task.held_out[1]
    cost = lambda t: float(F.cross_entropy(f / math.exp(t), y))
    low, high, ratio = -3.0, 3.0, (math.sqrt(5) - 1) / 2
    for _ in range(40):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if cost(a) < cost(b) else (a, high)
    return math.exp(0.5 * (low + high))
