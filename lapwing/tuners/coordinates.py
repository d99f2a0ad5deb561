"""Hyperparameters as one vector of logarithms, for the tuners that search over them."""

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
    """The log-precisions of a posterior and, if ``noise``, its log noise variances: a vector x (D,) in float64."""

    posterior: Any
    noise: bool = False

    @classmethod
    def of(cls, posterior: Any, noise: bool) -> Coordinates:
        """Return the coordinates, with the noise only if the likelihood learns it; raise if there is no evidence."""
        if not isinstance(posterior, HasEvidence) or not isinstance(posterior, Tunable):
            raise UnsupportedError(
                f"{type(posterior).__name__} has no evidence to maximise; give the prior, or use a method that has one."
            )
        return cls(posterior, noise and posterior.noise is not None)

    @property
    def start(self) -> Tensor:
        """The present hyperparameters, (D,)."""
        parts = [self.posterior.problem.prior.values.detach().double().log().reshape(-1)]
        if self.noise:
            parts.append(self.posterior.noise.detach().double().log().reshape(-1).to(parts[0]))
        with torch.inference_mode(False):
            return torch.cat(parts).clone()

    @property
    def n_precisions(self) -> int:
        """The number of precisions; the other entries of x are noise variances."""
        return int(self.posterior.problem.prior.values.numel())

    @property
    def n_weights(self) -> int:
        """The number of weights P."""
        return int(self.posterior.problem.network.selection.size)

    def at(self, x: Tensor) -> Any:
        """Return the posterior at x, differentiable in x."""
        posterior = self.posterior
        if self.noise:
            posterior = posterior.with_noise(x[self.n_precisions :].exp().reshape(posterior.noise.shape))
        prior = posterior.problem.prior
        prior = prior.with_precision(x[: self.n_precisions].exp().reshape(prior.values.shape))
        return posterior.with_problem(posterior.problem.with_prior(prior))

    def step(self, x: Tensor, score: float, gamma: float | None = None) -> Step:
        """Return the entry of the trace for x."""
        values = x.detach().exp().tolist()
        return Step(score, tuple(values[: self.n_precisions]), tuple(values[self.n_precisions :]), gamma)

    def position(self, step: Step) -> Tensor:
        """Return x of a step."""
        return torch.tensor([*step.precisions, *step.noise], dtype=torch.float64, device=self.start.device).log()

    def finished(self, x: Tensor, trace: Trace) -> Any:
        """Return the posterior at x with the trace."""
        return self.at(x.detach()).with_trace(trace)
