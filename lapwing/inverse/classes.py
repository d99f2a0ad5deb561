"""The class matrices of an inverse problem: fixed matrices whose weighted sum is the covariance for every prior."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapwing.errors import NumericalError
from lapwing.inverse.observation import Observation
from lapwing.inverse.problem import InverseProblem


@dataclass(frozen=True, eq=False)
class ClassMatrices:
    """The matrices M_c = A J S_c Jᵀ Aᵀ (classes, dy, dy) and, for small images, N_c = J S_c Jᵀ (classes, dx, dx).

    In float64, whatever the network has: the noise is far below the largest variance, and rounding would hide it.
    They do not depend on hyperparameters, so that a step of a tuner needs no Jacobian.
    """

    observed: Tensor
    image: Tensor | None = None

    @classmethod
    def of(cls, problem: InverseProblem, image: bool) -> ClassMatrices:
        """Compute the matrices by one backward pass for each measurement, or for each pixel if ``image``."""
        observation, prior = problem.observation, problem.prior
        with torch.no_grad():
            if not image:
                return cls(_finite(prior.class_grams(problem.rows(observation, "rows of A J"))))
            pixels = Observation(None, observation.size, observation.size)
            matrices = _finite(prior.class_grams(problem.rows(pixels, "rows of J")))
            if observation.operator is None:
                return cls(matrices, matrices)
            return cls(torch.stack([observation.sandwich(matrix) for matrix in matrices]), matrices)

    def covariance(self, coefficients: Tensor, noise: Tensor) -> Tensor:
        """Return Σ_c coefficient_c M_c + noise I."""
        total = weighted_sum(self.observed, coefficients)
        total.diagonal().add_(noise)
        return total

    def deviance(self, residual: Tensor, coefficients: Tensor, noise: Tensor) -> Tensor:
        """Return rᵀ K⁻¹ r + log det K for ``covariance`` K and r (dy,), differentiable once in the last two."""
        value: Tensor = _Deviance.apply(residual, coefficients, noise, self)
        return value


def _finite(matrices: Tensor) -> Tensor:
    """Return the matrices; raise if the Jacobian that they come from is not finite."""
    if not math.isfinite(float(matrices.sum())):
        raise NumericalError(
            "the Jacobian of the network holds NaN or infinity; expected finite numbers. The derivative of an "
            "operation is not finite, such as that of a square root at zero."
        )
    return matrices


def weighted_sum(matrices: Tensor, coefficients: Tensor) -> Tensor:
    """Return Σ_c coefficient_c M_c (n, n)."""
    return (coefficients @ matrices.flatten(1)).reshape(matrices.shape[1:])


def factorised(covariance: Tensor, noise: Tensor) -> Tensor:
    """Return the lower Cholesky factor of the covariance of the measurements."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    if int(info) or not bool(torch.isfinite(factor.diagonal()).all()):
        raise NumericalError(
            "the covariance of the measurements A J Σ Jᵀ Aᵀ + σ² I is not positive definite in rounding: its largest "
            f"variance is {float(covariance.diagonal().max()):.3g} and σ² is {float(noise):.3g}; expected σ² well "
            "above the rounding of the former. Raise noise_std, lower the prior variance, or give a float64 model."
        )
    return factor


class _Deviance(torch.autograd.Function):
    """rᵀ K⁻¹ r + log det K for K = Σ_c coefficient_c M_c + noise I.

    With B = K⁻¹ - K⁻¹ r rᵀ K⁻¹ its gradients are tr(B M_c) and tr B.
    """

    @staticmethod
    def forward(ctx: Any, residual: Tensor, coefficients: Tensor, noise: Tensor, matrices: ClassMatrices) -> Tensor:
        factor = factorised(matrices.covariance(coefficients, noise), noise)
        solved = torch.cholesky_solve(residual[:, None], factor)[:, 0]
        ctx.save_for_backward(factor, solved)
        ctx.matrices = matrices
        return residual @ solved + 2 * factor.diagonal().log().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        factor, solved = ctx.saved_tensors
        slope, observed = torch.cholesky_inverse(factor) - torch.outer(solved, solved), ctx.matrices.observed
        return None, gradient * (observed.flatten(1) @ slope.flatten()), gradient * slope.trace(), None
