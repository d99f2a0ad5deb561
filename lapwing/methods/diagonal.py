"""The diagonal of the curvature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.curvature.blockwise import BlockwiseCurvature
from lapwing.curvature.outputs import by_output
from lapwing.curvature.structures import DiagonalBlock
from lapwing.curvature.sweep import Statistics, Sweep
from lapwing.posteriors.problem import Problem
from lapwing.posteriors.weight_space import WeightPosterior


@dataclass(frozen=True)
class Diagonal:
    """Every weight by itself: the exact diagonal of the GGN. Smallest and fastest, ignores all correlation."""

    curvature: str = "ggn"

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        network = problem.network

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
