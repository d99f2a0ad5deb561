"""The diagonal of the curvature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.curvature.blocks import BlockwiseCurvature, DiagonalBlock
from lapwing.curvature.sweep import Sweep
from lapwing.posteriors.problem import Problem
from lapwing.posteriors.weight_space import WeightPosterior


@dataclass(frozen=True)
class Diagonal:
    """Every weight by itself: the exact diagonal of the GGN. Smallest and fastest, ignores all correlation."""

    curvature: str = "ggn"

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        network = problem.network
        sweep = Sweep(network, problem.likelihood, data, self.curvature, generator, "Diagonal")
        totals: list[Tensor] = [torch.zeros(b.form, dtype=network.dtype, device=network.device) for b in network.layout]
        for jacobians in sweep:
            for total, (_, part) in zip(totals, jacobians, strict=True):
                total += part.squares()
            del jacobians, part  # before the next chunk is computed
        blocks = tuple(DiagonalBlock(total) for total in totals)
        return WeightPosterior.fitted(
            problem, BlockwiseCurvature(blocks, network.layout, network.selection), sweep.statistics
        )
