"""The Gaussian belief about an image given its measurements: solves, covariances and draws, for one prior and noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapwing.errors import NumericalError, UnsupportedError
from lapwing.inverse.problem import InverseProblem, Observation
from lapwing.linalg import krylov
from lapwing.linalg.operators import TINY, Solution
from lapwing.runtime.memory import budget, chunks
from lapwing.runtime.threads import normal_rows


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
                return cls(_finite(prior.class_grams(observation.rows, problem.rows(observation, "rows of A J"))))
            pixels = Observation(None, observation.size, observation.size)
            matrices = _finite(prior.class_grams(pixels.rows, problem.rows(pixels, "rows of J")))
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
        return _Deviance.apply(residual, coefficients, noise, self)


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


def factorise(covariance: Tensor, noise: Tensor) -> Tensor:
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
        factor = factorise(matrices.covariance(coefficients, noise), noise)
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


RANK = 200  # of the preconditioner
PROBES, STEPS = 16, 40  # of the log-determinant
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}  # relative residuals that solves reach
MOST = 64  # right-hand sides that share a Krylov space


@dataclass(frozen=True, eq=False)
class Solves:
    """What the evidence needs of one prior and noise, as numbers without a graph.

    An estimate of log det K, with probes u, v (n, dy) such that E uᵀ B v = tr(K⁻¹ B); and a = K⁻¹ r (dy,) for
    r = y - A h(mean). All of them are mapped to weights (·, P) too, by Jᵀ Aᵀ.
    """

    logdet: Tensor
    error: float  # the standard error of the log-determinant over the probes
    left: Tensor
    right: Tensor
    a: Tensor
    weights_left: Tensor
    weights_right: Tensor
    weights_a: Tensor


@dataclass(frozen=True, eq=False)
class MatrixFreeSolver:
    """The covariance K = A J Σ Jᵀ Aᵀ + σ² I by its products, with a preconditioner from leading eigenpairs.

    ``pairs`` may be those of other hyperparameters: solves then take more iterations, and nothing else changes.
    """

    problem: InverseProblem
    noise: Tensor
    pairs: krylov.RandomisedEigenpairs
    seed: int

    @classmethod
    def of(
        cls, problem: InverseProblem, noise: Tensor, seed: int, pairs: krylov.RandomisedEigenpairs | None = None
    ) -> MatrixFreeSolver:
        """Return the solver; without eigenpairs they cost two products of up to 210 rows."""
        rows, generator = problem.observation.rows, torch.Generator().manual_seed(seed)
        if pairs is None:
            pairs = krylov.randomised_eigenpairs(
                problem.kernel, rows, min(RANK, rows), generator, problem.network.device
            )
        return cls(problem, noise, pairs, seed)

    @cached_property
    def _shift(self) -> float:
        return float(self.noise.detach())

    def product(self, u: Tensor) -> Tensor:
        """Return K u for rows u (K, dy), in float64."""
        return self.problem.kernel(u).double() + self._shift * u

    def solve(self, rhs: Tensor) -> Solution:
        """Return K⁻¹ b for every row b; raise unless all residuals reach the tolerance."""
        parts = [
            krylov.block_conjugate_gradients(
                self.product,
                part,
                root=lambda rows: self.pairs.power(rows, self._shift, -0.5),
                tolerance=TOLERANCE[self.problem.network.dtype],
            )
            for part in rhs.double().split(MOST)
        ]
        x, residuals = torch.cat([part.x for part in parts]), torch.cat([part.residuals for part in parts])
        return Solution(x, residuals, max(part.iterations for part in parts), parts[0].tolerance)

    def deviance(self) -> Tensor:
        """Return rᵀ K⁻¹ r plus an estimate of log det K, differentiable in the prior's values and the noise.

        log det K = log det P + log det(P^-½ K P^-½), where the second term is near zero and estimated from probes by
        Lanczos quadrature. The gradient is the mean of (K⁻¹ P^½ z)ᵀ ∂K (P^-½ z) over the same probes z. The quadratic
        form is the largest value of 2 rᵀ a - aᵀ K a, at a = K⁻¹ r: what the solve misses enters squared.
        """
        solves, prior = self.solves, self.problem.prior
        slope = (solves.weights_left * prior.multiply(solves.weights_right)).sum(1).mean()
        slope = slope + self.noise * (solves.left * solves.right).sum(1).mean()
        logdet = solves.logdet + slope - slope.detach()
        length = solves.weights_a @ prior.multiply(solves.weights_a) + self.noise * (solves.a @ solves.a)
        return logdet + 2 * (self.problem.prior_residual @ solves.a) - length

    @cached_property
    def solves(self) -> Solves:
        problem, shift = self.problem, self._shift
        probes = self._probes()
        with torch.no_grad():
            root = lambda rows: self.pairs.power(rows, shift, -0.5)
            quadrature = krylov.lanczos_quadrature(lambda v: root(self.product(root(v))), probes, STEPS)
            each = quadrature.ends(lambda nodes: nodes.clamp_min(TINY).log())[1]  # the rule without a node at zero
            right_sides = torch.cat([self.pairs.power(probes, shift, 0.5), problem.prior_residual[None]])
            solved, right = self.solve(right_sides).x, root(probes)  # all share one Krylov space
            weights, weights_right = (problem.back(rows).double() for rows in (solved, right))
        error = 0.0 if problem.observation.rows <= PROBES else float(each.std()) / math.sqrt(PROBES)
        return Solves(
            logdet=self.pairs.logdet(shift) + each.mean(), error=error,
            left=solved[:-1], right=right, a=solved[-1],
            weights_left=weights[:-1], weights_right=weights_right, weights_a=weights[-1],
        )  # fmt: skip

    def class_traces(self) -> Tensor:
        """Return estimates of tr(A J S_c Jᵀ Aᵀ) for the classes of the prior, (classes,), from the same probes."""
        problem = self.problem
        rows = problem.network.selection.split(problem.back(self._probes()))
        return problem.prior.class_lengths((name, part.flatten(1)) for name, part in rows.items()).double().mean(1)

    def _probes(self) -> Tensor:
        """Return vectors z with mean z zᵀ = I: random signs, or a scaled basis, which is exact, if that has no more."""
        rows, device = self.problem.observation.rows, self.problem.network.device
        if rows <= PROBES:
            return math.sqrt(rows) * torch.eye(rows, dtype=torch.float64, device=device)
        return krylov.random_signs(PROBES, rows, torch.Generator().manual_seed(self.seed + 1), device)


VARIANCE_SAMPLES = 1024  # draws from which variances are estimated where the covariance is too large
COPIES = 3  # float64 matrices of the size of the covariance that exist at once
SOLVED = 1e-6  # relative residual that solves with a Cholesky factor must reach


@dataclass(frozen=True, eq=False)
class InverseBelief:
    """K_xx = J Σ Jᵀ, K_yy = A K_xx Aᵀ + σ² I, and what follows from them, by class matrices or by products alone."""

    problem: InverseProblem
    noise: Tensor  # σ², a scalar
    classes: ClassMatrices | None
    seed: int
    pairs: krylov.RandomisedEigenpairs | None

    @cached_property
    def matrix_free(self) -> MatrixFreeSolver:
        """The solver by products."""
        return MatrixFreeSolver.of(self.problem, self.noise, self.seed, self.pairs)

    @cached_property
    def factor(self) -> Tensor:
        """The Cholesky factor of K_yy."""
        noise = self.noise.detach()
        if self.classes is not None:
            return factorise(self.classes.covariance(self.problem.prior.coefficients().detach(), noise), noise)
        kernel = self.problem.observation.sandwich(self.image_covariance).clone()
        kernel.diagonal().add_(noise)
        return factorise(kernel, noise)

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
            return self.problem.prior.gram(size, self.problem.rows(Observation(None, size, size), "rows of J"))

    @cached_property
    def whitened_cross(self) -> Tensor:
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
        return self.image_covariance - self.whitened_cross.mT @ self.whitened_cross

    @property
    def variance_error(self) -> float:
        """The relative standard error of ``variance``; zero if it is exact."""
        exact = self.classes is not None and (self.has_image_matrices or self.fits)
        return 0.0 if exact else math.sqrt(2 / VARIANCE_SAMPLES)

    def variance(self) -> Tensor:
        """Return the variance of every pixel, (dx,), in float64."""
        if self.variance_error == 0.0:
            return (self.image_covariance.diagonal() - self.whitened_cross.square().sum(0)).clamp_min(0)
        network, generator = self.problem.network, torch.Generator().manual_seed(self.seed + 2)
        total = torch.zeros(network.size, dtype=torch.float64, device=network.device)
        for chunk in self.chunks(VARIANCE_SAMPLES):
            total += self.deviations(chunk.stop - chunk.start, generator).double().square().sum(0)
        return total / VARIANCE_SAMPLES

    def chunks(self, n: int) -> Iterator[slice]:
        """Yield n draws in chunks that fit the byte budget."""
        network = self.problem.network
        each = (3 * network.selection.size + 4 * (network.size + self.problem.observation.rows)) * 8
        return chunks(n, each, network.device)

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
