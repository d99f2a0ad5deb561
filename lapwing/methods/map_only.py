"""The plain network behind the interface of a posterior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lapwing.data.batches import Data
from lapwing.methods.base import Conformance, Cost, Method, Work, Workload
from lapwing.posteriors.sampled import PointPosterior
from lapwing.problem import Problem, summed_loss


@dataclass(frozen=True)
class MapOnly(Method):
    """The plain network: no variance from the weights; the noise of a regression is the mean squared residual.

    Raises:
        DataError: In ``fit``, if the noise is to be learned and all residuals are zero.

    Cost: one forward pass over the data to fit, one to predict.
    Exact when: never; it is the baseline that shows what a method adds.

    >>> from lapwing.api import fit
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], "regression", method=MapOnly()).functions(x).std
    tensor([[0.],
            [0.]])
    """

    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance(never_exact="it has no posterior variance")

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> PointPosterior:
        statistics = summed_loss(problem.network, problem.likelihood, data)
        problem = problem.with_residual_noise(statistics)
        return PointPosterior(problem, statistics, problem.network.theta())

    def cost(self, workload: Workload) -> Cost:
        forward = Work(workload.forward)
        return workload.cost(0, workload.activations, forward, forward, note="no error bars from the weights")
