"""Solves with the covariance of the measurements, and its log-determinant, by products alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.inverse.problem import InverseProblem
from lapwing.linalg.cg import block_conjugate_gradients
from lapwing.linalg.logdet import lanczos_quadrature, random_signs
from lapwing.linalg.operators import TINY, Solution
from lapwing.linalg.randomised import Eigenpairs, randomised_eigenpairs

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
    error: float
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
    pairs: Eigenpairs
    seed: int

    @classmethod
    def of(cls, problem: InverseProblem, noise: Tensor, seed: int, pairs: Eigenpairs | None = None) -> MatrixFreeSolver:
        """Return the solver; without eigenpairs they cost two products of up to 210 rows."""
        rows, generator = problem.observation.rows, torch.Generator().manual_seed(seed)
        if pairs is None:
            pairs = randomised_eigenpairs(problem.kernel, rows, min(RANK, rows), generator, problem.network.device)
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
            block_conjugate_gradients(
                self.product,
                part,
                root=lambda rows: self.pairs.power(rows, self._shift, -0.5),
                tolerance=TOLERANCE[self.problem.network.dtype],
            )
            for part in rhs.double().split(MOST)
        ]
        x, residuals = (torch.cat([getattr(p, name) for p in parts]) for name in ("x", "residuals"))
        return Solution(x, residuals, max(part.iterations for part in parts), parts[0].tolerance)

    def deviance(self) -> Tensor:
        """Return rᵀ K⁻¹ r plus an estimate of log det K, differentiable in the prior's values and the noise.

        log det K = log det P + log det(P^-½ K P^-½), where the second term is near zero and estimated from probes by
        Lanczos quadrature. The gradient is the mean of (K⁻¹ P^½ z)ᵀ ∂K (P^-½ z) over the same probes z. The quadratic
        form is the largest value of 2 rᵀ a - aᵀ K a, at a = K⁻¹ r: what the solve misses enters squared.
        """
        solves, prior = self._solves, self.problem.prior
        slope = (solves.weights_left * prior.multiply(solves.weights_right)).sum(1).mean()
        slope = slope + self.noise * (solves.left * solves.right).sum(1).mean()
        logdet = solves.logdet + slope - slope.detach()
        length = solves.weights_a @ prior.multiply(solves.weights_a) + self.noise * (solves.a @ solves.a)
        return logdet + 2 * (self.problem.prior_residual @ solves.a) - length

    @property
    def logdet_error(self) -> float:
        """The standard error of the log-determinant over the probes; the quadratic form has none."""
        return self._solves.error

    @cached_property
    def _solves(self) -> Solves:
        problem, shift = self.problem, self._shift
        probes = self._probes()
        with torch.no_grad():
            root = lambda rows: self.pairs.power(rows, shift, -0.5)
            quadrature = lanczos_quadrature(lambda v: root(self.product(root(v))), probes, STEPS)
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
        return random_signs(PROBES, rows, torch.Generator().manual_seed(self.seed + 1), device)
