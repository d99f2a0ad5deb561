"""Pushes of functions of the weights: by Newton steps with all data, or by fine-tuning with Adam on mini-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.pool import shuffled
from lapwing.core.progress import ProgressBar
from lapwing.errors import NumericalError
from lapwing.methods.hfl.newton import FLAT, Hessian, pushed
from lapwing.methods.hfl.objective import Objective
from lapwing.methods.hfl.response import BENT, TOLERANCE, Response, largest

Push = Callable[[Tensor], Tensor]  # ∇g_k at every row k of d, (K, P) -> (K, P)
Read = Callable[[Tensor], Tensor]  # a reading at every row of d, (K, P) -> (K, ...); a single row may stand for all
Value = Callable[[Tensor], Tensor]  # g_k as a linear function of reading k, (K, ...) -> (K,)


@dataclass(frozen=True, eq=False)
class Pushes:
    """K functions g_k to push: their gradients, the values that are read after a push, and both at the start."""

    push: Push
    read: Read
    value: Value
    start: Tensor  # d = 0, (K, P)
    slopes: Tensor  # ∇g_k at the start, (K, P)
    reading: Tensor  # at the start, (1, ...) or (K, ...)

    @classmethod
    def of(cls, push: Push, read: Read, start: Tensor, value: Value | None = None) -> Pushes:
        """Evaluate gradients and reading at the start.

        Without ``value`` the reading is the weights themselves, and g_k is linearised.
        """
        slopes = push(start)
        linear = lambda reading: (slopes * reading).sum(1)
        return cls(push, read, value or linear, start, slopes, read(start[:1]))

    def bend(self, up: Tensor, down: Tensor, twin: Tensor) -> Tensor:
        """Return |g(up) + g(down) - 2 g(twin)| / |g(up) - g(down)|, (K,); infinite if a push has no effect."""
        even, odd = self.value(up + down - 2 * twin).abs(), self.value(up - down).abs()
        unmoved = torch.where(self.slopes.any(1), torch.inf, 0.0).to(odd)
        return torch.where(odd == 0, unmoved, even / odd)


def central_difference(up: Tensor, down: Tensor, lam: Tensor) -> Tensor:
    """Return (up - down) / 2λ for readings (K, ...) and strengths (K,)."""
    return (up - down) / (2 * lam).reshape(-1, *[1] * (up.ndim - 1))


@dataclass(frozen=True, eq=False)
class Responder:
    """Pushes of the minimum of an objective, up and down, and the difference (g(θ_λ) - g(θ_-λ)) / 2λ."""

    objective: Objective
    hessian: Hessian
    tolerance: float
    max_steps: int = 50

    @property
    def goal(self) -> float:
        """The accuracy to work for: the tolerance, or that of the dtype if the tolerance is 1 or more."""
        return self.tolerance if self.tolerance < 1 else TOLERANCE[self.objective.dtype]

    @property
    def root(self) -> Tensor | None:
        """L (P, P) with L Lᵀ the Hessian; None if it is not known."""
        return self.hessian.root

    def respond(
        self, push: Push, read: Read, count: int, strength: float | None = None, value: Value | None = None
    ) -> Response:
        """Return the responses to ``count`` pushes.

        With ``strength=None`` the first λ moves a prediction by a hundredth of its standard deviation, or further where
        that is below rounding; it is halved until two estimates agree, and the λ² term is removed by extrapolation.
        """
        pushes = Pushes.of(push, read, torch.zeros(count, self.objective.size).to(self.objective.centre), value)
        first = self._first_order(pushes)
        floor, most = self._floor(first, pushes.reading), first.rsqrt()
        if strength is not None:
            low, high = float(floor.max()), float(most.min())
            if not low <= strength <= high:
                raise NumericalError(
                    f"HFL: lam is {strength:.3g}; expected between {low:.2g} (below that a difference in {first.dtype} "
                    f"is rounding) and {high:.2g} (above it a prediction moves by more than its standard deviation). "
                    "Leave lam out to have it chosen."
                )
            lam = torch.full_like(first, strength)
            return self.at(pushes, lam)
        lam = torch.maximum(0.01 * most, 4 * floor)  # the factor leaves room to halve it above rounding
        if self.tolerance < 1 and bool((lam > most).any()):
            raise NumericalError(
                f"HFL: no push is above rounding in {first.dtype} that moves a prediction by less than its standard "
                f"deviation ({float(first.min().sqrt()):.2g}), with a tolerance of {self.tolerance:g}. Give a larger "
                "tolerance, or HFL(dtype=torch.float64) if the dtype is another."
            )
        return self._refined(pushes, torch.minimum(lam, most), floor)

    def _first_order(self, pushes: Pushes) -> Tensor:
        """Return ∇gᵀ H⁻¹ ∇g, (K,); raise if it is negative or due to flat directions.

        A function that depends on no weight has variance zero, and its λ is arbitrary: it takes the largest of the
        others.
        """
        solved = self.hessian.solve(pushes.slopes)
        first = (pushes.slopes * solved).sum(1)
        depends = pushes.slopes.any(1)
        if bool((first <= 0)[depends].any()):
            raise NumericalError(
                f"HFL: a variance came out as {float(first.min()):.3g}; expected above zero. The network is at no "
                "minimum of its regularised loss: train it further with this prior, or use HFL(mode='linearised')."
            )
        share = self.hessian.flat_variance(solved) / torch.where(depends, first, 1.0)
        if bool((share > 0.1).any()):
            raise NumericalError(
                f"HFL: the loss is flat along what is pushed (push {largest(share)}): its curvature there is below "
                f"{FLAT:g} of the prior's, and the variance has no bound. This happens for weights that can rotate "
                "without any change of the outputs, as in attention heads. Push outputs, or use "
                "HFL(mode='linearised')."
            )
        return torch.where(depends, first, first.max() if bool(depends.any()) else 1.0)

    def _refined(self, pushes: Pushes, lam: Tensor, floor: Tensor) -> Response:
        """Halve λ for every push until two estimates agree."""
        response = self.at(pushes, lam)
        cov, steps, change = response.cov, response.steps, torch.full_like(lam, torch.inf)
        for _ in range(16):
            going = (torch.maximum(change, response.missing) > 0.3 * self.goal) & (lam / 2 > floor)
            if not bool(going.any()):
                break
            lam = torch.where(going, lam / 2, lam)
            coarser, response = response.cov, self.at(pushes, lam)
            finer, steps = response.cov, steps + response.steps
            gap = (finer - coarser) / 3  # the error falls with λ²
            size = finer.abs().flatten(1).amax(1).clamp_min(torch.finfo(lam.dtype).tiny)
            change = torch.where(going, gap.abs().flatten(1).amax(1) / size, change)
            cov = torch.where(going.reshape(-1, *[1] * (finer.ndim - 1)), finer + gap, cov)
        return replace(response, cov=cov, change=change, steps=steps)

    def at(self, pushes: Pushes, lam: Tensor) -> Response:
        """Return the responses at these strengths (K,), with the accuracy of the worse sign, which is not checked."""
        both = torch.cat([lam, -lam])
        twice = lambda d: torch.cat([pushes.push(half) for half in d.chunk(2)])
        inner = max(1e-2 * self.goal, 30 * torch.finfo(lam.dtype).eps / float(lam.min()) ** 0.5)
        ends = pushed(
            self.objective.gradient, twice, self.hessian.solve, both, torch.cat([pushes.start, pushes.start]),
            tolerance=min(inner, self.goal), max_steps=self.max_steps,
        )  # fmt: skip
        up, down = (pushes.read(half) for half in ends.d.chunk(2))
        bend = pushes.bend(up, down, pushes.reading)  # the twin is the minimum itself, and stays there
        residuals, missing = (torch.maximum(*t.chunk(2)) for t in (ends.residuals, ends.missing))
        cov, zero = central_difference(up, down, lam), torch.zeros_like(lam)
        return Response(cov, lam, residuals, missing, zero, bend, zero, ends.steps)

    def _floor(self, first: Tensor, reading: Tensor) -> Tensor:
        """Return the smallest λ whose difference is above the rounding of readings of this size, (K,)."""
        size = torch.maximum(reading.abs().max(), first.sqrt())
        return torch.finfo(first.dtype).eps * size / (self.goal * first)

    def respond_alike(self, push: Push, count: int, tolerance: float) -> Response:
        """Return how the weights respond to ``count`` pushes with one λ, divided by four until they converge."""
        strength = self._common_strength(push, count)
        for _ in range(8):
            response = self.respond(push, lambda d: d, count, strength)
            if bool((response.missing <= tolerance).all() & (response.bend <= BENT).all()):
                break
            strength /= 4
        return response

    def _common_strength(self, push: Push, count: int) -> float:
        """Return a λ that moves the pushed functions by a small part of their standard deviation.

        Scores are one-sided differences with a relative error of about this part: 1e-4, or a hundredth in single
        precision, where rounding forbids smaller ones.
        """
        slopes = push(torch.zeros(count, self.objective.size).to(self.objective.centre))
        variance = (slopes * self.hessian.solve(slopes)).sum(1).max().double()
        if float(variance) == 0:
            raise NumericalError(
                "HFL: no weight moves what is pushed, the average over the evaluation inputs; expected one that does. "
                "Give other evaluation inputs, or another variant."
            )
        share = 1e-4 if self.objective.dtype == self.objective.network.dtype == torch.float64 else 0.01
        return float(share / variance.sqrt())


@dataclass(frozen=True, eq=False)
class FineTuner:
    """Fine-tuning of copies that are pushed up, pushed down and not pushed (the twin), on the same mini-batches.

    A second run of half as many steps shows how much of the response is still missing. The twin shows where the weights
    would have gone without a push, which distinguishes a bent response from a drift of all copies.
    """

    objective: Objective
    data: Data
    generator: torch.Generator
    tolerance: float
    steps: int
    learning_rate: float  # at the start; it falls to zero along a cosine
    batch_size: int
    root: ClassVar[Tensor | None] = None  # fine-tuning never forms the Hessian

    def respond(
        self, push: Push, read: Read, count: int, strength: float | None = None, value: Value | None = None
    ) -> Response:
        """Return the responses to ``count`` pushes.

        With ``strength=None`` λ is a tenth of one over the standard deviation under the prior: a prediction moves by at
        most a tenth of its posterior standard deviation, and yet far enough for steps of Adam's size.
        """
        objective = self.objective
        start = torch.zeros(count, objective.size).to(objective.centre)
        pushes = Pushes.of(push, read, start, value)
        if strength is None:
            variance = (pushes.slopes.double().square() / objective.prior.vector.detach()).sum(1)
            lam = 0.1 * torch.where(variance > 0, variance, 1.0).rsqrt().to(start)
        else:
            lam = torch.full_like(start[:, 0], strength)
        up, down, _ = map(read, self._tuned(push, lam, max(1, self.steps // 2)))
        half = central_difference(up, down, lam)
        up, down, twin = map(read, self._tuned(push, lam, self.steps))
        cov = central_difference(up, down, lam)
        whole, part = cov, half
        if value is None:  # the reading is the weights: compare the functions that were pushed
            whole, part = (pushes.value(each).unsqueeze(1) for each in (cov, half))
        tiny = torch.finfo(lam.dtype).tiny
        missing = (whole - part).abs().flatten(1).amax(1) / whole.abs().flatten(1).amax(1).clamp_min(tiny)
        distance = pushes.value((twin - pushes.reading).expand_as(up)).abs()
        drift = distance / pushes.value(cov).abs().clamp_min(tiny).sqrt()
        unknown, zero = torch.full_like(lam, torch.nan), torch.zeros_like(lam)
        return Response(cov, lam, unknown, missing, zero, pushes.bend(up, down, twin), drift, self.steps)

    def respond_alike(self, push: Push, count: int, tolerance: float) -> Response:
        """Return how the weights respond to ``count`` pushes, each with its λ."""
        return self.respond(push, lambda d: d, count)

    def _tuned(self, push: Push, lam: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights after these steps, from the centre: pushed up (K, P), down (K, P), and the twin (1, P)."""
        objective, count = self.objective, len(lam)
        d = torch.zeros(2 * count + 1, objective.size).to(objective.centre)
        signs = torch.cat([lam, -lam])[:, None]
        first, second = torch.zeros_like(d), torch.zeros_like(d)
        same_batches = torch.Generator().manual_seed(self.generator.initial_seed())
        batches = shuffled(self.data, self.batch_size, same_batches)
        for step in ProgressBar(range(steps), "fine-tuning", self.data.progress):
            batch = next(batches)
            f = objective.outputs(d[-1:], batch.inputs)[0]
            targets = objective.cast(objective.likelihood.targets(f, batch.targets))
            slope = objective.gradient(d, (replace(batch, inputs=objective.cast(batch.inputs), targets=targets),))
            slope[:-1] -= signs * torch.cat([push(half) for half in d[:-1].chunk(2)])
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope.square()
            rate = self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            unbiased = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12
            d = d - rate * first / (1 - 0.9 ** (step + 1)) / unbiased
        return d[:count], d[count:-1], d[-1:]


AnyResponder = Responder | FineTuner
