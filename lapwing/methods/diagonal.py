"""The diagonal of the curvature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lapwing.curvature.blocks import DiagonalSum
from lapwing.curvature.kronecker import blockwise_sum
from lapwing.curvature.sweep import CURVATURES, DRAWS, accumulate, choose_seeds
from lapwing.data.batches import Data
from lapwing.methods.base import Conformance, Cost, Exactness, Method, Offer, Requirements, Work, Workload
from lapwing.posteriors.weight_space import Sums, SumsData
from lapwing.problem import Problem
from lapwing.runtime.settings import NONE, integer, one_of, setting


@dataclass(frozen=True)
class Diagonal(SumsData, Method):
    """The exact diagonal of the GGN: the smallest and fastest curvature, without correlations between weights.

    Args:
        curvature: "ggn" (exact), "fisher_mc" (an estimate from gradients at labels drawn from the model), "empirical"
            (from gradients at the targets, see docs/methods/weight_space.md), or None: exact up to 64 outputs of a
            sample, C or T C, and estimated above. The last linear layer is exact for all but "empirical".
        draws: The number of labels drawn for each datum where the curvature is estimated. The error falls as one over
            the root of data times draws; ``posterior.findings`` states it.

    Raises:
        UnsupportedError: If a setting is not one of the above.

    Cost: one forward pass and a backward pass for each of the C outputs, or for each draw; none for the last linear
    layer. P numbers.
    Exact when: the GGN is diagonal, as in a network with one weight for each output.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.numbers import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=Diagonal(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    curvature: str | None = setting(None, one_of(CURVATURES) | NONE)
    draws: int = setting(DRAWS, integer())
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance((Exactness(lambda weights, rows: Diagonal(), "orthogonal"),))

    def sum_data(self, problem: Problem, data: Data, generator: torch.Generator | None) -> Sums:
        network = problem.network
        compute = lambda sweep: blockwise_sum(sweep, network, [DiagonalSum(block, network) for block in network.layout])
        seeds = choose_seeds(self.curvature, self.draws, problem, generator, data.processes.rank)
        return accumulate(compute, problem, data, seeds, "Diagonal")

    def cost(self, workload: Workload) -> Cost:
        workload, size = workload.with_curvature(self.curvature, self.draws), workload.weights
        fit, predict = Work(workload.blockwise + workload.squares), workload.prediction(Work(workload.quadratic))
        peak = workload.jacobian_bytes(formed=True, streams=True) + 8 * size
        return workload.cost(workload.itemsize * size, peak, fit, predict)

    @classmethod
    def offer(cls, requirements: Requirements) -> Offer:
        """Return the fallback for weights that are chosen one by one."""
        return Offer(cls(), 3)
