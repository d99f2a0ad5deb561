"""Linear regression with any prior precision and any noise covariance, by dense matrices.

Nothing here calls the package. Targets of several outputs are one vector, data by outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class General:
    """y = X w + noise with w ~ N(0, (α A)⁻¹) and noise ~ N(0, φ B)."""

    x: Tensor  # (m, P)
    y: Tensor  # (m,)
    a: Tensor  # (P, P)
    b: Tensor  # (m, m)

    def covariance(self, alpha: float, phi: float) -> Tensor:
        return torch.linalg.inv(self.x.T @ torch.linalg.inv(self.b) @ self.x / phi + alpha * self.a)

    def mean(self, alpha: float, phi: float) -> Tensor:
        return self.covariance(alpha, phi) @ self.x.T @ torch.linalg.inv(self.b) @ self.y / phi

    def gamma(self, alpha: float, phi: float) -> float:
        return len(self.a) - alpha * float((self.covariance(alpha, phi) @ self.a).trace())

    def log_evidence(self, alpha: float, phi: float) -> float:
        kernel = self.x @ torch.linalg.inv(self.a) @ self.x.T / alpha + phi * self.b
        kernel = (kernel + kernel.T) / 2
        return float(torch.distributions.MultivariateNormal(torch.zeros_like(self.y), kernel).log_prob(self.y))
