"""Ridge regression with dense matrices: designs of the tangent model, samples from given noise, evidence.

Nothing here calls the package. A design X has the GGN for its Gram matrix; with the noise φ and the prior precisions A
the posterior precision is Λ = XᵀX/φ + A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def root(kind: str, f: Tensor) -> Tensor:
    """R (C, K) with R Rᵀ the curvature of the loss in the outputs f (C,) of one datum.

    Softmax: diag(√p) H without its last column, H = I - 2 u uᵀ the reflection that takes √p to minus the last axis;
    H is orthogonal and √p its last column but for the sign, so that R Rᵀ = diag(p) - p pᵀ.
    """
    if kind == "gaussian":
        return torch.eye(len(f), dtype=f.dtype)
    if kind == "bernoulli":
        p = f.sigmoid()
        return torch.diag((p * (1 - p)).sqrt())
    p = f.softmax(0)
    u = p.sqrt()
    u[-1] += 1
    u = u / u.norm()
    reflection = torch.eye(len(f), dtype=f.dtype) - 2 * torch.outer(u, u)
    return (p.sqrt()[:, None] * reflection)[:, :-1]


def design(kind: str, f: Tensor, jacobian: Tensor) -> Tensor:
    """Rᵀ J of all data, one under the other: f (N, C), jacobian (N, C, P)."""
    return torch.cat([root(kind, each).T @ j for each, j in zip(f, jacobian, strict=True)])


def draws(x: Tensor, zeta: Tensor, eps: Tensor, precision: Tensor, phi: float = 1.0) -> Tensor:
    """Λ⁻¹ (A^½ ζ + Xᵀ ε / √φ) for every row of noise, (K, P)."""
    total = x.T @ x / phi + torch.diag(precision)
    return torch.linalg.solve(total, (precision.sqrt() * zeta + eps @ x / math.sqrt(phi)).T).T


def complete(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """As many rows of noise (ζ, ε) as they have entries, whose second moments are exactly those of the normal one.

    The rows are orthogonal with squared length K: (1/K) Σ z zᵀ over the samples is then Λ⁻¹, for every precision.
    """
    size = sum(x.shape)
    q, _ = torch.linalg.qr(torch.randn(size, size, dtype=x.dtype, generator=generator))
    rows = math.sqrt(size) * q
    return rows[:, : x.shape[1]], rows[:, x.shape[1] :]


@dataclass(frozen=True)
class Linear:
    """y = X w + noise with w ~ N(0, I/α): everything about it, from the eigenvalues of XᵀX."""

    x: Tensor
    y: Tensor

    def covariance(self, alpha: float, phi: float) -> Tensor:
        eye = torch.eye(self.x.shape[1], dtype=self.x.dtype)
        return torch.linalg.inv(self.x.T @ self.x / phi + alpha * eye)

    def mean(self, alpha: float, phi: float) -> Tensor:
        return self.covariance(alpha, phi) @ self.x.T @ self.y / phi

    def gamma(self, alpha: float, phi: float) -> float:
        values = torch.linalg.eigvalsh(self.x.T @ self.x) / phi
        return float((values / (values + alpha)).sum())

    def log_evidence(self, alpha: float, phi: float) -> float:
        kernel = self.x @ self.x.T / alpha + phi * torch.eye(len(self.y), dtype=self.x.dtype)
        return float(torch.distributions.MultivariateNormal(torch.zeros_like(self.y), kernel).log_prob(self.y))

    def optimum(self, phi: float | None = None, start: float = 1.0) -> tuple[float, float]:
        """Precision and noise variance (unless given) where the evidence is stationary, by MacKay's updates."""
        alpha, noise = start, float(self.y.var()) if phi is None else phi
        for _ in range(2000):
            mean, gamma = self.mean(alpha, noise), self.gamma(alpha, noise)
            new = gamma / float(mean @ mean)
            gap = float((self.y - self.x @ mean).square().sum())
            other = gap / (len(self.y) - gamma) if phi is None else noise
            moved = abs(math.log(new / alpha)) + abs(math.log(other / noise))
            alpha, noise = new, other
            if moved < 1e-14:
                break
        return alpha, noise
