"""Hyperparameters as one vector of logarithms, for whatever searches over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.core.trace import Step, Trace
from lapwing.errors import UnsupportedError
from lapwing.posteriors.protocols import HasEvidence, Tunable


@dataclass(frozen=True, eq=False)
class Coordinates:
    """log precisions (and log noise variances, where they are learned) of a posterior, (D,) in float64."""

    posterior: Any
    noise: bool = False

    @classmethod
    def of(cls, posterior: Any, noise: bool) -> Coordinates:
        """Refuses a posterior without an evidence; the noise counts only where the likelihood leaves it open."""
        if not isinstance(posterior, HasEvidence) or not isinstance(posterior, Tunable):
            raise UnsupportedError(
                f"{type(posterior).__name__} has no evidence to maximise; give the prior, or use a method that has one."
            )
        return cls(posterior, noise and posterior.noise is not None)

    @property
    def start(self) -> Tensor:
        parts = [self.posterior.problem.prior.values.detach().double().log().reshape(-1)]
        if self.noise:
            parts.append(self.posterior.noise.detach().double().log().reshape(-1).to(parts[0]))
        with torch.inference_mode(False):
            return torch.cat(parts).clone()

    @property
    def count(self) -> int:
        """How many precisions there are; the rest are noise variances."""
        return int(self.posterior.problem.prior.values.numel())

    @property
    def weights(self) -> int:
        return int(self.posterior.problem.network.selection.size)

    def at(self, x: Tensor) -> Any:
        """The posterior there, with a graph to x."""
        found = self.posterior
        if self.noise:
            found = found.with_noise(x[self.count :].exp().reshape(found.noise.shape))
        prior = found.problem.prior
        moved = prior.with_precision(x[: self.count].exp().reshape(prior.values.shape))
        return found.with_problem(found.problem.with_prior(moved))

    def step(self, x: Tensor, score: float, gamma: float | None = None) -> Step:
        values = x.detach().exp().tolist()
        return Step(score, tuple(values[: self.count]), tuple(values[self.count :]), gamma)

    def position(self, step: Step) -> Tensor:
        """Where a step was taken."""
        return torch.tensor([*step.precisions, *step.noise], dtype=torch.float64, device=self.start.device).log()

    def finished(self, x: Tensor, trace: Trace) -> Any:
        return self.at(x.detach()).with_trace(trace)
