"""The result of pushing functions of the weights, and the checks that decide whether to trust it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lapwing.errors import NumericalError

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}  # of the variances
# Largest bend. The difference between up and down cancels the bend to first order and keeps its square, 6 % here, about
# the error that Adam is allowed. One side then moves 1.7 times as far as the other.
BENT = 0.25
TWIN = ", measured by how far an unpushed twin moves what is pushed"


@dataclass(frozen=True, eq=False)
class Response:
    """Responses to K pushes: covariances of the pushed functions with the values that were read, and their accuracy."""

    cov: Tensor  # of function k with its reading, (K, ...)
    strength: Tensor  # λ, (K,)
    residuals: Tensor  # relative residual of the worse of the two signs, (K,); NaN with Adam, which has none
    missing: Tensor  # share of the response that one more step would add, (K,)
    change: Tensor  # relative change between the last two strengths, (K,)
    bend: Tensor  # |g(up) + g(down) - 2 g(twin)| / |g(up) - g(down)|: 0 if straight, 1 if one side does not move, (K,)
    drift: Tensor  # how far the unpushed twin moved g, in posterior standard deviations of g, (K,)
    steps: int

    @classmethod
    def joined(cls, parts: Sequence[Response]) -> Response:
        """Return the responses of several runs of pushes as one; the steps are those of the longest run."""
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(cls) if field.name != "steps"]
        tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return cls(**tensors, steps=max(part.steps for part in parts))

    def checked(self, tolerance: float, drift: float = math.inf) -> Response:
        """Return the response itself; raise if it has not converged, is bent, or drifted further than ``drift``.

        An infinite tolerance accepts every finite response, without the checks of bend and drift.
        """
        rest = torch.maximum(self.missing, self.change)
        if not bool((rest <= tolerance).all()):
            worst, bad = largest(rest), ~(rest <= tolerance)
            residual = float(self.residuals[worst])
            known = "" if math.isnan(residual) else f" (relative residual {residual:.2g})"
            raise NumericalError(
                f"HFL: {int(bad.sum())} of {len(bad)} responses have not converged; the worst (push {worst}, strength "
                f"{float(self.strength[worst]):.3g}) is off by about {float(rest[worst]):.2g} of its value after "
                f"{self.steps} steps{known}; expected {tolerance:g}. {self._cause(worst)}, or use "
                "HFL(mode='linearised')."
            )
        if math.isinf(tolerance):
            return self
        if not bool((self.bend <= BENT).all()):
            worst, bad = largest(self.bend), ~(self.bend <= BENT)
            raise NumericalError(
                f"HFL: {int(bad.sum())} of {len(bad)} responses are not straight; the worst is that to push {worst}, "
                f"of strength {float(self.strength[worst]):.3g}. {_left_basin(float(self.bend[worst]))} give a smaller "
                "lam, leave lam out to have it chosen, or use HFL(mode='linearised')."
            )
        if not bool((self.drift <= drift).all()):
            raise NumericalError(far_from_minimum(float(self.drift.max()), drift, TWIN))
        return self

    def _cause(self, worst: int) -> str:
        """Return why a response has not converged, and what to do."""
        bend = float(self.bend[worst])
        if not bend <= BENT:
            return f"{_left_basin(bend)} give a smaller lam, or more steps if lam is None"
        if not bool(self.change[worst] <= self.missing[worst]):
            return "Two strengths of the push disagree down to the rounding error: give a larger tolerance"
        if math.isnan(self.residuals[worst]):
            return f"Up and down move alike (bend {bend:.2g}), so there were too few steps: give more steps"
        return (
            f"Newton's steps do not reach the pushed minimum (bend {bend:.2g} where they end): give a smaller lam, or "
            "a larger tolerance"
        )


def _left_basin(bend: float) -> str:
    return f"The push leaves the basin of the minimum (bend {bend:.2g}; expected at most {BENT}):"


def largest(values: Tensor) -> int:
    """Return the index of the largest value; NaN counts as infinite."""
    return int(values.nan_to_num(torch.inf).argmax())


def far_from_minimum(distance: float, limit: float, evidence: str = "") -> str:
    """Return the error message for weights that are at no minimum; ``evidence`` says how that was measured."""
    return (
        f"HFL: the weights are {distance:.2g} posterior standard deviations from the minimum of their regularised "
        f"loss{evidence}; expected at most {limit:g}. The response would be that of another network: train this one "
        "further with this prior as weight decay, allow it with HFL(drift=...), or use HFL(mode='linearised')."
    )


def distance_finding(distance: float, evidence: str = "") -> tuple[str, ...]:
    """Return the finding that the weights are not quite at a minimum, if they are not."""
    if not distance > 0.01:
        return ()
    return (
        f"the weights are {distance:.2g} posterior standard deviations from the minimum of their regularised loss"
        f"{evidence}; the error bars are those at the minimum",
    )
