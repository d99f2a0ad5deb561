"""A few gradient steps on the evidence, for hyperparameters that are learned while a network trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from lapwing.core.trace import Step, Trace
from lapwing.tuners.coordinates import Coordinates
from lapwing.tuners.maximise_evidence import refuse_not_finite, refuse_runaway


@dataclass(frozen=True)
class Ascend:
    """``steps`` of Adam on the log-precisions (and the log-noise with ``noise=True``), ending where they end.

    The hyper-steps of Immer et al. 2021. While weights still move, the optimum of the moment is not worth finding.
    """

    steps: int = 100
    rate: float = 0.1
    noise: bool = True

    def __call__(self, posterior: Any) -> Any:
        coordinates = Coordinates.of(posterior, self.noise)
        steps: list[Step] = []
        with torch.inference_mode(False), torch.enable_grad():
            x = coordinates.start.requires_grad_()
            optimiser = torch.optim.Adam([x], lr=self.rate)
            for number in range(self.steps + 1):
                steps.append(coordinates.step(x, math.nan))
                refuse_runaway(coordinates, steps, "Ascend")  # first: far enough out there is nothing to evaluate
                value = coordinates.at(x).log_evidence()
                steps[-1] = replace(steps[-1], score=float(value.detach()))
                refuse_not_finite(coordinates, steps, "Ascend")
                if number == self.steps:
                    break
                optimiser.zero_grad()
                (-value / coordinates.weights).backward()
                optimiser.step()
        return coordinates.finished(x, Trace("Ascend", steps=tuple(steps)))
