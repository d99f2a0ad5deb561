"""The Gaussian belief about an image given its measurements: solves, covariances and draws, for one prior and noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.memory import budget, runs
from lapwing.core.random import normal_rows
from lapwing.errors import UnsupportedError
from lapwing.inverse.classes import ClassMatrices, factorised, weighted_sum
from lapwing.inverse.matrix_free import MatrixFreeSolver
from lapwing.inverse.observation import Observation
from lapwing.inverse.problem import InverseProblem
from lapwing.linalg.operators import TINY, Solution
from lapwing.linalg.randomised import Eigenpairs

VARIANCE_SAMPLES = 1024  # draws from which variances are estimated where the covariance is too large
COPIES = 3  # float64 matrices of the size of the covariance that exist at once
SOLVED = 1e-6  # relative residual that solves with a Cholesky factor must reach


@dataclass(frozen=True, eq=False)
class Belief:
    """K_xx = J Σ Jᵀ, K_yy = A K_xx Aᵀ + σ² I, and what follows from them, by class matrices or by products alone."""

    problem: InverseProblem
    noise: Tensor  # σ², a scalar
    classes: ClassMatrices | None
    seed: int
    pairs: Eigenpairs | None

    @cached_property
    def matrix_free(self) -> MatrixFreeSolver:
        """The solver by products."""
        return MatrixFreeSolver.of(self.problem, self.noise, self.seed, self.pairs)

    @cached_property
    def factor(self) -> Tensor:
        """The Cholesky factor of K_yy."""
        noise = self.noise.detach()
        if self.classes is not None:
            return factorised(self.classes.covariance(self.problem.prior.coefficients().detach(), noise), noise)
        kernel = self.problem.observation.sandwich(self.image_covariance).clone()
        kernel.diagonal().add_(noise)
        return factorised(kernel, noise)

    def solve(self, rows: Tensor) -> Solution:
        """Return K_yy⁻¹ u for rows u (K, dy) with their residuals; raise unless they reach the tolerance."""
        if self.classes is None:
            return self.matrix_free.solve(rows)
        rhs = rows.to(self.factor)
        x = torch.cholesky_solve(rhs.mT, self.factor).mT
        gaps = (rhs - (x @ self.factor) @ self.factor.mT).norm(dim=1) / rhs.norm(dim=1).clamp_min(TINY)
        return Solution(x, gaps, 1, SOLVED).require_convergence("a Cholesky factor", "Raise noise_std.")

    def deviance(self) -> Tensor:
        """Return rᵀ K_yy⁻¹ r + log det K_yy for r = y - A h(mean), differentiable in the prior's values and noise."""
        if self.classes is None:
            return self.matrix_free.deviance()
        return self.classes.deviance(self.problem.prior_residual, self.problem.prior.coefficients(), self.noise)

    def class_traces(self) -> Tensor:
        """Return tr(A J S_c Jᵀ Aᵀ) for the classes of the prior, (classes,); estimates without class matrices."""
        if self.classes is None:
            return self.matrix_free.class_traces()
        return self.classes.observed.diagonal(dim1=1, dim2=2).sum(1)

    @property
    def has_image_matrices(self) -> bool:
        """Whether the class matrices of the image are stored."""
        return self.classes is not None and self.classes.image is not None

    @property
    def fits(self) -> bool:
        """Whether the covariance of the image fits the byte budget."""
        return COPIES * 8 * self.problem.network.size**2 <= budget(self.problem.network.device)

    @cached_property
    def image_covariance(self) -> Tensor:
        """K_xx (dx, dx) in float64."""
        if self.classes is not None and self.classes.image is not None:
            return weighted_sum(self.classes.image, self.problem.prior.coefficients().detach())
        size = self.problem.network.size
        with torch.no_grad():
            return self.problem.prior.gram(self.problem.rows(Observation(None, size, size), "rows of J"))

    @cached_property
    def explained(self) -> Tensor:
        """W (dy, dx) with Wᵀ W = K_xy K_yy⁻¹ K_yx."""
        cross = self.problem.observation.forward(self.image_covariance)  # (dx, dy)
        return torch.linalg.solve_triangular(self.factor, cross.mT, upper=False)

    def covariance(self) -> Tensor:
        """Return K_xx - K_xy K_yy⁻¹ K_yx (dx, dx) in float64; raise if it does not fit the byte budget."""
        if not self.fits and not self.has_image_matrices:
            size = self.problem.network.size
            raise UnsupportedError(
                f"the covariance of {size} pixels takes {COPIES * 8 * size**2 / 2**30:.3g} GiB; expected at most the "
                "byte budget. Use samples(n), or raise the budget with lw.memory.limit(...)."
            )
        return self.image_covariance - self.explained.mT @ self.explained

    @property
    def variance_error(self) -> float:
        """The relative standard error of ``variance``; zero if it is exact."""
        exact = self.classes is not None and (self.has_image_matrices or self.fits)
        return 0.0 if exact else math.sqrt(2 / VARIANCE_SAMPLES)

    def variance(self) -> Tensor:
        """Return the variance of every pixel, (dx,), in float64."""
        if self.variance_error == 0.0:
            return (self.image_covariance.diagonal() - self.explained.square().sum(0)).clamp_min(0)
        network, generator = self.problem.network, torch.Generator().manual_seed(self.seed + 2)
        total = torch.zeros(network.size, dtype=torch.float64, device=network.device)
        for chunk in self.chunks(VARIANCE_SAMPLES):
            total += self.deviations(chunk.stop - chunk.start, generator).double().square().sum(0)
        return total / VARIANCE_SAMPLES

    def chunks(self, n: int) -> Iterator[slice]:
        """Yield n draws in chunks that fit the byte budget."""
        network = self.problem.network
        each = (3 * network.selection.size + 4 * (network.size + self.problem.observation.rows)) * 8
        return runs(n, each, network.device)

    def prior_deviations(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return J w₀ (n, dx), with w₀ from the prior."""
        network = self.problem.network
        noise = normal_rows(n, network.selection.size, generator, network.f)
        return network.forward(self.problem.prior.root(noise).detach())

    def deviations(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return x₀ + K_xy K_yy⁻¹ (σ ξ - A x₀), (n, dx), with x₀ = J w₀ from the prior (Matheron's rule)."""
        problem, network = self.problem, self.problem.network
        size = network.selection.size
        noise = normal_rows(n, size + problem.observation.rows, generator, network.f)
        start = network.forward(problem.prior.root(noise[:, :size]).detach())
        error = self.noise.detach().sqrt() * noise[:, size:] - problem.observation.forward(start)
        weights = problem.observation.back(self.solve(error).x)
        if self.has_image_matrices:
            return start + (weights @ self.image_covariance).to(start)
        return start + problem.image_kernel(weights)

    def class_variances(self, i: Tensor, j: Tensor) -> Tensor:
        """Return r S_c rᵀ (classes, e) for the differences r of rows i (e,) and j (e,) of the Jacobian."""
        if self.classes is not None and self.classes.image is not None:
            image = self.classes.image
            return image[:, i, i] + image[:, j, j] - image[:, i, j] - image[:, j, i]
        network, prior = self.problem.network, self.problem.prior
        names = network.selection.names
        pull = network.pullback(names)
        total = torch.zeros(len(prior.class_blocks), len(i), dtype=torch.float64, device=network.device)
        for chunk in network.chunks(len(i), names):
            rows = network.f.new_zeros(chunk.stop - chunk.start, network.size)
            rows.scatter_add_(1, i[chunk, None], torch.ones_like(rows[:, :1]))
            rows.scatter_add_(1, j[chunk, None], -torch.ones_like(rows[:, :1]))
            grads = pull(rows)
            total[:, chunk] = prior.class_lengths((name, grads[name].flatten(1)) for name in names).double()
        return total
