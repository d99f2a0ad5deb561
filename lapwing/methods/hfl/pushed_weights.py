"""Weights that were pushed once: scores and error bars anywhere for a few forward passes."""

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
    """f(x) ~ N(network output, what the pushed weights say), for one push or K random ones.

    "mean": v = Δf/λ after a push of the average prediction over an evaluation set: the mean covariance of f(x) with
    that set, not a variance; it may be negative, and then counts as no spread. "absolute": |Δf|/λ after a push of the
    average |f|. Both are *scores*: scale and ranking depend on the evaluation set, and ``scale`` (fitted on held-out
    data) makes the best of them. "random": the mean of (Δf/λ)² over K pushes in random directions with the posterior's
    own spread: an estimate of the variance, with a relative standard error of √(2/K).
    """

    problem: Problem
    moved: Tensor  # what the push adds to the weights, (K, P)
    strength: Tensor  # λ, (K,)
    variant: str
    statistics: Statistics
    theta: Tensor
    scale: float = 1.0
    findings: tuple[str, ...] = ()

    def scores(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """f (B, [T,] C) and Δf/λ for every push, (K, B, [T,] C): one forward pass for each, and one for f."""
        network = self.problem.network
        f = network(x).to(network.dtype)
        found = []
        for row, strength in zip(self.moved, self.strength, strict=True):
            with torch.no_grad():
                there = network.under(network.weights(row), x).to(network.dtype)
            found.append((there - f) / strength.to(f))
        return f, torch.stack(found)

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        f, scores = self.scores(x)
        if self.variant == "random":
            return FunctionGaussian.of_deviations(f, scores, len(scores) / self.scale, joint)
        variance = self.scale * (scores[0].abs() if self.variant == "absolute" else scores[0].clamp_min(0))
        if joint:
            return FunctionGaussian.across(f, torch.diag(variance.flatten()))
        return FunctionGaussian(f, torch.diag_embed(variance))

    def standard_error(self, x: Inputs) -> Tensor:
        """Of the variances of K random pushes, (B, [T,] C)."""
        _, scores = self.scores(x)
        squares = self.scale * scores.square()
        return squares.std(0) / len(squares) ** 0.5 if len(squares) > 1 else torch.full_like(squares[0], torch.inf)

    def scaled(self, scale: float) -> PushedWeights:
        return replace(self, scale=scale)
