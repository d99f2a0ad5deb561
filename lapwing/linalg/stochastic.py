"""Stochastic descent for posterior samples of ridge regression: each step uses one part of the design.

The system (XᵀX + s I) z = √s ζ + Xᵀ ε, for K rows of noise at once, is the minimum of two objectives with the same
gradient,

    L (z) = ½ |X z - ε|² + ½ s |z - ζ/√s|²         ("classic", noise in the data term),
    L'(z) = ½ |X z|²     + ½ s |z - ζ/√s - Xᵀε/s|²  ("reduced", noise in the regulariser).

``sgd`` minimises one of them. ``sdd`` works on the dual: the solution is z = ζ/√s + Xᵀ a for the minimum a of
½ aᵀ(XXᵀ + s I)a - aᵀ(ε - X ζ/√s). Both return the residual that they reached; the caller decides
whether it is small enough (``Solution.require_convergence``).

The steps that descent takes grow with the condition number, λ/s for the largest eigenvalue λ of XᵀX, which is often
above a hundred thousand. ``descend_in_rounds`` therefore solves for the leading eigenvectors directly and descends in
the other directions only. Every round starts from the residual of the one before, so the noise of the gradients falls
with it and the error falls geometrically.
References: Antorán et al. 2023 (objectives); Lin et al. 2024 (dual); Frangella et al. 2023 (leading eigenvectors).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.linalg.dense import cholesky, eigh
from lapwing.linalg.krylov import RandomisedEigenpairs, residual_sizes
from lapwing.linalg.operators import (
    TINY,
    DeflatedDesign,
    Design,
    DesignRows,
    Solution,
    back_product,
    gram_product,
    parts_with_rows,
)
from lapwing.runtime.threads import normal


@dataclass(frozen=True, eq=False)
class Inducing:
    r"""The covariance S of q(u) = N(·, S) with prior N(0, I), given by its precision $S^{-1} = I + B$.

    A mini-batch gives an unbiased estimate of the optimal precision, and a natural-gradient step of length ρ is the
    average (1 - ρ) old + ρ new: there is no learning rate to tune, and one step of length one on all data reaches the
    optimum. Batches on which the network is far off may contribute a negative B; only the positive part of the average
    over all batches is used.
    """

    average: Tensor  # (r, r), the average of I + B over batches

    @classmethod
    def before_data(cls, size: int, like: Tensor) -> Inducing:
        """Return the prior: S = I."""
        return cls(torch.eye(size, dtype=torch.float64, device=like.device))

    def update(self, information: Tensor, step: float) -> Inducing:
        """Return the Gaussian after a step of this length towards the precision I + ``information``."""
        return Inducing((1 - step) * self.average + step * (self._eye + information))

    def times(self, factor: float) -> Inducing:
        """Return the Gaussian with B times a factor, which is the effect of a prior variance times that factor."""
        return Inducing(self._eye + factor * (self.average - self._eye))

    @property
    def _eye(self) -> Tensor:
        """The identity (r, r)."""
        return torch.eye(len(self.average), dtype=self.average.dtype, device=self.average.device)

    @cached_property
    def information(self) -> Tensor:
        """B (r, r): the positive semi-definite part of the average minus I."""
        information = self.average - self._eye
        shift = 1e-12 * float(self.average.detach().diagonal().abs().max())
        if int(torch.linalg.cholesky_ex(information + shift * self._eye).info) == 0:
            return information
        values, vectors = eigh(0.5 * (information + information.mT))
        return (vectors * values.clamp_min(0)) @ vectors.mT

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (r,) and eigenvectors (r, r) of B."""
        values, vectors = eigh(self.information)
        return values.clamp_min(0), vectors

    @cached_property
    def precision(self) -> Tensor:
        """S⁻¹ = I + B (r, r)."""
        return self._eye + self.information

    @cached_property
    def _factor(self) -> Tensor:
        """The Cholesky factor (r, r) of the precision."""
        return cholesky(self.precision, "the inducing variables")

    @cached_property
    def reduction(self) -> Tensor:
        """I - S (r, r): the share of the prior variance that the data remove."""
        return self._eye - torch.cholesky_inverse(self._factor)

    def divergence(self) -> Tensor:
        """Return KL(q || prior) without the term of the mean: ½ (tr S - r - log det S)."""
        return self._factor.diagonal().log().sum() - 0.5 * self.reduction.diagonal().sum()

    def posterior_covs(self, prior: Tensor, rows: Tensor, factors: tuple[float, ...]) -> Iterator[Tensor]:
        """Yield ``posterior_cov`` for the prior variance times each factor; all of them cost little more than one."""
        values, turn = self._eigen
        turned = rows @ turn
        for factor in factors:
            share = factor * values / (1 + factor * values)
            yield factor * (prior - (turned * share) @ turned.mT)

    def posterior_cov(self, prior: Tensor, rows: Tensor) -> Tensor:
        """Return the covariance (B, C, C) of outputs, from their prior covariance and whitened rows (B, C, r)."""
        return prior - rows @ self.reduction @ rows.mT


