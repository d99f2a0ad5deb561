"""Bayesian ridge regression through products with the design: samples and log-determinant for any precision.

A design X (rows, P) with unit noise and the prior N(0, (α D)⁻¹), D a fixed diagonal, gives the posterior precision
XᵀX / φ + α D. In coordinates √D θ that is a Gram matrix plus αφ times the identity, divided by φ. One Krylov basis of
the Gram matrix serves every α and φ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.core.random import derived_generator, normal, uniform
from lapwing.linalg.cg import residual_sizes, solve_samples
from lapwing.linalg.design import Design, ScaledDesign, back_product, gram_product
from lapwing.linalg.krylov import BlockKrylov, block_krylov
from lapwing.linalg.logdet import DeflatedSpectrum, Logdet, random_signs
from lapwing.linalg.operators import Solution
from lapwing.linalg.randomised import Eigenpairs, randomised_eigenpairs
from lapwing.linalg.stochastic import Perturbed

OUTSIDE = 1e-5  # relative part of a row outside the basis that counts as rounding, in single precision
FIRST = 4  # products that a basis starts with
LEADING = 256  # eigenvectors that stochastic descent leaves out
TURNS = 3  # products that find them
GROWTH = 2  # products between two looks at the residual of its solves
log = logging.getLogger(__name__)


@dataclass(eq=False)
class RidgeCache:
    """Computed facts about the Gram matrix of one ``Ridge``; mutable, and never shared between ridges.

    They depend only on the fields of that ridge: a Krylov basis, which grows when a solve needs it to, the estimated
    spectra by number of probes and steps, and the last ridge that was returned for another scale.
    """

    basis: BlockKrylov | None = None
    spectra: dict[tuple[int, int], DeflatedSpectrum] = field(default_factory=dict)
    rescaled: Ridge | None = None


@dataclass(frozen=True, eq=False)
class Ridge:
    """A ridge regression and the noise of K posterior samples, the same noise for every precision.

    Args:
        design: the matrix X (rows, P).
        scale: the diagonal D (P,) of the prior precision; None for the identity.
        prior: standard normal noise ζ (K, P).
        back: Xᵀ ε (K, P) for standard normal ε.
        seed: draws the probes of log-determinants.
        width: the largest number of rows in a block of the basis.
        bytes: the most memory that the basis may take.
        eps: ε (K, rows) itself, which stochastic descent needs.
    """

    design: Design
    scale: Tensor | None
    prior: Tensor
    back: Tensor
    seed: int = 0
    width: int = 16
    bytes: int = 4 * 2**30
    eps: Tensor | None = None

    @classmethod
    def drawn(
        cls,
        design: Design,
        samples: int,
        generator: torch.Generator | None,
        scale: Tensor | None = None,
        keep: bool = False,
        **settings: Any,
    ) -> Ridge:
        """Return a ridge with noise from the generator; ``keep`` keeps ε. Cost: one pass over the design."""
        like = torch.empty(0, dtype=torch.float64, device=design.like.device)
        # Independent of features drawn from the same seed, which would equal the noise otherwise.
        generator = derived_generator(generator, like)
        prior = normal((samples, design.size), generator, like)
        eps = normal((samples, design.rows), generator, like)
        # Independent of the noise: the basis starts from the noise, and probes must not be correlated with it.
        settings.setdefault("seed", int(uniform((1,), generator, like) * 2**53))
        return cls(design, scale, prior, back_product(design, eps), eps=eps if keep else None, **settings)

    @cached_property
    def cache(self) -> RidgeCache:
        """The cache of this ridge. ``dataclasses.replace`` makes a ridge with an empty one."""
        return RidgeCache()

    @property
    def float64_hint(self) -> str:
        """The end of an error's advice: to compute in float64, unless the products already are."""
        return "" if self.design.like.dtype == torch.float64 else ", or compute in float64"

    def product(self, v: Tensor) -> Tensor:
        """Return D^-½ XᵀX D^-½ v."""
        return self._unscaled(gram_product(self.design, self._unscaled(v)))

    def samples(self, alpha: float, phi: float, tolerance: float, start: Tensor | None = None) -> Solution:
        """Solve for K draws from N(0, Λ⁻¹), Λ = XᵀX / φ + α D, from the same noise for every α and φ.

        The first draws come from the basis, which grows until it contains them. The others are solved for by conjugate
        gradients with the basis as preconditioner, from ``start`` (K, P) if samples nearby are known. Residuals are
        relative to the prior's part of the right-hand side, √shift |ζ|. The error e of a draw then has
        eᵀ Λ e ≤ (tolerance |ζ|)²: in the mean over all directions it is ``tolerance`` standard deviations. A residual
        relative to the whole right-hand side, which the data may dominate, would not imply that.

        Raises:
            NumericalError: a draw does not reach the tolerance.
        """
        shift = alpha * phi
        basis = self.reaching(shift, tolerance)
        first = self._first_samples(basis, shift, tolerance)
        done = self._n_first if first.converged else 0
        rows, residuals, iterations = [first.x[:done]], [first.residuals[:done]], basis.products
        if done < len(self.prior):
            near = None if start is None else start[done:].double() * self._root / phi**0.5
            rhs, apply = self._rhs(shift, slice(done, None)), lambda v: self.product(v) + shift * v
            noise = shift**0.5 * self.prior[done:]
            rest = solve_samples(apply, rhs, noise, tolerance, self.float64_hint, near, basis.inverse_root(shift))
            rows, residuals, iterations = [*rows, rest.x], [*residuals, rest.residuals], iterations + rest.iterations
        solved = self._unscaled(torch.cat(rows) * phi**0.5)
        return Solution(solved, torch.cat(residuals), iterations, tolerance)

    def descended(self, alpha: float, phi: float, descend: Callable[[Perturbed, Eigenpairs], Solution]) -> Solution:
        """Solve for the draws of ``samples`` by stochastic descent, beside the leading eigenvectors."""
        if self.eps is None:
            raise ValueError("descent needs ε itself; expected a Ridge.drawn(..., keep=True).")
        design = self.design if self.scale is None else ScaledDesign(self.design, self.scale.rsqrt())
        solution = descend(Perturbed(design, self.prior, self.eps, alpha * phi), self.leading)
        return replace(solution, x=self._unscaled(solution.x * phi**0.5))

    @cached_property
    def leading(self) -> Eigenpairs:
        """At most ``LEADING`` leading eigenpairs of the Gram matrix, as many as fit into a third of ``bytes``."""
        rank = max(1, min(LEADING, self.bytes // (24 * self.design.size)))
        generator = torch.Generator().manual_seed(self.seed)
        return randomised_eigenpairs(self.product, self.design.size, rank, generator, self.prior.device, TURNS)

    def rescaled(self, scale: Tensor) -> Ridge:
        """Return a ridge with the same noise and another D (P,); the last one is cached."""
        last = self.cache.rescaled
        if last is None or last.scale is None or not torch.equal(last.scale, scale):
            self.cache.rescaled = last = replace(self, scale=scale)
        return last

    def gram(self, rows: Tensor) -> Tensor:
        """Return XᵀX θ for every row (n, P): from the basis for rows inside it, as samples are; else by a pass."""
        basis = self.cache.basis
        if basis is None:
            return gram_product(self.design, rows)
        scaled = rows.double() * self._root
        images, outside = basis.image(scaled)
        images = images * self._root
        beyond = outside > OUTSIDE * scaled.norm(dim=1)
        if bool(beyond.any()):
            images[beyond] = gram_product(self.design, rows[beyond])
        return images

    @property
    def basis(self) -> BlockKrylov:
        """The Krylov basis of the Gram matrix, as large as solves have needed so far."""
        basis = self.cache.basis
        if basis is None:
            start = torch.cat([self.prior[: self._n_first], self._unscaled(self.back)[: self._n_first]])
            rounding = 10 * float(torch.finfo(self.design.like.dtype).eps)
            basis = block_krylov(self.product, start, FIRST, tolerance=rounding, max_basis=self._max_basis)
            self.cache.basis = basis
        return basis

    def reaching(self, shift: float, tolerance: float) -> BlockKrylov:
        """Return the basis, grown until it solves for the first samples at this shift or may not grow any more."""
        basis = self.basis
        while not basis.exhausted and len(basis.rows) + len(basis.ahead) <= self._max_basis:
            solution = self._first_samples(basis, shift, tolerance)
            log.info("residual %.3g at shift %.3g, from a basis of %d rows after %d products",
                     float(solution.residuals.max()), shift, len(basis.rows), basis.products)  # fmt: skip
            if solution.converged:
                break
            self.cache.basis = basis = basis.extended(self.product, GROWTH, max_basis=self._max_basis)
        return basis

    def logdet(self, shift: Tensor, probes: int, steps: int) -> Logdet:
        """Estimate log det(I + A/shift) for A = D^-½ XᵀX D^-½, differentiable in the shift.

        Eigenvalues that the basis contains are exact; the rest is estimated. Cost: that of ``spectrum``, once for all
        shifts.
        """
        return self.spectrum(probes, steps).logdet(shift)

    def spectrum(self, probes: int, steps: int) -> DeflatedSpectrum:
        """Estimate the spectrum of the Gram matrix; again only if the basis has doubled since the last estimate.

        Cost: ``steps`` products of ``probes`` rows.
        """
        cached = self.cache.spectra.get((probes, steps))
        if cached is None or len(self.basis.rows) >= 2 * cached.rank:
            rows = random_signs(probes, self.design.size, torch.Generator().manual_seed(self.seed), self.prior.device)
            cached = DeflatedSpectrum.of(self.product, self.basis, rows, steps)
            self.cache.spectra[probes, steps] = cached
        return cached

    @property
    def _root(self) -> Tensor | float:
        """√D."""
        return 1.0 if self.scale is None else self.scale.sqrt()

    def _unscaled(self, rows: Tensor) -> Tensor:
        """Return D^-½ times the rows."""
        return rows if self.scale is None else rows / self._root

    @property
    def _n_first(self) -> int:
        """The number of samples that the basis starts from."""
        return max(1, min(len(self.prior), self.width // 2))

    @property
    def _max_basis(self) -> int:
        """The number of basis rows that ``bytes`` allows; at least those that the basis starts from."""
        return max(2 * self._n_first, self.bytes // (8 * self.design.size))

    def _rhs(self, shift: float, some: slice) -> Tensor:
        """Return the right-hand sides √shift ζ + D^-½ Xᵀε of some samples."""
        return shift**0.5 * self.prior[some] + self._unscaled(self.back[some])

    def _first_samples(self, basis: BlockKrylov, shift: float, tolerance: float) -> Solution:
        """Solve for the first samples in the basis, whether they converge or not."""
        count = self._n_first
        sizes = residual_sizes(shift**0.5 * self.prior[:count], self._rhs(shift, slice(count)), tolerance)
        # The right-hand sides √shift ζ + Xᵀε are combinations of the start block [ζ_1.., Xᵀε_1..].
        eye = torch.eye(count, dtype=torch.float64, device=basis.start.device)
        weights = torch.cat([shift**0.5 * eye, eye], 1)
        return basis.solve(weights, shift, tolerance=tolerance, sizes=sizes)
