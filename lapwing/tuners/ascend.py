"""A few gradient steps on the evidence, for hyperparameters that are learned while a network trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from lapwing.core.settings import require_flag, require_integer, require_positive
from lapwing.core.trace import Step, Trace
from lapwing.tuners.search import Coordinates, refuse_not_finite, refuse_runaway


@dataclass(frozen=True)
class Ascend:
    """A tuner that takes a fixed number of Adam steps on the log evidence, in log-precisions and log-noise.

    These are the hyper-steps of Immer et al. 2021. While the weights still change, it does not pay to find the
    optimum for the weights of the moment.

    Cost: a log-determinant and its gradient for each step; no pass over the data.

    Args:
        steps: The number of steps; 0 only evaluates the evidence.
        rate: The learning rate of Adam.
        noise: Whether to learn the noise too, if the likelihood leaves it open.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, the posterior has no evidence.
        DivergedError: When called, if a precision leaves its range or the evidence is not finite.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=100.0)
    >>> len(posterior.tuned(lw.tuners.Ascend(steps=5)).trace.steps)  # the start and the end of every step
    6
    """

    steps: int = 100
    rate: float = 0.1
    noise: bool = True

    def __post_init__(self) -> None:
        require_integer("steps", self.steps, least=0)
        require_positive("rate", self.rate)
        require_flag("noise", self.noise)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior after the last step."""
        coordinates = Coordinates.of(posterior, self.noise)
        steps: list[Step] = []
        with torch.inference_mode(False), torch.enable_grad():
            x = coordinates.start.requires_grad_()
            optimiser = torch.optim.Adam([x], lr=self.rate)
            for number in range(self.steps + 1):
                steps.append(coordinates.step(x, math.nan))
                refuse_runaway(coordinates, steps, "Ascend")  # first: far out of range the evidence cannot be computed
                value = coordinates.at(x).log_evidence()
                steps[-1] = replace(steps[-1], score=float(value.detach()))
                refuse_not_finite(coordinates, steps, "Ascend")
                if number == self.steps:
                    break
                optimiser.zero_grad()
                (-value / coordinates.n_weights).backward()
                optimiser.step()
        return coordinates.finished(x, Trace("Ascend", steps=tuple(steps)))
