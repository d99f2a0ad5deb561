"""The diagonal of the curvature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lapwing.core.data import Data
from lapwing.core.random import independent_generator
from lapwing.curvature.blocks import DiagonalSum
from lapwing.curvature.blockwise import BlockwiseCurvature, blockwise_sum
from lapwing.curvature.sweep import Seeds, Sweep, checked_curvature
from lapwing.methods.protocol import Budget, Conformance, Cost, Exactness, Offer, Workload
from lapwing.posteriors.weight_space import WeightPosterior, by_output
from lapwing.problem import Problem, Statistics


@dataclass(frozen=True)
class Diagonal:
    """The exact diagonal of the GGN: the smallest and fastest curvature, without correlations between weights.

    Args:
        curvature: "ggn" (exact), or "fisher_mc" (gradients at sampled labels, one backward pass in all).

    Raises:
        UnsupportedError: If ``curvature`` is neither.

    Cost: one forward pass and a backward pass for each of the C outputs; P numbers.
    Exact when: the GGN is diagonal, as in a network with one weight for each output.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.gaussian import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=Diagonal(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    curvature: str = "ggn"
    conformance: ClassVar[Conformance] = Conformance((Exactness(lambda weights, rows: Diagonal(), "orthogonal"),))

    def __post_init__(self) -> None:
        checked_curvature(self.curvature)

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        network = problem.network
        generator = independent_generator(generator)

        def compute(output: int | None) -> tuple[BlockwiseCurvature, Statistics]:
            sweep = Sweep(network, problem.likelihood, data, Seeds(self.curvature, generator, output), "Diagonal")
            return blockwise_sum(sweep, network, lambda block: DiagonalSum(block, network)), sweep.statistics

        return WeightPosterior.fitted(problem, *by_output(problem.likelihood, compute))

    def cost(self, workload: Workload) -> Cost:
        return workload.cost(workload.itemsize * workload.weights, workload.all_outputs + workload.squares)

    @classmethod
    def offer(cls, budget: Budget) -> Offer:
        """Return the fallback for weights that are chosen one by one."""
        return Offer(cls(), 3)
