"""The diagonal of the curvature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.random import independent_generator
from lapwing.curvature.blockwise import BlockwiseCurvature
from lapwing.curvature.per_output import by_output
from lapwing.curvature.structures import DiagonalBlock
from lapwing.curvature.sweep import Sweep, checked_curvature
from lapwing.losses import Statistics
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.problem import Problem


@dataclass(frozen=True)
class Diagonal:
    """Every weight by itself: the exact diagonal of the GGN. Smallest and fastest, ignores all correlation.

    ``curvature``: "ggn" (exact), or "fisher_mc" (sampled labels, one backward pass in all).

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

    def __post_init__(self) -> None:
        checked_curvature(self.curvature)

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        network = problem.network
        generator = independent_generator(generator)

        def compute(only: int | None) -> tuple[BlockwiseCurvature, Statistics]:
            sweep = Sweep(network, problem.likelihood, data, self.curvature, generator, "Diagonal", only)
            totals: list[Tensor] = [
                torch.zeros(block.form, dtype=network.dtype, device=network.device) for block in network.layout
            ]
            for jacobians in sweep:
                for total, (_, part) in zip(totals, jacobians, strict=True):
                    total += part.squares()
                del jacobians, part  # before the next chunk is computed
            blocks = tuple(DiagonalBlock(total) for total in totals)
            return BlockwiseCurvature(blocks, network.layout, network.selection), sweep.statistics

        return WeightPosterior.fitted(problem, *by_output(problem.likelihood, compute))
