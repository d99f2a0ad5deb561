"""The posterior of the mode "pretrained": pushed weights, compared with the network by forward passes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.core.data import Inputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.losses import Statistics
from lapwing.problem import Problem

VARIANTS = ("mean", "absolute", "random")


@dataclass(frozen=True, eq=False)
class PushedWeights:
    """f(x) ~ N(network output, a score from the outputs under pushed weights), for one push or K random ones.

    "mean": v = Δf/λ after a push of the average output over an evaluation set: the mean covariance of f(x) with that
    set, not a variance; negative values count as zero. "absolute": |Δf|/λ after a push of the average |f|. Both are
    *scores*: scale and ranking depend on the evaluation set, and ``scale`` is fitted on held-out data. "random": the
    mean of (Δf/λ)² over K pushes in random directions distributed as the posterior: an estimate of the variance, with
    a relative standard error of √(2/K).
    """

    problem: Problem
    moved: Tensor  # what a push adds to the weights, (K, P)
    strength: Tensor  # λ, (K,)
    variant: str
    statistics: Statistics
    theta: Tensor
    scale: float = 1.0
    findings: tuple[str, ...] = ()

    def scores(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return f (B, [T,] C) and Δf/λ for every push, (K, B, [T,] C). Cost: K + 1 forward passes."""
        network = self.problem.network
        f = network(x).to(network.dtype)
        scores = []
        for row, strength in zip(self.moved, self.strength, strict=True):
            with torch.no_grad():
                pushed = network.under(network.weights(row), x).to(network.dtype)
            scores.append((pushed - f) / strength.to(f))
        return f, torch.stack(scores)

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        f, scores = self.scores(x)
        if self.variant == "random":
            return FunctionGaussian.of_deviations(f, scores, len(scores) / self.scale, joint)
        variance = self.scale * (scores[0].abs() if self.variant == "absolute" else scores[0].clamp_min(0))
        if joint:
            return FunctionGaussian.across(f, torch.diag(variance.flatten()))
        return FunctionGaussian(f, torch.diag_embed(variance))

    def standard_error(self, x: Inputs) -> Tensor:
        """Return the standard error of the variances from K random pushes, (B, [T,] C); infinite for K = 1."""
        _, scores = self.scores(x)
        squares = self.scale * scores.square()
        return squares.std(0) / len(squares) ** 0.5 if len(squares) > 1 else torch.full_like(squares[0], torch.inf)

    def scaled(self, scale: float) -> PushedWeights:
        """Return the posterior with this factor on its variances."""
        return replace(self, scale=scale)
