"""The two bandits of the tutorial: arms with random features, and points of a square with a smooth reward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lapwing as lw

SCALE = 0.2  # length over which the smooth reward changes


@dataclass(frozen=True, eq=False)
class Bandit:
    """Arms with their features and values. The prior precision of the weights is one."""

    value: Tensor  # (A,), the reward of every arm without noise
    features: Callable[[Tensor], Tensor | lw.linear.OperatorDesign]  # of some arms, by their numbers
    scores: Callable[[Tensor], Tensor]  # of all arms under weights (S, P): (S, A)
    root: Tensor  # (A, R), of the prior covariance of the values, for the exact posterior
    noise_std: float
    places: Tensor | None = None  # (A, 2), if arms are points

    def posterior(
        self, pulls: Tensor, rewards: Tensor, samples: int, generator: torch.Generator, **given: float | None
    ) -> lw.linear.LinearPosterior:
        """Fit with the true precision and noise, or those given. The generator advances: each round has new samples."""
        settings: dict[str, Any] = {"precision": 1.0, "noise_std": self.noise_std, **given}
        return lw.linear.fit(self.features(pulls), rewards, num_samples=samples, generator=generator, **settings)


def linear(seed: int, arms: int = 500, columns: int = 20) -> Bandit:
    """Return a bandit with arms and weights from a normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(arms, columns, generator=generator, dtype=torch.float64) / columns**0.5
    weights = torch.randn(columns, generator=generator, dtype=torch.float64)
    return Bandit(matrix @ weights, lambda pulls: matrix[pulls], lambda drawn: drawn @ matrix.mT, matrix, 0.5)


@dataclass(frozen=True, eq=False)
class Fourier:
    """Features √(2/P) cos(ω·x + b), random ω (2, P) and b (P,); their products approximate exp(−|x − x'|²/2s²)."""

    frequencies: Tensor
    phases: Tensor

    @classmethod
    def drawn(cls, columns: int, generator: torch.Generator) -> Fourier:
        return cls(
            torch.randn(2, columns, generator=generator) / SCALE,
            2 * math.pi * torch.rand(columns, generator=generator),
        )

    def __call__(self, points: Tensor) -> Tensor:
        waves = torch.addmm(self.phases, points.to(self.phases), self.frequencies).cos_()
        return waves.mul_((2 / len(self.phases)) ** 0.5)

    def forward(self, points: Tensor, v: Tensor) -> Tensor:
        """Return X v for rows v (S, P), sixty-four rows of X at a time: (S, n)."""
        v = v.to(self.phases)
        return torch.cat([v @ self(part).mT for part in points.split(64)], 1)

    def back(self, points: Tensor, u: Tensor) -> Tensor:
        """Return Xᵀ u for rows u (S, n): (S, P)."""
        total = self.phases.new_zeros(len(u), len(self.phases))
        for part, weight in zip(points.split(64), u.to(total).split(64, 1), strict=True):
            total.addmm_(weight, self(part))
        return total

    def design(self, points: Tensor, pulls: Tensor) -> lw.linear.OperatorDesign:
        """Return a float32 design with a row for each pull; an arm that was pulled often is computed once."""
        arms, which = pulls.unique(return_inverse=True)
        return lw.linear.OperatorDesign(
            rows=len(pulls),
            size=len(self.phases),
            forward=lambda v: self.forward(points[arms], v)[:, which],
            back=lambda u: self.back(points[arms], u.new_zeros(len(u), len(arms)).index_add_(1, which, u)),
            like=self.phases[:0],
        )


def smooth(seed: int, arms: int = 1000, columns: int = 100_000) -> Bandit:
    """Return a bandit of points in a square. Values come from the Gaussian process, not from the features."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(arms, 2, generator=generator, dtype=torch.float64)
    kernel = (-0.5 * torch.cdist(points, points).square() / SCALE**2).exp()
    root = torch.linalg.cholesky(kernel + 1e-8 * torch.eye(arms, dtype=torch.float64))
    value = root @ torch.randn(arms, generator=generator, dtype=torch.float64)
    features = Fourier.drawn(columns, generator)
    return Bandit(
        value,
        lambda pulls: features.design(points, pulls),
        lambda drawn: features.forward(points, drawn).double(),
        root,
        0.3,
        points,
    )