OBJECTIVES = ("reduced", "classic")
TAIL_SHARE = 0.1  # share of the steps whose iterates sgd averages
AVERAGING_WINDOW = 100  # sdd averages geometrically over about 1 / AVERAGED of its steps
MOMENTUM = 0.9
POWER_ITERATIONS = 10  # power iterations for the largest eigenvalues
RESTARTS = 20  # restarts from the residual among which the passes are divided


@dataclass(frozen=True, eq=False)
class Perturbed:
    """The system (XᵀX + s I) z = √s ζ + Xᵀ ε; its solution is z ~ N(0, (XᵀX + s I)⁻¹).

    ``zeta`` (K, P) and ``eps`` (K, rows) are standard normal; ``shift`` is s, above zero.
    """

    design: Design
    zeta: Tensor
    eps: Tensor
    shift: float

    @property
    def prior(self) -> Tensor:
        """ζ / √s (K, P): samples of the prior, where every descent starts."""
        return self.zeta.double() / self.shift**0.5

    @cached_property
    def rhs(self) -> Tensor:
        """√s ζ + Xᵀ ε (K, P), by one pass over the design."""
        return self.shift**0.5 * self.zeta.double() + back_product(self.design, self.eps)

    def objective(self, name: str) -> RidgeObjective:
        """Return the objective with this name, "reduced" or "classic"."""
        if name == "reduced":
            return RidgeObjective(None, self.rhs, self.shift)
        return RidgeObjective(self.eps, self.shift**0.5 * self.zeta.double(), self.shift)

    def solution(self, z: Tensor, iterations: int, tolerance: float) -> Solution:
        """Return z as a solution with its residuals, computed by one product."""
        residual = self.rhs - gram_product(self.design, z) - self.shift * z
        return Solution(z, residual.norm(dim=1) / self.rhs.norm(dim=1).clamp_min(TINY), iterations, tolerance)


@dataclass(frozen=True, eq=False)
class RidgeObjective:
    """The function ½ |X z - target|² + ½ s |z|² - z · pull, for every row z.

    ``target`` (K, rows) is the noise in the data term, zero if None. ``pull`` (K, P) is the noise in the regulariser,
    whose gradient is exact at every step.
    """

    target: Tensor | None
    pull: Tensor
    shift: float

    def data_gradient(self, z: Tensor, part: DesignRows, rows: slice) -> Tensor:
        """Return the gradient (K, P) of the data term of one part."""
        outputs = part.forward(z)
        return part.back(outputs if self.target is None else outputs - self.target[:, rows]).double()

    def estimate(self, z: Tensor, part: DesignRows, rows: slice, count: int) -> Tensor:
        """Estimate the gradient (K, P) from one of ``count`` parts; the mean over all parts is the gradient."""
        return count * self.data_gradient(z, part, rows) + (self.shift * z - self.pull)


def sgd(
    system: Perturbed,
    *,
    objective: str = "reduced",
    epochs: int = 100,
    generator: torch.Generator | None = None,
    tolerance: float = 1e-2,
    step: float | None = None,
) -> Solution:
    """Solve a system by stochastic gradients with Nesterov's momentum, linearly decreasing steps and a final average.

    With several parts the gradients differ even at the solution, so the error falls slowly, with the step length.
    ``step`` is the first step length; None computes ``Passes.step``.
    Cost: two products with X for each pass, 4 K P numbers.

    >>> from lapwing.linalg.operators import MatrixDesign
    >>> noise = torch.ones(1, 2).double(), torch.tensor([[1.0, 3.0]]).double()
    >>> sgd(Perturbed(MatrixDesign(torch.eye(2).double()), *noise, shift=4.0)).x  # (2 + noise) / 5
    tensor([[0.6000, 1.0000]], dtype=torch.float64)
    """
    passes = Passes.over(system.design)
    step = passes.step(system.shift, generator) if step is None else step
    z = primal_descent(system, passes, step, system.prior, objective, epochs, generator)
    return system.solution(z, epochs * passes.count, tolerance)


