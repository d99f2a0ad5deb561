"""The posterior of the mode "linearised": responses of the tangent model, by linear systems without a λ."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.core.data import Inputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.state import State
from lapwing.errors import UnsupportedError
from lapwing.linalg.block_cg import block_conjugate_gradients
from lapwing.linalg.design import gram_product
from lapwing.linalg.solution import Solution
from lapwing.losses import Statistics
from lapwing.methods.hfl.response import NO_FILE
from lapwing.networks.functionals import Functional, weight_slope
from lapwing.networks.jacobians import LayerJacobians
from lapwing.problem import Problem
from lapwing.tangent.design import NetworkDesign

ROWS = 256  # outputs that are solved for at once


@dataclass(frozen=True, eq=False)
class LinearisedResponse:
    """f(x) ~ N(network output, J Λ⁻¹ Jᵀ) with Λ = G/φ + A, by block conjugate gradients for the rows of J at x.

    The tangent model's loss is quadratic, so its response does not depend on the strength of the push, and equals the
    GGN-Laplace variance. Needs the data at every prediction. ``wide`` takes products in float64 also for factors in
    float32, because single precision cannot resolve a variance that is a millionth of the prior's.
    """

    problem: Problem
    design: NetworkDesign
    statistics: Statistics
    theta: Tensor
    tolerance: float  # of the residuals, and of the error they cause in a variance
    wide: bool = False
    max_iterations: int = 2000

    def with_problem(self, problem: Problem) -> LinearisedResponse:
        """Return the posterior under another prior or noise; the data are not read again."""
        if problem.prior.needs_curvature:
            raise UnsupportedError("HFL(mode='linearised') keeps no curvature, and g_prior() needs one; use Full().")
        return replace(self, problem=problem)

    def solved(self, rows: Tensor) -> Solution:
        """Return Λ⁻¹ times every row (K, P), with residuals.

        Works in units of the prior, where Λ is at least one and most directions converge at once: a residual r then
        leaves out at most r² of a variance.
        """
        root = self.problem.prior.vector.detach().double().rsqrt()
        phi = self.problem.likelihood.dispersion.detach().to(root)
        product = lambda v: root * self._gram(root * v) / phi + v
        b, tolerance = rows.double() * root, self.tolerance
        while True:
            solution = block_conjugate_gradients(product, b, tolerance=tolerance, max_iterations=self.max_iterations)
            missing, variance = (solution.residuals * b.norm(dim=1)).square(), (solution.x * b).sum(1)
            most = float(torch.where(missing > 0, missing / variance, 0.0).max())
            if most <= self.tolerance:
                return replace(solution, x=solution.x * root)
            tolerance *= 0.5 * (self.tolerance / most) ** 0.5

    def _gram(self, v: Tensor) -> Tensor:
        if not self.wide:
            return gram_product(self.design, v)
        total = torch.zeros_like(v)
        for part in self.design:
            total += part.jacobians.double().gram(v)
        return total

    def state(self) -> State:
        """Raise ``UnsupportedError``: predictions need the data, which a file does not hold."""
        raise UnsupportedError(NO_FILE)

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        network = self.problem.network
        if joint:
            tangent = network.linearise(x)
            f = tangent.f.to(network.dtype)
            rows = _flat(tangent.jacobians())
            cov = torch.cat([self.solved(part).x for part in rows.split(ROWS)]) @ rows.mT
            return FunctionGaussian.across(f, 0.5 * (cov + cov.mT))
        outputs = torch.Size(network.output_shape).numel()
        means, covs = [], []
        for _, tangent in network.tangents(x, most=max(1, ROWS // outputs)):
            jacobians = tangent.jacobians()
            rows = _flat(jacobians)
            solved = self.solved(rows).x.unflatten(0, (jacobians.batch, jacobians.tokens, -1))
            cov = rows.unflatten(0, (jacobians.batch, jacobians.tokens, -1)) @ solved.mT
            f = tangent.f.to(network.dtype)
            means.append(f)
            covs.append((0.5 * (cov + cov.mT)).to(f) if f.ndim == 3 else (0.5 * (cov + cov.mT)).squeeze(1).to(f))
        return FunctionGaussian(torch.cat(means), torch.cat(covs))

    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Return the variance of a scalar function of the weights by name, or of the outputs at x, to first order."""
        slope = weight_slope(self.problem.network, function, x).double()
        return self.solved(slope.unsqueeze(0)).x[0] @ slope


def _flat(jacobians: LayerJacobians) -> Tensor:
    """Return the Jacobian with one row for each output, (B [T] C, P), in float64."""
    return jacobians.whole().double().flatten(0, 1)
