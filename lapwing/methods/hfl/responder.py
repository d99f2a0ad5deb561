"""Responses by Newton steps with all data and one Hessian."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import NumericalError
from lapwing.linalg.newton import pushed
from lapwing.methods.hfl.hessian import FLAT, Hessian
from lapwing.methods.hfl.objective import Objective
from lapwing.methods.hfl.pushes import Push, Pushes, Read, Value, central_difference
from lapwing.methods.hfl.response import BENT, TOLERANCE, Response, largest


@dataclass(frozen=True, eq=False)
class Ends:
    """Accuracy of pushes of both signs: the worse of the two, (K,)."""

    residuals: Tensor
    missing: Tensor
    bend: Tensor
    steps: int

    def response(self, cov: Tensor, lam: Tensor, change: Tensor, steps: int) -> Response:
        return Response(cov, lam, self.residuals, self.missing, change, self.bend, torch.zeros_like(lam), steps)


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
        """L (P, P) with L Lᵀ the Hessian; None if it is not formed."""
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
            _check_strength(strength, float(floor.max()), float(most.min()), first.dtype)
            lam = torch.full_like(first, strength)
            cov, ends = self.at(pushes, lam)
            return ends.response(cov, lam, torch.zeros_like(lam), ends.steps)
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

        Functions that no weight moves have variance zero and any λ will do: they take the largest of the others.
        """
        solved = self.hessian.solve(pushes.slopes)
        first = (pushes.slopes * solved).sum(1)
        depends = pushes.slopes.any(1)
        if bool((first <= 0)[depends].any()):
            raise NumericalError(
                f"HFL: a variance came out as {float(first.min()):.3g}; expected above zero. The network is at no "
                "minimum of its regularised loss: train it further with this prior, or use HFL(mode='linearised')."
            )
        _check_flat(self.hessian.flat_variance(solved) / torch.where(depends, first, 1.0))
        return torch.where(depends, first, first.max() if bool(depends.any()) else 1.0)

    def _refined(self, pushes: Pushes, lam: Tensor, floor: Tensor) -> Response:
        """Halve λ for every push until two estimates agree."""
        raw, ends = self.at(pushes, lam)
        cov, total, change = raw, ends.steps, torch.full_like(lam, torch.inf)
        for _ in range(16):
            going = (torch.maximum(change, ends.missing) > 0.3 * self.goal) & (lam / 2 > floor)
            if not bool(going.any()):
                break
            lam = torch.where(going, lam / 2, lam)
            finer, ends = self.at(pushes, lam)
            total += ends.steps
            gap = (finer - raw) / 3  # the error falls with λ²
            size = finer.abs().flatten(1).amax(1).clamp_min(torch.finfo(lam.dtype).tiny)
            change = torch.where(going, gap.abs().flatten(1).amax(1) / size, change)
            cov = torch.where(going.reshape(-1, *[1] * (finer.ndim - 1)), finer + gap, cov)
            raw = finer
        return ends.response(cov, lam, change, total)

    def at(self, pushes: Pushes, lam: Tensor) -> tuple[Tensor, Ends]:
        """Return the responses at these strengths (K,) and their accuracy; raise nothing."""
        both = torch.cat([lam, -lam])
        twice = lambda d: torch.cat([pushes.push(half) for half in d.chunk(2)])
        inner = max(1e-2 * self.goal, 30 * torch.finfo(lam.dtype).eps / float(lam.min()) ** 0.5)
        ends = pushed(
            self.objective.gradient, twice, self.hessian.solve, both, torch.cat([pushes.start, pushes.start]),
            tolerance=min(inner, self.goal), max_steps=self.max_steps,
        )  # fmt: skip
        up, down = (pushes.read(half) for half in ends.d.chunk(2))
        bend = pushes.bend(up, down, pushes.reading)  # the twin is the minimum itself, and stays there
        worse = lambda t: torch.maximum(*t.chunk(2))
        return central_difference(up, down, lam), Ends(worse(ends.residuals), worse(ends.missing), bend, ends.steps)

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

        Scores are one-sided differences, off by a share that falls with λ; single precision leaves a hundredth.
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


def _check_strength(strength: float, low: float, high: float, dtype: torch.dtype) -> None:
    """Raise if λ is below rounding, or moves a prediction by more than its standard deviation."""
    if not low <= strength <= high:
        raise NumericalError(
            f"HFL: lam is {strength:.3g}; expected between {low:.2g} (below that a difference in {dtype} is rounding) "
            f"and {high:.2g} (above it a prediction moves by more than its standard deviation). Leave lam out to have "
            "it chosen."
        )


def _check_flat(share: Tensor) -> None:
    """Raise if flat directions may contribute more than a tenth of a variance, given their ``share`` (K,)."""
    if bool((share > 0.1).any()):
        raise NumericalError(
            f"HFL: the loss is flat along what is pushed (push {largest(share)}): its curvature there is below "
            f"{FLAT:g} of the prior's, and the variance has no bound. This happens for weights that can rotate without "
            "any change of the outputs, as in attention heads. Push outputs, or use HFL(mode='linearised')."
        )