def primal_descent(
    system: Perturbed,
    passes: Passes,
    step: float,
    z: Tensor,
    objective: str,
    epochs: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Return the average (K, P) of the last iterates of ``sgd`` from z (K, P), with the first step of this length."""
    function = system.objective(objective)
    steps, averaged = epochs * passes.count, 0
    velocity, mean = torch.zeros_like(z), torch.zeros_like(z)
    for t, (part, rows) in enumerate(passes.shuffle(epochs, generator)):
        ahead = z + MOMENTUM * velocity
        velocity *= MOMENTUM
        velocity -= step * (1 - t / steps) * function.estimate(ahead, part, rows, passes.count)
        z = z + velocity
        if t >= (1 - TAIL_SHARE) * steps - 1:
            averaged += 1
            mean += (z - mean) / averaged
    return mean


def dual_descent(
    system: Perturbed,
    passes: Passes,
    epochs: int,
    generator: torch.Generator | None = None,
    step: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the geometric average of the dual coefficients a (K, rows), and of Xᵀ a (K, P).

    They converge to the solution of (XXᵀ + s I) a = ε - X ζ/√s. The gradient for the coefficients of one part is exact
    and vanishes at the solution, so no noise remains there.
    """
    step = passes.step(system.shift, generator, dual=True) if step is None else step
    share = min(1.0, AVERAGING_WINDOW / (epochs * passes.count))
    count, prior = system.design.rows, system.prior
    # One tensor for a and u = Xᵀ a: momentum and average are linear, so they keep the relation between the two.
    point = torch.cat([torch.zeros_like(system.eps, dtype=torch.float64), torch.zeros_like(prior)], 1)
    velocity, mean = torch.zeros_like(point), torch.zeros_like(point)
    for part, rows in passes.shuffle(epochs, generator):
        ahead = point + MOMENTUM * velocity
        outputs = part.forward(prior + ahead[:, count:]).double()
        change = step * passes.count * (outputs + system.shift * ahead[:, rows] - system.eps[:, rows])
        velocity *= MOMENTUM
        velocity[:, rows] -= change
        velocity[:, count:] -= part.back(change)
        point += velocity
        mean.lerp_(point, share)
    return mean[:, :count], mean[:, count:]


def sdd(
    system: Perturbed, *, epochs: int = 100, generator: torch.Generator | None = None, tolerance: float = 1e-2
) -> Solution:
    """Solve a system by stochastic dual descent, whose error falls geometrically; the cost is that of ``sgd``.

    >>> from lapwing.linalg.operators import MatrixDesign
    >>> noise = torch.ones(1, 2).double(), torch.tensor([[1.0, 3.0]]).double()
    >>> sdd(Perturbed(MatrixDesign(torch.eye(2).double(), part=1), *noise, shift=4.0), tolerance=1e-6).x
    tensor([[0.6000, 1.0000]], dtype=torch.float64)
    """
    passes = Passes.over(system.design)
    _, back = dual_descent(system, passes, epochs, generator)
    return system.solution(system.prior + back, epochs * passes.count, tolerance)


def descend_in_rounds(
    system: Perturbed,
    leading: RandomisedEigenpairs,
    *,
    dual: bool,
    objective: str = "reduced",
    epochs: int = 400,
    generator: torch.Generator | None = None,
    tolerance: float = 1e-2,
) -> Solution:
    """Solve a system by its leading eigenvectors and, in the other directions, by rounds of ``sgd`` or ``sdd``.

    Each round solves for the residual of the one before; the last one is the first that reaches the tolerance, or
    the one that completes ``epochs`` passes. The eigenvectors may be approximate: the residual is that of the whole
    system, in the metric of their preconditioner. It is relative to the prior's part of the right-hand side, so that
    ``tolerance`` is the error in standard deviations, averaged over all directions, as for conjugate gradients.

    >>> from lapwing.linalg.operators import MatrixDesign
    >>> noise, none = (torch.ones(1, 2).double(), torch.tensor([[1.0, 3.0]]).double()), torch.zeros(0).double()
    >>> system = Perturbed(MatrixDesign(torch.eye(2).double(), part=1), *noise, shift=4.0)
    >>> descend_in_rounds(system, RandomisedEigenpairs(none, none.new_zeros(0, 2)), dual=True, tolerance=1e-6).x
    tensor([[0.6000, 1.0000]], dtype=torch.float64)
    """
    design, shift = DeflatedDesign(system.design, leading.vectors), system.shift
    passes = Passes.over(design)
    step = passes.step(shift, generator, dual=dual)
    sizes = residual_sizes(shift**0.5 * system.zeta, system.rhs, tolerance).clamp_min(TINY)
    apply = lambda v: gram_product(system.design, v) + shift * v
    z, residual, noise, left = torch.zeros_like(system.rhs), system.rhs, system.eps, epochs
    last, image = torch.zeros_like(z), torch.zeros_like(z)
    while True:
        first, taken = left == epochs, min(-(-epochs // RESTARTS), left)
        zeta = design.outside(system.zeta if first else residual / shift**0.5)
        rest = Perturbed(design, zeta, noise, shift)
        if dual:
            move = rest.prior + dual_descent(rest, passes, taken, generator, step)[1]
        else:
            start = rest.prior if first else torch.zeros_like(z)
            move = primal_descent(rest, passes, step, start, objective, taken, generator)
        move += residual @ leading.vectors.mT / (leading.values + shift) @ leading.vectors
        # The eigenvectors are approximate, which couples the two parts: the moves are conjugate directions of the
        # whole system, each as long as lowers its energy most.
        move -= _ratios(move, image, last, image) * last
        last, image = move, apply(move)
        z, left, noise = z + _ratios(move, residual, move, image) * move, left - taken, torch.zeros_like(noise)
        residual = system.rhs - apply(z)
        # Along an eigenvector the error is the residual over its eigenvalue: the rounding of float32 products in the
        # largest ones does no harm.
        worst = shift**0.5 * leading.power(residual, shift, -0.5).norm(dim=1) / sizes
        if not left or not bool((worst > tolerance).any()):
            return Solution(z, worst, (epochs - left) * passes.count, tolerance)


def _ratios(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return a·b / c·d for every row, (K, 1); zero where c·d is zero."""
    return ((a * b).sum(1) / (c * d).sum(1).clamp_min(TINY)).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class Passes:
    """The parts of a design with their rows, for repeated passes; in random order unless the design is streamed."""

    design: Design
    parts: tuple[tuple[DesignRows, slice], ...] | None  # None if the design is streamed
    count: int

    @classmethod
    def over(cls, design: Design) -> Passes:
        """Return the passes over a design. A streamed design takes one pass to count its parts."""
        if design.streamed:
            return cls(design, None, sum(1 for _ in design))
        parts = tuple(parts_with_rows(design))
        return cls(design, parts, len(parts))

    def shuffle(self, epochs: int, generator: torch.Generator | None) -> Iterator[tuple[DesignRows, slice]]:
        """Yield the parts of several passes; every part comes once in each pass."""
        for _ in range(epochs):
            if self.parts is None:
                yield from parts_with_rows(self.design)
                continue
            device = None if generator is None else generator.device
            for i in torch.randperm(self.count, generator=generator, device=device).tolist():
                yield self.parts[i]

    def step(self, shift: float, generator: torch.Generator | None, dual: bool = False) -> float:
        """Return a step length that is stable with the momentum: 1 / (λ + (λ_S - λ) / (1 - momentum)).

        λ is the largest eigenvalue of XᵀX + s I and λ_S that of the worst part, times the number of parts because its
        gradient is multiplied by that. For one part this is Nesterov's 1 / λ; the difference λ_S - λ is due to noise,
        which momentum accumulates over 1 / (1 - momentum) steps.
        """
        whole, part = self.largest(generator)
        part = self.count * part + (self.count * shift if dual else shift)
        whole = whole + shift
        return 1 / (whole + max(0.0, part - whole) / (1 - MOMENTUM))

    def largest(self, generator: torch.Generator | None) -> tuple[float, float]:
        """Return the largest eigenvalues of XᵀX and of X_S X_Sᵀ over the parts S, by power iterations: from below."""
        like = torch.empty(0, dtype=torch.float64, device=self.design.like.device)
        v, u = normal((1, self.design.size), generator, like), normal((1, self.design.rows), generator, like)
        whole, worst = 0.0, 0.0
        for _ in range(POWER_ITERATIONS):
            v, image, worst = v / v.norm().clamp_min(TINY), torch.zeros_like(v), 0.0
            for part, rows in parts_with_rows(self.design):
                image += part.back(part.forward(v))
                u[:, rows] = part.forward(part.back(u[:, rows] / u[:, rows].norm().clamp_min(TINY))).double()
                worst = max(worst, float(u[:, rows].norm()))
            v, whole = image, float(image.norm())
        return max(whole, worst), worst
