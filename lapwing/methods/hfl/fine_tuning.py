"""Responses by fine-tuning with Adam on mini-batches, for networks that are too large for Newton steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.pool import shuffled
from lapwing.core.progress import ProgressBar
from lapwing.methods.hfl.objective import Objective
from lapwing.methods.hfl.pushes import Push, Pushes, Read, Value, central_difference
from lapwing.methods.hfl.response import Response


@dataclass(frozen=True)
class Adam:
    """Settings of the fine-tuning; the learning rate falls to zero along a cosine."""

    steps: int
    learning_rate: float
    batch_size: int


@dataclass(frozen=True, eq=False)
class FineTuner:
    """Fine-tuning of copies that are pushed up, pushed down and not pushed (the twin), on the same mini-batches.

    A second run of half as many steps shows how much of the response is still missing. The twin shows where the weights
    would have gone without a push, which tells a bent response from a drift of all copies.
    """

    objective: Objective
    adam: Adam
    data: Data
    generator: torch.Generator
    tolerance: float

    @property
    def root(self) -> Tensor | None:
        """None: fine-tuning never forms the Hessian."""
        return None

    def respond(
        self, push: Push, read: Read, count: int, strength: float | None = None, value: Value | None = None
    ) -> Response:
        """Return the responses to ``count`` pushes.

        With ``strength=None`` λ is a tenth of one over the standard deviation under the prior: a prediction moves by at
        most a tenth of its posterior standard deviation, and yet far enough for steps of Adam's size.
        """
        objective, steps = self.objective, self.adam.steps
        start = torch.zeros(count, objective.size).to(objective.centre)
        pushes = Pushes.of(push, read, start, value)
        if strength is None:
            variance = (pushes.slopes.double().square() / objective.prior.vector.detach()).sum(1)
            lam = 0.1 * torch.where(variance > 0, variance, 1.0).rsqrt().to(start)
        else:
            lam = torch.full_like(start[:, 0], strength)
        up, down, _ = self._readings(read, self._tuned(push, lam, max(1, steps // 2)), count)
        half = central_difference(up, down, lam)
        up, down, twin = self._readings(read, self._tuned(push, lam, steps), count)
        cov = central_difference(up, down, lam)
        whole, part = cov, half
        if value is None:  # the reading is the weights: compare the functions that were pushed
            whole, part = (pushes.value(each).unsqueeze(1) for each in (cov, half))
        tiny = torch.finfo(lam.dtype).tiny
        missing = (whole - part).abs().flatten(1).amax(1) / whole.abs().flatten(1).amax(1).clamp_min(tiny)
        distance = pushes.value((twin - pushes.reading).expand_as(up)).abs()
        drift = distance / pushes.value(cov).abs().clamp_min(tiny).sqrt()
        unknown, zero = torch.full_like(lam, torch.nan), torch.zeros_like(lam)
        return Response(cov, lam, unknown, missing, zero, pushes.bend(up, down, twin), drift, steps)

    def respond_alike(self, push: Push, count: int, tolerance: float) -> Response:
        """Return how the weights respond to ``count`` pushes, each with its λ."""
        return self.respond(push, lambda d: d, count)

    def _tuned(self, push: Push, lam: Tensor, steps: int) -> Tensor:
        """Return the weights after these steps, as steps from the centre: up, down and the twin, (2 K + 1, P)."""
        objective, count = self.objective, len(lam)
        d = torch.zeros(2 * count + 1, objective.size).to(objective.centre)
        signs = torch.cat([lam, -lam])[:, None]
        first, second = torch.zeros_like(d), torch.zeros_like(d)
        same_batches = torch.Generator().manual_seed(self.generator.initial_seed())
        batches = shuffled(self.data, self.adam.batch_size, same_batches)
        for step in ProgressBar(range(steps), "fine-tuning", self.data.progress):
            batch = next(batches)
            f = objective.outputs(d[-1:], batch.inputs)[0]
            targets = objective.cast(objective.likelihood.targets(f, batch.targets))
            slope = objective.gradient(d, (replace(batch, inputs=objective.cast(batch.inputs), targets=targets),))
            slope[:-1] -= signs * torch.cat([push(half) for half in d[:-1].chunk(2)])
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope.square()
            rate = self.adam.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            unbiased = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12
            d = d - rate * first / (1 - 0.9 ** (step + 1)) / unbiased
        return d

    def _readings(self, read: Read, d: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the readings at the weights that were pushed up, at those pushed down, and at the twin."""
        return read(d[:count]), read(d[count : 2 * count]), read(d[-1:])
