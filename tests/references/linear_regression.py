"""Bayesian linear regression from the textbook (Bishop 2006, section 3.3), for any diagonal prior and noise.

y = Φ θ + noise, θ ~ N(mean, diag(precision)⁻¹). Φ (N, P), y (N,), noise variances (N,).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.references.dense import normal_log_density


@dataclass(frozen=True)
class Exact:
    mean: Tensor
    covariance: Tensor
    log_evidence: Tensor


def regress(phi: Tensor, y: Tensor, precision: Tensor, noise: Tensor, mean: Tensor | None = None) -> Exact:
    mean = torch.zeros(phi.shape[1], dtype=phi.dtype) if mean is None else mean
    total = torch.diag(precision)
    moment = precision * mean
    for row, target, variance in zip(phi, y, noise, strict=True):
        total = total + torch.outer(row, row) / variance
        moment = moment + row * target / variance
    covariance = torch.linalg.inv(total)
    kernel = phi @ torch.diag(1 / precision) @ phi.T + torch.diag(noise)
    return Exact(covariance @ moment, covariance, normal_log_density(y, phi @ mean, kernel))
