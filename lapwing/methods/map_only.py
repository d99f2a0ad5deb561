"""No posterior at all: the plain network behind the same interface."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing.core.data import Data
from lapwing.losses import summed_loss
from lapwing.posteriors.point import PointPosterior
from lapwing.problem import Problem


@dataclass(frozen=True)
class MapOnly:
    """The plain network: zero epistemic variance, and noise from the residuals. One forward pass to fit.

    >>> from lapwing.api import fit
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], "regression", method=MapOnly()).functions(x).std
    tensor([[0.],
            [0.]])
    """

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> PointPosterior:
        statistics = summed_loss(problem.network, problem.likelihood, data)
        problem = problem.with_residual_noise(statistics)
        return PointPosterior(problem, statistics, problem.network.theta())
