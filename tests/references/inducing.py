"""Subspaces and inducing points of the tangent kernel from their formulas, by dense matrices.

Nothing here calls the package. ``z`` (M, P) are rows of the Jacobian at landmarks or inducing points, ``jac`` (N C, P)
those of all outputs of all data, ``curvature`` (N C, N C) that of the loss in these outputs over the dispersion, and
``precision`` (P,) the prior's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kernel(one: Tensor, other: Tensor, precision: Tensor) -> Tensor:
    """J A⁻¹ J'ᵀ."""
    return one @ torch.diag(1 / precision) @ other.T


def directions(z: Tensor, precision: Tensor, rank: int) -> Tensor:
    """(rank, P): A⁻¹ Zᵀ u / √λ for the leading eigenpairs (λ, u) of the landmarks' kernel."""
    values, vectors = torch.linalg.eigh(kernel(z, z, precision))
    leading = range(len(values) - 1, len(values) - 1 - rank, -1)
    return torch.stack([vectors[:, i] @ z / precision / values[i].sqrt() for i in leading])


def within(d: Tensor, matrix: Tensor) -> Tensor:
    """Dᵀ (D M Dᵀ)⁻¹ D: the inverse of a precision for weights that can only move along D."""
    return d.T @ torch.linalg.inv(d @ matrix @ d.T) @ d


def covariance(new: Tensor, z: Tensor, jac: Tensor, curvature: Tensor, precision: Tensor) -> Tensor:
    """K_** - K_*Z (K⁻¹ - (K + K_ZX Λ K_XZ)⁻¹) K_Z*, in function space (Titsias 2009)."""
    own = kernel(z, z, precision)
    seen = kernel(z, jac, precision)
    middle = torch.linalg.inv(own) - torch.linalg.inv(own + seen @ curvature @ seen.T)
    across = kernel(new, z, precision)
    return kernel(new, new, precision) - across @ middle @ across.T


def log_occam(z: Tensor, jac: Tensor, curvature: Tensor, precision: Tensor) -> Tensor:
    """-½ log det(I + Λ Q) - ½ tr Λ (K_XX - Q) with Q = K_XZ K⁻¹ K_ZX: at most -½ log det(I + Λ K_XX)."""
    seen = kernel(jac, z, precision)
    told = seen @ torch.linalg.inv(kernel(z, z, precision)) @ seen.T
    scaled = torch.eye(len(jac), dtype=jac.dtype) + curvature @ told
    missing = (curvature @ (kernel(jac, jac, precision) - told)).trace()
    return -0.5 * torch.linalg.slogdet(scaled)[1] - 0.5 * missing
